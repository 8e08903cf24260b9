"""SEBP's operations: tensors in, tensors out. This is the only place that chooses an implementation by device.

sparse_linear   Y = X Wᵀ + b, whose backward pass computes the rows of dL/dY that carry gradient and no others
"""

from sebp_edge.ops.sparse_linear import DETECT, sparse_linear

__all__ = ["DETECT", "sparse_linear"]
