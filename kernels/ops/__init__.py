"""SEBP's operations: tensors in, tensors out. `backend` alone chooses between our kernels and plain PyTorch.

sparse_linear          Y = X Wᵀ + b, whose backward pass computes the rows of dL/dY that carry gradient and no others
lora_linear            projections of one X with their LoRA adapters, in one Function
linear_cross_entropy   the loss from hidden states, without ever holding all logits
"""

from sebp_edge.ops.linear_cross_entropy import linear_cross_entropy
from sebp_edge.ops.lora_linear import LoraProjection, lora_linear
from sebp_edge.ops.rows import DETECT, Rows
from sebp_edge.ops.sparse_linear import sparse_linear

__all__ = ["DETECT", "LoraProjection", "Rows", "linear_cross_entropy", "lora_linear", "sparse_linear"]
