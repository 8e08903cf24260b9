"""Activation checkpointing (Chen et al. 2016): keeps only a block's input and recomputes it in the backward pass.

These are torch's non-reentrant checkpoints: the backward pass runs the block again, until all saved tensors are
recomputed. By then the batch is gone, but both runs must save tensors of the same shapes. So inside a checkpoint,
layers detect their active rows in dL/dY instead of taking them from the batch. (A reentrant checkpoint saves nothing in
its first run, which is without gradients.)

Whole blocks are recomputed, except for their last product. Per operation recomputed, that saves 13 % more of a 3B
Llama's activations than recomputing only the gate and up projections.

Offloaded inputs are kept in host memory. They are copied there while their block runs, and back while the next block is
recomputed, on a separate stream, which captured graphs include.
"""

from collections.abc import Callable, MutableMapping
from contextlib import AbstractContextManager, nullcontext
from copy import copy

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sebp_edge.engine.models.architecture import blocks_of
from sebp_edge.engine.sparse.patches.patch import Patch, forward_of
from sebp_edge.errors import SparsityError
from sebp_edge.machine.side_copies import INPUTS, begin_copy, wait_for_copies

# Attribute of transformers' attention layers that holds their dropout probability.
ATTENTION_DROPOUT = "attention_dropout"


class CheckpointedBlocks(Patch):
    """Handle of one decoder's first blocks, in checkpoints.

    The backward pass reaches the first blocks last: by then it has freed what the others kept, and has memory to
    recompute them. So a checkpoint of the last block would save nothing. If inputs are offloaded to host memory, each
    backward pass must run before the next forward pass.
    """

    def __init__(self, decoder: nn.Module, num_blocks: int, *, offload: bool = False):
        super().__init__()
        blocks = blocks_of(decoder)
        most = max(0, len(blocks) - 1)
        if num_blocks > most:
            raise SparsityError(
                f"{num_blocks} blocks cannot be checkpointed; expected at most {most} of {len(blocks)}."
            )
        self._blocks, self._offload = blocks[:num_blocks], offload

    def attach(self, recomputing: Callable[[], AbstractContextManager]) -> None:
        """Puts the blocks into checkpoints; `recomputing` returns the context in which one is recomputed."""
        self.recomputing, host = recomputing, None
        for block in self._blocks:
            host = _HostInput(previous=host) if self._offload else None
            self._replace(block, _InCheckpoint(self, block, host))


class _InCheckpoint:
    """Replacement of one block's `forward`."""

    def __init__(self, blocks: CheckpointedBlocks, block: nn.Module, host: "_HostInput | None"):
        self._blocks, self._forward, self._host = blocks, forward_of(block), host
        self._dropouts = dropouts_of(block)

    def __call__(self, hidden: Tensor, *args, **kwargs):
        if not torch.is_grad_enabled():
            return self._forward(hidden, *args, **kwargs)
        refuse_dropout(self._dropouts)
        forward = self._forward if self._host is None else self._forward_offloaded
        # Blocks may share tensors in a dictionary; if a checkpoint kept it, they would keep each other.
        first = [kwargs]
        again = {name: copy(value) if isinstance(value, MutableMapping) else value for name, value in kwargs.items()}
        return checkpoint(
            lambda *given: forward(*given, **(first.pop() if first else again)),
            hidden if self._host is None else _Offloaded(hidden, self._host),
            *args,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=lambda: (nullcontext(), self._blocks.recomputing()),
        )

    def _forward_offloaded(self, hidden: "_Offloaded", *args, **kwargs):
        return self._forward(hidden.take(), *args, **kwargs)


class _HostInput:
    """Host memory for one block's latest input. For inputs on a GPU it is page-locked, so that copies are asynchronous.

    The previous block's input is needed next in the backward pass. The number of inputs put identifies the latest.
    """

    def __init__(self, previous: "_HostInput | None" = None):
        # Outgrown buffers stay: graphs that were captured with one keep using it.
        self._buffers: list[Tensor] = []
        self._previous, self._input = previous, None
        # The input while it is copied to the host; later its copy, once that is fetched back.
        self._on_device: Tensor | None = None
        self.num_puts = 0

    def put(self, hidden: Tensor) -> None:
        """Starts the host copy, after waiting for that of the previous block; increments `num_puts`."""
        if self._previous is not None:
            # Not for the first block: a capturing stream must not wait for one outside of the capture.
            wait_for_copies(hidden.device, INPUTS)
            self._previous._on_device = None
        size = hidden.numel()
        self.num_puts += 1
        fitting = (one for one in self._buffers if one.dtype == hidden.dtype and one.numel() >= size)
        if (destination := next(fitting, None)) is None:
            destination = torch.empty(size, dtype=hidden.dtype, pin_memory=hidden.is_cuda)
            self._buffers.append(destination)
        self._on_device, self._input = hidden.detach(), destination[:size].view(hidden.shape)
        begin_copy(self._input, self._on_device, INPUTS)

    def take(self, device: torch.device) -> Tensor:
        """Returns the input on the device, and starts fetching that of the previous block."""
        if self._on_device is None:
            self._fetch(device)
        wait_for_copies(device, INPUTS)
        hidden, self._on_device = self._on_device, None
        if self._previous is not None:
            self._previous._fetch(device)
        return hidden

    def _fetch(self, device: torch.device) -> None:
        self._on_device = torch.empty_like(self._input, device=device)
        begin_copy(self._on_device, self._input, INPUTS)


class _Offloaded:
    """A block's input: the tensor itself for the first run, its copy for the second.

    `take` raises a SparsityError if another input has overwritten the copy.
    """

    def __init__(self, hidden: Tensor, host: _HostInput):
        self._hidden: Tensor | None = hidden
        self._device, self._needs_gradient, self._host = hidden.device, hidden.requires_grad, host
        host.put(hidden)
        self._put = host.num_puts

    def take(self) -> Tensor:
        if self._hidden is not None:
            hidden, self._hidden = self._hidden, None
            return hidden
        if self._host.num_puts != self._put:
            raise SparsityError(
                "A forward pass overwrote the offloaded input; run each backward pass before the next forward pass."
            )
        return self._host.take(self._device).requires_grad_(self._needs_gradient)


def dropouts_of(module: nn.Module) -> list[nn.Module]:
    """The parts of a module that apply dropout in training; attention drops scores without an `nn.Dropout`."""
    parts = module.modules()
    return [
        part for part in parts if (isinstance(part, nn.Dropout) and part.p) or getattr(part, ATTENTION_DROPOUT, None)
    ]


def refuse_dropout(dropouts: list[nn.Module]) -> None:
    """Refuses active dropout: recomputation would drop others, since captured graphs cannot restore random states."""
    if any(dropout.training for dropout in dropouts):
        raise SparsityError(
            "Blocks that are recomputed in the backward pass do not support dropout; disable it with `model.eval()`."
        )


def is_in_checkpoint() -> bool:
    """Whether the innermost hooks on saved tensors are `torch.utils.checkpoint`'s, in either of its two runs."""
    if torch.compiler.is_compiling():
        return False
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint"
