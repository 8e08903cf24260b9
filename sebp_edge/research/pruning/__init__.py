"""N:M sparsity: trains linear layers so that of each M neighbouring weights only N are left.

Internal: import from `sebp_edge` or `sebp_edge.research`.

layers            finds the linear layers that are pruned
pruning_phases    dense phase, decay and sparse phase: what each method does with the pruned weights at each step
pruning           prunes the layers of one model at each step of a training; keeps the dense weights
nm_sparse         the handle for your own training loop
semi_structured   inference with 2:4 weights by torch's sparse kernels
"""
