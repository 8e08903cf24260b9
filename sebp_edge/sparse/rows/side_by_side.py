"""Packs the batches of trainings that run side by side into one, in which each adapter owns the rows of its own.

Shapes: A active tokens, C loss rows, n adapters.
"""

from collections.abc import Mapping
from dataclasses import fields, replace
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from sebp_edge.ops import Prefixes
from sebp_edge.sparse.rows.active_tokens import ActiveTokens
from sebp_edge.sparse.rows.soft_targets import SoftTargets


def side_by_side(parts: Mapping[int, ActiveTokens], num_adapters: int) -> ActiveTokens:
    """Returns batches as one, on the host; what their sequences begin with in common is shared within each only.

    Args:
        parts: by the numbers of the adapters that own them; batches of a decoder, without filler.
    """
    numbers = sorted(parts)
    begins = accumulate((len(parts[number].input_ids) for number in numbers), initial=0)
    num_soft_targets = max(part.num_soft_targets for part in parts.values())
    have_prefixes = any(part.prefixes is not None for part in parts.values())
    batches = [
        replace(
            part,
            cu_seqlens=part.cu_seqlens + begin,
            loss_indices=part.loss_indices + begin,
            soft_targets=_soft_targets(part, num_soft_targets) if num_soft_targets else None,
            prefixes=_prefixes(part, begin) if have_prefixes else None,
        )
        for begin, part in zip(begins, map(parts.get, numbers), strict=False)
    ]
    names = [field.name for field in fields(ActiveTokens) if field.name not in ("max_len", "cu_owned")]
    values = {name: _cat([getattr(batch, name) for batch in batches]) for name in names}
    ends = torch.cat([batch.cu_seqlens[1:] for batch in batches])
    return ActiveTokens(
        **values | {"cu_seqlens": F.pad(ends, (1, 0)), "max_len": max(part.max_len for part in batches)},
        cu_owned=_cu_owned(parts, num_adapters),
    )


def owned(tokens: ActiveTokens, number: int, num_adapters: int) -> ActiveTokens:
    """Returns the same tokens, all of which belong to one of several adapters."""
    return replace(tokens, cu_owned=_cu_owned({number: tokens}, num_adapters))


def _cu_owned(parts: Mapping[int, ActiveTokens], num_adapters: int) -> Tensor:
    sizes_2n = torch.zeros(2, num_adapters, dtype=torch.int32)
    for number, part in parts.items():
        sizes_2n[:, number] = torch.tensor([len(part.input_ids), len(part.loss_indices)])
    return F.pad(sizes_2n.cumsum(1, dtype=torch.int32), (1, 0))


def sums_by_owner(values_C: Tensor, tokens: ActiveTokens) -> Tensor:
    """The sum of the values of the loss rows that each of n adapters owns, [n]; not even NaN reaches another."""
    cu_owned, rows_C = tokens.cu_owned[1, :, None], torch.arange(len(values_C), device=values_C.device)
    is_own_nC = (cu_owned[:-1] <= rows_C) & (rows_C < cu_owned[1:])
    return values_C.masked_fill(~is_own_nC, 0).sum(dim=1)


def _soft_targets(tokens: ActiveTokens, number: int) -> SoftTargets:
    """The soft targets, of which those that are lacking have share 0."""
    if tokens.soft_targets is None:
        return SoftTargets.unused(len(tokens.targets), number)
    return SoftTargets(*(F.pad(part, (0, number - part.shape[1])) for part in tokens.soft_targets))


def _prefixes(tokens: ActiveTokens, begin: int) -> Prefixes:
    """The prefixes of sequences that lie after `begin` rows."""
    own = tokens.prefixes
    if own is None:
        own = Prefixes.of(tokens.cu_seqlens, torch.full_like(tokens.cu_seqlens[1:], -1, dtype=torch.int64))
    begins = torch.where(own.lengths > 0, own.begins + begin, 0)
    return own._replace(begins=begins, readers_end=own.readers_end + begin)


def _cat(values: list) -> object:
    """Values of one field of several batches, one after another; those without it have None."""
    if values[0] is None or isinstance(values[0], Tensor):
        return None if values[0] is None else torch.cat(values)
    return type(values[0])(*map(torch.cat, zip(*values, strict=True)))
