"""Patches: replacements for parts of a model, which can be undone.

Internal: import from `sebp_edge` or `sebp_edge.research`.

patch             the base class: replaces forwards and puts them back, in any order
agreement         compares a replacement with the model's own code; defines all tolerances
attention         a block's attention and rotary embedding as one operation
norms_and_mlps    norms and gates by our own operations, recomputed instead of kept
fused_lora        PEFT's plain LoRA layers, those that read one input in one Function
loss              a decoder's loss without all its logits in memory at once
last_layer        the last layer on loss rows only
restarts          layers whose state must restart at each text, on packed texts
packed_layers     those of them that run on packed texts, by our own operations
tied_embedding    an embedding tied to the head: one gradient for both
checkpoints       activation checkpoints of blocks, with inputs on the device or the host
mlp_chunks        MLPs that run on one chunk of rows at a time
stops             checks within a pass, which may end it
state             what trials of a model depend on, compared at every call
counts            the memory of patched blocks, for plans; imports no torch
"""
