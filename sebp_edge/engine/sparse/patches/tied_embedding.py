"""Adds the gradient of a trained embedding to that of the tied head, row by row and in place.

    dW = dlogitsᵀ h        dW[ids] += dX        (the head's part, then the embedding's, in the dtype of W)

Autograd would allocate a second gradient of the whole vocabulary and add the two. The head's backward pass runs first
and the embedding's last; in between, the head's gradient is held back.

Shapes: A tokens, D hidden, V vocabulary.
"""

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from sebp_edge.engine.sparse.patches.patch import Patch, has_own_forward


class TiedEmbedding(Patch):
    """Handle of one decoder's tied embedding.

    An embedding is not changed if it is not tied, is frozen, or does more than look up rows.
    """

    def __init__(self, decoder: nn.Module):
        super().__init__()
        self._embedding, head = decoder.get_input_embeddings(), decoder.get_output_embeddings()
        self._is_plain = (
            type(self._embedding) is nn.Embedding
            and has_own_forward(self._embedding)
            and self._embedding.weight is head.weight
            and self._embedding.max_norm is None
            and not self._embedding.scale_grad_by_freq
            and not self._embedding.sparse
        )
        self._head_gradient: _HeadGradient | None = None

    def attach(self) -> None:
        """Replaces the embedding's forward."""
        if self._is_plain:
            self._replace(self._embedding, self._look_up)

    def head_weight(self, weight_VD: Tensor) -> Tensor:
        """Returns the head's weight, to be used once after each forward pass of the embedding.

        If the embedding is trained, the gradient of the returned tensor goes to the embedding's backward pass.
        """
        if self._head_gradient is None:
            return weight_VD
        head_gradient, self._head_gradient = self._head_gradient, None
        return _HeadWeight.apply(weight_VD, head_gradient)

    def _look_up(self, ids: Tensor) -> Tensor:
        weight_VD = self._embedding.weight
        if not (weight_VD.requires_grad and torch.is_grad_enabled()):
            self._head_gradient = None
            return functional.embedding(ids, weight_VD)
        self._head_gradient = _HeadGradient()
        return _LookUp.apply(weight_VD, ids, self._embedding.padding_idx, self._head_gradient)


class _HeadGradient:
    """Holds the head's gradient until the embedding's backward pass takes it.

    Attributes:
        gradient: [V, D], from the head's backward pass to the embedding's; None before and after.
        is_late: whether the embedding's backward pass has already run, so that it takes no further gradient.
    """

    gradient: Tensor | None = None
    is_late = False


class _HeadWeight(torch.autograd.Function):
    """Returns the weight; its gradient goes to the embedding's backward pass, which returns the sum of both."""

    @staticmethod
    def forward(ctx, weight_VD, head_gradient):
        ctx.head_gradient = head_gradient
        return weight_VD.view_as(weight_VD)

    @staticmethod
    @once_differentiable
    def backward(ctx, dweight_VD):
        if ctx.head_gradient.is_late:
            return dweight_VD, None
        ctx.head_gradient.gradient = dweight_VD
        return None, None


class _LookUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight_VD, ids, padding_idx, head_gradient):
        ctx.save_for_backward(ids)
        ctx.padding_idx, ctx.head_gradient, ctx.vocabulary = padding_idx, head_gradient, weight_VD.shape[0]
        return functional.embedding(ids, weight_VD)

    @staticmethod
    @once_differentiable
    def backward(ctx, dx):
        (ids,) = ctx.saved_tensors
        if ctx.padding_idx is not None:
            # Padding gets no gradient, as in torch.
            dx = dx.masked_fill((ids == ctx.padding_idx)[..., None], 0)
        # Drops the other reference: autograd copies a gradient that has several.
        dweight_VD, ctx.head_gradient.gradient, ctx.head_gradient.is_late = ctx.head_gradient.gradient, None, True
        if dweight_VD is None:
            return _sums(dx, ids, ctx.vocabulary), None, None, None
        ids_A = ids.flatten()
        groups_A, ids_of_groups = _groups(ids_A)
        sums_AD = _sums(dx.flatten(0, -2), groups_A, len(ids_A))
        return dweight_VD.index_add_(0, ids_of_groups, sums_AD.to(dweight_VD.dtype)), None, None, None


def _sums(dx: Tensor, ids: Tensor, num_ids: int) -> Tensor:
    """Sums the rows of each id, [num_ids, D], as torch's embedding does."""
    return torch.ops.aten.embedding_dense_backward(dx, ids, num_ids, -1, False)


def _groups(ids_A: Tensor) -> tuple[Tensor, Tensor]:
    """Groups tokens by id: returns each token's group and each group's id, both int64 [A].

    An empty group has the id of another group. Does not wait for the device.
    """
    sorted_A, order_A = ids_A.sort(stable=True)
    group_of_sorted_A = torch.cat([sorted_A.new_zeros(1), (sorted_A[1:] != sorted_A[:-1]).long()]).cumsum(0)
    groups_A = torch.empty_like(ids_A).scatter_(0, order_A, group_of_sorted_A)
    ids_of_groups = sorted_A[:1].repeat(len(ids_A)).scatter_(0, group_of_sorted_A, sorted_A)
    return groups_A, ids_of_groups
