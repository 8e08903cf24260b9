"""Rules that drop rows of dL/dY which carry gradient, for `sparsify(rows=...)`: the paper's top-N, and others.

Internal: import from `sebp_edge` or `sebp_edge.research`.

selection     the rules, their state in each layer, and what they dropped
row_rules     the same rules as functions of tensors
histogram     histograms of magnitudes, and the knee of their distribution
"""
