"""SEBP's operations: tensors in, tensors out. `backend` alone chooses between our kernels and plain PyTorch.

sparse_linear               Y = X Wᵀ + b, whose backward pass computes the rows of dL/dY that carry gradient, no others
sparse_rowwise              the same for functions of single rows, such as norms and activations
lora_linear                 projections of one X with their LoRA adapters, as one wide layer
gated_lora_linear           a gated product through one such projection: the second half of an MLP
sequence_attention_         attention within each of several sequences, causal or not, rotary embedding included
rms_norm, gated             a decoder's row-by-row operations, which keep no more than their inputs
linear_cross_entropy        the loss from hidden states, without ever holding all logits
gather_rows, scatter_rows   rows taken out of a matrix and put back, differentiable
adamw_                      an AdamW update in place, of bf16 weights by stochastic rounding
nonzero_rows, row_norms, select_rows
                            which rows of a gradient to keep, decided on the device
tuning                      within it, products that run for the first time are timed, and their algorithms chosen
detect                      the rows that are not zero
"""

from .adamw import AdamW, Moments, adamw_
from .attention import Scores, sequence_attention_
from .backend import runs_flash_attention, runs_kernels
from .gated import ACTIVATIONS, Gate, gated
from .gated_lora_linear import gated_lora_linear
from .gpu.gemm import tuning
from .linear_cross_entropy import linear_cross_entropy
from .lora_linear import LoraGroup, LoraProjection, QuantisedWeight, Remake, Scratch, lora_linear
from .move_rows import gather_rows, scatter_rows
from .rms_norm import rms_norm
from .rows import ActiveRows, Rows, Selector, kept_rows
from .select_rows import detect, nonzero_rows, row_norms, select_rows
from .sparse_linear import sparse_linear
from .sparse_rowwise import sparse_rowwise

__all__ = [
    "ACTIVATIONS",
    "ActiveRows",
    "AdamW",
    "Gate",
    "LoraGroup",
    "LoraProjection",
    "Moments",
    "QuantisedWeight",
    "Remake",
    "Rows",
    "Scores",
    "Scratch",
    "Selector",
    "adamw_",
    "detect",
    "gated",
    "gated_lora_linear",
    "gather_rows",
    "kept_rows",
    "linear_cross_entropy",
    "lora_linear",
    "nonzero_rows",
    "rms_norm",
    "row_norms",
    "runs_flash_attention",
    "runs_kernels",
    "scatter_rows",
    "select_rows",
    "sequence_attention_",
    "sparse_linear",
    "sparse_rowwise",
    "tuning",
]
