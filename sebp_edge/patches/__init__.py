"""What takes the place of a part of a model, each with its undo.

patch             a replaced forward is a link over what lay beneath it; handles are removed in any order
agreement         whether two ways to compute the same agree, with all tolerances
attention         a block's attention and rotary embedding as one operation
norms_and_mlps    norms and gates by our own operations, made again instead of kept
lora              PEFT's plain LoRA layers, each group of one input in one Function
kept_inputs       one copy of an input for all layers that read it
loss              a decoder's loss without its logits
last_layer        the last layer on loss rows only
tied_embedding    an embedding that is the head too: one gradient for both
checkpoints       blocks of which only the input is kept, on the device or on the host
mlp_pieces        MLPs that run on a piece of the rows at a time
execution         how blocks run, as far as the memory that each of these counts for itself depends on it
"""
