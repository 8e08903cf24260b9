"""SEBP's operations: tensors in, tensors out.

Each file here is an op: its formulas, its autograd.Function and its public function. `backend` chooses what computes
it: kernels of `gpu/`, or plain PyTorch in `reference`, whose docstrings say what both compute. `__all__` lists what is
public.
"""

from .adamw import AdamW, Moments, adamw_
from .attention import Prefixes, Scores, sequence_attention_
from .backend import runs_flash_attention, runs_kernels
from .delta_rule import Chunks, gated_delta_rule, gated_linear_attention
from .gated import ACTIVATIONS, GatedInputs, gated
from .gated_lora_linear import gated_lora_linear
from .gpu.gemm import tuning  # needs neither Triton nor a GPU
from .linear_cross_entropy import linear_cross_entropy
from .lora_group import LoraGroup, LoraProjection
from .lora_linear import Recompute, lora_linear
from .move_rows import gather_rows, keep_rows, scatter_rows
from .precise_sums import precise_sums
from .prune import prune_, shrink_pruned_
from .quantised import FourBits, QuantisedScales, QuantisedWeight, ScratchBuffer
from .rms_norm import rms_norm
from .rows import ActiveRows, Rows, Selector
from .select_rows import detect, nonzero_rows, row_norms, select_rows
from .short_convolution import short_convolution
from .sparse_linear import sparse_linear
from .sparse_rowwise import sparse_rowwise
from .state_space import state_space

__all__ = [
    "ACTIVATIONS",
    "ActiveRows",
    "AdamW",
    "Chunks",
    "FourBits",
    "GatedInputs",
    "LoraGroup",
    "LoraProjection",
    "Moments",
    "Prefixes",
    "QuantisedScales",
    "QuantisedWeight",
    "Recompute",
    "Rows",
    "Scores",
    "ScratchBuffer",
    "Selector",
    "adamw_",
    "detect",
    "gated",
    "gated_delta_rule",
    "gated_linear_attention",
    "gated_lora_linear",
    "gather_rows",
    "keep_rows",
    "linear_cross_entropy",
    "lora_linear",
    "nonzero_rows",
    "precise_sums",
    "prune_",
    "rms_norm",
    "row_norms",
    "runs_flash_attention",
    "runs_kernels",
    "scatter_rows",
    "select_rows",
    "sequence_attention_",
    "short_convolution",
    "shrink_pruned_",
    "sparse_linear",
    "sparse_rowwise",
    "state_space",
    "tuning",
]
