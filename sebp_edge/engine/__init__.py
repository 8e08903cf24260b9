"""Data sets -> weights, and weights -> text. Knows no document, name or store.

Internal: import from `sebp_edge` or `sebp_edge.research`.

models    base models, adapters attached to them, generation
sparse    the sparse backward pass: the drop-in, hoisted models, and the rows that they compute
memory    what a training takes: options, footprint, plan, guard
training  steps, evaluations, the best state, recovery when memory runs out
"""
