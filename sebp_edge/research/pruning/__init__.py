"""N:M sparsity: trains linear layers so that of each M neighbouring weights only N are left.

Internal: import from `sebp_edge` or `sebp_edge.research`.

pruning_phases    dense phase, decay and sparse phase: what each method does with the pruned weights at each step
layers_to_prune   finds the layers to prune
nm_sparse         prunes them at each step of your own training loop, and keeps the dense weights
semi_structured   inference with 2:4 weights by torch's sparse kernels
"""
