"""Computes the tokens that sequences begin with in common once, such as the system prompt of a chat.

A row before the first loss row of its sequence depends on the rows before it only. Rows with equal tokens and equal
tokens before them are therefore equal, and so is one row in place of many: its gradient is the sum of theirs.

Shapes: A active tokens, S sequences, C loss rows.
"""

from dataclasses import replace

import torch

from sebp_edge.sparse.rows.active_tokens import ActiveTokens
from sebp_edge.sparse.rows.beginnings import MIN_TOKENS, groups_of_equal


def share_prefixes(tokens: ActiveTokens, min_tokens: int = MIN_TOKENS) -> ActiveTokens:
    """Returns the same sequences without repeated beginnings, which are sequences of their own; on the host.

    Args:
        tokens: sequences that continue none, with positions counted from 0.
        min_tokens: the fewest tokens of a shared beginning.
    """
    begins, ids = tokens.cu_seqlens.tolist(), tokens.input_ids.tolist()
    first_losses = [*tokens.loss_indices.tolist(), len(ids)]
    first_losses = [first_losses[at] for at in torch.searchsorted(tokens.loss_indices, tokens.cu_seqlens[:-1]).tolist()]
    bounds = list(zip(begins, begins[1:], first_losses, strict=False))
    heads = [ids[begin : min(end - 1, first_loss)] for begin, end, first_loss in bounds]
    groups = groups_of_equal(heads, min_tokens)
    if not groups:
        return tokens
    length_of = {member: length for members, length in groups for member in members}
    parts = [(bounds[members[0]][0], length) for members, length in groups]
    parts += [
        (begin + length_of.get(number, 0), end - begin - length_of.get(number, 0))
        for number, (begin, end, _) in enumerate(bounds)
    ]
    rows = torch.cat([torch.arange(begin, begin + length) for begin, length in parts])
    place = torch.zeros(len(ids), dtype=torch.int64)
    place[rows] = torch.arange(len(rows))
    continued = {member: group for group, (members, _) in enumerate(groups) for member in members}
    continues = [-1] * len(groups) + [continued.get(number, -1) for number in range(len(bounds))]
    return replace(
        tokens,
        input_ids=tokens.input_ids[rows],
        position_ids=tokens.position_ids[rows],
        cu_seqlens=torch.tensor([0, *(length for _, length in parts)]).cumsum(0).int(),
        loss_indices=place[tokens.loss_indices],
        token_type_ids=None if tokens.token_type_ids is None else tokens.token_type_ids[rows],
        continues=torch.tensor(continues),
    )
