"""Times variants of the training step of one model on one batch, and refuses to time a wrong one.

Internal: import from `sebp_edge` or `sebp_edge.research`.
"""
