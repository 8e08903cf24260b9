"""Predicts the memory of a training, plans it within a budget, and keeps it there.

Internal: import from `sebp_edge` or `sebp_edge.research`.

Before anything is loaded, in the order to read:

- `options`: what a training holds in memory at once.
- `shape_reader`: reads a decoder's shape, and how its blocks run, from its config alone (`sebp_edge.models.shape` has
  the types).
- `setup`: shape, recipe, device and options together.
- `activations`: counts what one micro-batch holds, from what each patch in `sebp_edge.patches` counts for itself.
- `footprint`: counts the whole training, by purpose.
- `work`: sizes of a training's micro-batches, and their cost.
- `target`: the device that is planned for.
- `plan`: chooses the first way to train that fits into a budget.
- `refusal`: refuses models that are too large, without a budget.

During a training:

- `guard`: caps torch's allocator on a GPU, and checks what this process and others hold.
"""
