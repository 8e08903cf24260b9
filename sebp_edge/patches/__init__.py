"""Replacements for parts of a model, each with its undo.

Internal: import from `sebp_edge` or `sebp_edge.research`.

patch             the base class: replaces forwards and puts them back, in any order
agreement         compares a replacement with the model's own code; all tolerances
attention         a block's attention and rotary embedding as one operation
norms_and_mlps    norms and gates by our own operations, recomputed instead of kept
lora              PEFT's plain LoRA layers, those of one input in one Function
kept_inputs       one copy of an input for all layers that read it
loss              a decoder's loss without holding all its logits
last_layer        the last layer on loss rows only
tied_embedding    an embedding tied to the head: one gradient for both
checkpoints       activation checkpoints of blocks, with inputs on the device or the host
mlp_pieces        MLPs that run on a piece of the rows at a time
execution         the settings on which the memory of patched blocks depends
"""
