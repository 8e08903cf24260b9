"""How much memory a training needs, what it gives up to need less, and how it is kept within that.

Before anything is loaded, in the order to read:

- `options`: what a training may hold at once, by choice.
- `shape_reader`: a decoder's shape and how its blocks run, from its config alone (`sebp_edge.models.shape` has the
  types).
- `setup`: shape, recipe, device and options together.
- `activations`: what one micro-batch holds, from what each patch in `sebp_edge.patches` counts for itself.
- `footprint`: the whole, by what it is for.
- `work`: the sizes of a training's micro-batches.
- `target`: the device that is planned for.
- `plan`: the first way to train that fits into a budget.
- `refusal`: what is refused without a budget.

While it runs:

- `guard`: a cap on a GPU, and a look at what this process and others hold.
"""
