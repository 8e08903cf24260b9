"""Code for NVIDIA GPUs: Triton kernels with their launchers, one file per op, and cuBLASLt.

Internal: import from `sebp_edge.ops`.

`reference` documents the functions that both have; docstrings here say only what differs.
"""
