"""Layers with a state that run whole on active rows: operations on packed texts replace transformers' functions.

A layer's own forward calls these by their names in its module. It is made again from the same code with other names,
so no model family has code of its own. A layer that mixes rows by any other function is not packed.

Shapes: A active rows, S sequences, C channels of a convolution with K columns; G heads of queries and keys, of size E;
H heads of values, of size F.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from types import CodeType, FunctionType, MethodType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sebp_edge.engine.sparse.patches.patch import is_wrapped
from sebp_edge.errors import SparsityError
from sebp_edge.ops import (
    Chunks,
    gated_delta_rule,
    gated_linear_attention,
    short_convolution,
    state_space,
)

CONVOLUTION, RULE, SCAN = "causal_conv1d_fn", "torch_chunk_gated_delta_rule", "mamba2_chunk_scan"
# A kernel for a whole layer: transformers' own function returns None, and the layer computes its parts.
_WHOLE = "mamba2_split_conv1d_scan_combined"
# Functions that layers call only with a cache, and one that changes nothing without a mask.
_OF_CACHES_AND_MASKS = {"causal_conv1d_update", "torch_recurrent_gated_delta_rule", "mamba2_selective_state_update"}
_OF_CACHES_AND_MASKS |= {"apply_mask_to_padding_states"}
# Keywords that say where texts begin among packed rows. A layer that attends without them raises an error.
_OF_PACKED_ROWS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
_OF_PACKED_ROWS += ("recorded_scores", "recorded_heads", "prefixes")
# Keywords that transformers' layers pass on to attention and to convolutions, and that have no effect there.
_WITHOUT_EFFECT = {"position_ids", "use_cache", "cache_position", "output_attentions", "return_dict"}


@dataclass(frozen=True)
class PackedTexts:
    """Where texts begin among active rows: at `cu_seqlens`, int32 [S + 1]; does not wait for a GPU."""

    cu_seqlens: Tensor
    num_rows: int

    @cached_property
    def positions_A(self) -> Tensor:
        """The number of rows of its text before each row, int32."""
        rows_A = torch.arange(self.num_rows, dtype=torch.int32, device=self.cu_seqlens.device)
        texts_A = torch.searchsorted(self.cu_seqlens[1:], rows_A, right=True)
        return rows_A - self.cu_seqlens[texts_A]

    @cached_property
    def chunks(self) -> Chunks:
        """For linear attention and state spaces."""
        return Chunks.of(self.cu_seqlens, self.num_rows)


def runs_packed(layer: nn.Module) -> bool:
    """Whether a layer's forward is its class's own, and calls no functions but those that have operations here."""
    # By hooks of its parts, transformers' own forward moves weights that accelerate keeps elsewhere.
    if is_wrapped(layer) or any(hasattr(child, "_hf_hook") for child in layer.children()):
        return False
    own = _own_forward(layer)
    if not isinstance(own, FunctionType):
        return False
    functions = {name for name in _names_in(own.__code__) if isinstance(own.__globals__.get(name), FunctionType)}
    return CONVOLUTION in functions and functions <= {CONVOLUTION, RULE, SCAN, _WHOLE} | _OF_CACHES_AND_MASKS


def packed_forward(
    layer: nn.Module, texts: Callable[[], PackedTexts], attend: Callable[..., Tensor] | None = None
) -> Callable:
    """Returns a forward on the active rows [1, A, ...] of the texts that `texts` returns.

    Computes linear attention, and that of state spaces, by `attend`, by default by the operations.
    """
    own = _own_forward(layer)
    names = own.__globals__ | {
        CONVOLUTION: partial(_convolve, texts),
        RULE: partial(_attend, texts, attend or gated_delta_rule),
        SCAN: partial(_scan, texts, attend or gated_linear_attention),
        _WHOLE: lambda *_args, **_options: None,
    }
    packed = FunctionType(own.__code__, names, own.__name__, own.__defaults__, own.__closure__)
    packed.__kwdefaults__ = own.__kwdefaults__
    return MethodType(packed, layer)


def without_texts(kwargs: dict) -> dict:
    """Returns a layer's keywords without those that say where texts begin."""
    return {name: value for name, value in kwargs.items() if name not in _OF_PACKED_ROWS}


def unknown_options(others: dict) -> list[str]:
    """Returns the names of those that may change what is computed."""
    return [name for name, value in others.items() if name not in _WITHOUT_EFFECT and value is not None]


def _own_forward(layer: nn.Module) -> Callable:
    """The forward of the layer's class, without transformers' own decorators."""
    own = type(layer).forward
    while hasattr(own, "__wrapped__") and own.__globals__["__name__"].startswith("transformers."):
        own = own.__wrapped__
    return own


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names_in(inner)


def _convolve(
    texts: Callable[[], PackedTexts],
    hidden_1CA: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **others,
) -> Tensor:
    """Has the signature of transformers' function; the weight is [C, K]."""
    unknown = unknown_options(others) + [activation] * (activation not in (None, "silu", "swish"))
    if unknown:
        raise SparsityError(f"A convolution of packed texts does not support {', '.join(unknown)}.")
    silu = activation and "silu"
    return short_convolution(hidden_1CA.squeeze(0).mT, weight, bias, texts().positions_A, silu).mT[None]


def _attend(
    texts: Callable[[], PackedTexts],
    attend: Callable[..., Tensor],
    query_1AGE: Tensor,
    key_1AGE: Tensor,
    value_1AHF: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    use_qk_l2norm_in_kernel: bool = False,
    output_final_state: bool = False,
    **others,
) -> tuple[Tensor, None]:
    """Has the signature of transformers' function; g and beta are [1, A, H]."""
    unknown = unknown_options(others) + ["final states"] * output_final_state
    unknown += ["queries and keys that are not normalised"] * (not use_qk_l2norm_in_kernel)
    if unknown:
        raise SparsityError(f"Linear attention on packed texts does not support {', '.join(unknown)}.")
    inputs = (each.squeeze(0) for each in (query_1AGE, key_1AGE, value_1AHF, g, beta))
    return attend(*inputs, texts().chunks)[None], None


def _scan(
    texts: Callable[[], PackedTexts],
    attend: Callable[..., Tensor],
    hidden_1AHF: Tensor,
    dt_1AH: Tensor,
    A_H: Tensor,
    B_1AGE: Tensor,
    C_1AGE: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    *,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, torch.inf),
    return_final_states: bool = False,
    **others,
) -> Tensor:
    """Has the signature of transformers' function; the size of its chunks changes only how numbers are rounded."""
    if unknown := unknown_options(others) + ["final states"] * return_final_states:
        raise SparsityError(f"State spaces on packed texts do not support {', '.join(unknown)}.")
    dt_AH = dt_1AH.squeeze(0)
    if dt_bias is not None:
        dt_AH = dt_AH + dt_bias.to(dt_AH.dtype)
    dt_AH = (F.softplus(dt_AH) if dt_softplus else dt_AH).clamp(*dt_limit)
    hidden_AHF, B_AGE, C_AGE = (each.squeeze(0) for each in (hidden_1AHF, B_1AGE, C_1AGE))
    return state_space(hidden_AHF, dt_AH, A_H, B_AGE, C_AGE, D, texts().chunks, attend)[None]
