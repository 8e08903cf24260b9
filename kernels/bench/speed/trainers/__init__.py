"""The trainers that `peers.py` compares, and what `steps.py` shares with it: how each makes its step.

arms            the trainers by name
variants        how they lay out a batch, prepare the model and compute the loss
steps           their training steps: plain loops, and captured graphs
work            the model shape, weights and texts that all of them get
attention       torch's variable-length attention, for transformers
flash_attn      a stand-in for the package flash-attn, for Unsloth
four_bit        a base model in 4 bits
reference       the loss and the gradients of each batch in fp32
limit           the least time that a step can take on a GPU
timer           times steps, and their parts
runs            runs the processes of all trainers in turn
process         checks and times one trainer, in a process of its own
"""
