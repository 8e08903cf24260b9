"""Analyzes the sparsity of gradients, examines the machine, and benchmarks training steps.

Internal: import from `sebp_edge` or `sebp_edge.research`.
"""
