"""SEBP's operations: tensors in, tensors out. `backend` alone chooses between our kernels and plain PyTorch.

sparse_linear          Y = X Wᵀ + b, whose backward pass computes the rows of dL/dY that carry gradient and no others
lora_linear            projections of one X with their LoRA adapters, in one Function
linear_cross_entropy   the loss from hidden states, without ever holding all logits
row_norms, select_rows which rows of a gradient to keep, decided on the device; `detect`: those that are not zero
"""

from sebp_edge.ops.linear_cross_entropy import linear_cross_entropy
from sebp_edge.ops.lora_linear import LoraProjection, QuantisedWeight, lora_linear
from sebp_edge.ops.rows import Rows
from sebp_edge.ops.select_rows import SelectedRows, Selector, detect, row_norms, select_rows
from sebp_edge.ops.sparse_linear import sparse_linear

__all__ = [
    "LoraProjection",
    "QuantisedWeight",
    "Rows",
    "SelectedRows",
    "Selector",
    "detect",
    "linear_cross_entropy",
    "lora_linear",
    "row_norms",
    "select_rows",
    "sparse_linear",
]
