"""Predicts the memory of a training, plans it within a budget, and enforces the budget.

Internal: import from `sebp_edge` or `sebp_edge.research`.

Before anything is loaded, in reading order; only shape_reader, kept_bytes, this_machine and refusal
import torch:

memory_options  what a training holds in memory at once
shape_reader    reads a decoder's shape, and how its blocks run, from its config (types: `models.shape`)
kept_bytes      measures what blocks of no known kind keep
setup           shape, recipe, device and options together
activations     predicts the memory of one micro-batch, as the sum of what each patch in `sparse.patches` predicts
footprint       the memory of the whole training, by purpose
prediction      predicts that
amount_of_work  the sizes of a training's micro-batches, and their cost
target          the device that the plan is for; this_machine describes one that is here, and known_machine
                what that once found, for processes without torch
budget          how much memory an adaptation may use
seconds         estimates how long a training takes
memory_plan     the options of a training, with its memory and time
choosing        chooses the first set of options that fits into a budget
refusal         refuses models that are too large, without a budget

During a training:

guard           caps torch's allocator on a GPU, and checks the memory of this process and the free memory
"""
