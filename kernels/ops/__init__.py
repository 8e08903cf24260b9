"""SEBP's operations: tensors in, tensors out.

Each file here is an op: its formulas, its autograd.Function and its public function. `backend` chooses what computes
it: kernels of `gpu/`, or plain PyTorch in `reference`, whose docstrings say what both compute. A line below makes it
public.
"""

from .adamw import AdamW as AdamW
from .adamw import Moments as Moments
from .adamw import adamw_ as adamw_
from .attention import Scores as Scores
from .attention import sequence_attention_ as sequence_attention_
from .backend import runs_flash_attention as runs_flash_attention
from .backend import runs_kernels as runs_kernels
from .gated import ACTIVATIONS as ACTIVATIONS
from .gated import Gate as Gate
from .gated import gated as gated
from .gated_lora_linear import gated_lora_linear as gated_lora_linear
from .gpu.gemm import tuning as tuning  # needs neither Triton nor a GPU
from .linear_cross_entropy import linear_cross_entropy as linear_cross_entropy
from .lora_linear import LoraGroup as LoraGroup
from .lora_linear import LoraProjection as LoraProjection
from .lora_linear import QuantisedWeight as QuantisedWeight
from .lora_linear import Remake as Remake
from .lora_linear import Scratch as Scratch
from .lora_linear import lora_linear as lora_linear
from .move_rows import gather_rows as gather_rows
from .move_rows import kept_rows as kept_rows
from .move_rows import scatter_rows as scatter_rows
from .rms_norm import rms_norm as rms_norm
from .rows import ActiveRows as ActiveRows
from .rows import Rows as Rows
from .rows import Selector as Selector
from .select_rows import detect as detect
from .select_rows import nonzero_rows as nonzero_rows
from .select_rows import row_norms as row_norms
from .select_rows import select_rows as select_rows
from .sparse_linear import sparse_linear as sparse_linear
from .sparse_rowwise import sparse_rowwise as sparse_rowwise
