"""SEBP in a model.

Internal: import from `sebp_edge` or `sebp_edge.research`.

sparsify          level 1, the drop-in: each layer's backward pass computes only the rows that carry gradient
causality         tests on a small batch whether the labels determine which rows of a decoder carry gradient
verification      verifies in the first backward passes that the skipped rows carry no gradient
hoist             level 2: runs a decoder on the active rows only
hoist_if_exact    hoists a decoder if its losses and gradients equal the padded model's
block_by_block    compares passes of a decoder block by block
copy_trial        compares hoisted and padded gradients on a small copy of a decoder's class
hoist_encoder     level 2 for BERT, RoBERTa and DistilBERT
encoder_tokens    turns a tokenizer's output into an encoder's active tokens
"""
