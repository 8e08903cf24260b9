"""N:M sparsity: trains linear layers so that of each M neighbouring weights only N are left.

Internal: import from `sebp_edge` or `sebp_edge.research`.

pruning_phases    dense phase, decay and sparse phase: what each method does with the pruned weights at each step
pruning           finds the layers to prune, and prunes them at each step of a training; keeps the dense weights
nm_sparse         the handle for your own training loop
semi_structured   inference with 2:4 weights by torch's sparse kernels
"""
