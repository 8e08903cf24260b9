"""SEBP in a model.

Internal: import from `sebp_edge` or `sebp_edge.research`.

sparsify          level 1, the drop-in: each layer's backward pass computes only the rows that carry gradient
causality         whether labels show which of a decoder's rows carry gradient, tested on one small batch
verification      verifies in first backward passes that the rows left out carry no gradient
hoist             level 2: runs a decoder on the active rows only
hoist_if_exact    hoists a decoder if its losses stay the padded model's
copy_trial        compares hoisted and padded gradients on a small copy of a decoder's class
hoist_encoder     level 2 for BERT, RoBERTa and DistilBERT
encoder_tokens    a tokenizer's output -> an encoder's active tokens
"""
