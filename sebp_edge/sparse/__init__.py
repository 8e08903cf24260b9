"""SEBP in a model: which rows carry gradient, and the backward pass that computes only those."""
