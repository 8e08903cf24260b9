"""Computes the tokens that sequences begin with in common once: the system prompt of chats, or the note of questions.

A row before the first loss row of its sequence depends on the rows before it only. Rows with equal tokens and equal
tokens before them are therefore equal, and so is one row in place of many: its gradient is the sum of theirs.

Shapes: A active tokens, S sequences, C loss rows.
"""

from dataclasses import replace

import torch

from sebp_edge.engine.sparse.rows.active_tokens import ActiveTokens
from sebp_edge.engine.sparse.rows.beginnings import shared_beginnings
from sebp_edge.ops import Prefixes


def share_beginnings(tokens: ActiveTokens, *, on_gpu: bool = False) -> ActiveTokens:
    """Returns the same sequences without repeated beginnings, which are sequences of their own; on the host.

    Those that continue a beginning come right after it. Loss rows stay in their order. The sequences given continue
    none, and their positions are counted from 0.
    """
    begins, ids = tokens.cu_seqlens.tolist(), tokens.input_ids.tolist()
    lengths = tokens.cu_seqlens.diff().tolist()
    first_losses = [*tokens.loss_indices.tolist(), len(ids)]
    first_losses = [first_losses[at] for at in torch.searchsorted(tokens.loss_indices, tokens.cu_seqlens[:-1]).tolist()]
    prompts = [
        ids[begin : min(end, first_loss + 1)]
        for begin, end, first_loss in zip(begins, begins[1:], first_losses, strict=False)
    ]
    groups = shared_beginnings(prompts, lengths, on_gpu=on_gpu)
    if not groups:
        return tokens
    # The first row and the length of each sequence, and the sequence that it continues.
    parts, continues = [], []
    for group in groups:
        prefix = len(parts) if group.prefix else -1
        if group.prefix:
            parts.append((begins[group.numbers[0]], group.prefix))
            continues.append(-1)
        parts += [(begins[number] + group.prefix, lengths[number] - group.prefix) for number in group.numbers]
        continues += [prefix] * len(group.numbers)
    rows = torch.cat([torch.arange(begin, begin + length) for begin, length in parts])
    place = torch.zeros(len(ids), dtype=torch.int64)
    place[rows] = torch.arange(len(rows))
    cu_seqlens = torch.tensor([0, *(length for _, length in parts)]).cumsum(0).int()
    return replace(
        tokens,
        input_ids=tokens.input_ids[rows],
        position_ids=tokens.position_ids[rows],
        cu_seqlens=cu_seqlens,
        max_len=max(length for _, length in parts),
        loss_indices=place[tokens.loss_indices],
        token_type_ids=None if tokens.token_type_ids is None else tokens.token_type_ids[rows],
        prefixes=Prefixes.of(cu_seqlens, torch.tensor(continues)),
    )
