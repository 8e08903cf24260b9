"""Analyzes the sparsity of gradients, examines the machine, benchmarks steps.

Internal: import from `sebp_edge` or `sebp_edge.research`.

analysis        counts the rows of gradients that are zero or small; gradients and heat_maps are parts of it
lr_range        reads a learning-rate range test
report          writes the analysis as a page
paper           repeats the SEBP paper's tables
doctor          examines the machine
local_models    describes the base models on this machine
bench           benchmarks training steps
"""
