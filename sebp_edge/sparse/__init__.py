"""SEBP in a model.

sparsify          level 1, the drop-in: each layer's backward pass computes the rows that carry gradient
causality         whether labels show a decoder's rows, tried by gradients on one small batch
verification      whether the rows that are left out carry no gradient, verified in first backward passes
hoist             level 2: a decoder runs on the active rows only
hoist_if_exact    hoists a decoder if its losses stay the padded model's
copy_trial        whether hoisted gradients are the padded ones, on a small copy of a decoder's class
hoist_encoder     level 2 for BERT, RoBERTa and DistilBERT
encoder_tokens    what a tokenizer gives an encoder -> active tokens
"""
