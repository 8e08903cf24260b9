"""The variants of a training step that are compared: how each prepares the model and lays out the batch.

A batch is right-padded to the context length; each variant converts it to its own layout before the clock starts.

Shapes: B sequences, T positions, N real tokens of all sequences.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sebp_edge.events import silent
from sebp_edge.models.architecture import head_size_of
from sebp_edge.models.lora import without_adapter
from sebp_edge.ops import runs_flash_attention
from sebp_edge.recipe import Recipe
from sebp_edge.sparse.hoist import ATTENTION, Hoisted
from sebp_edge.sparse.rows.active_tokens import ActiveTokens
from sebp_edge.sparse.rows.row_plan import IGNORE
from sebp_edge.sparse.sparsify import Sparsified
from sebp_edge.texts.batches import Batch
from sebp_edge.training.graphs import GRADIENTS, GraphPool, MicroBatchGraphs
from sebp_edge.training.update import Update

LEARNING_RATE = 1e-5

Mark = Callable[[str], None]


class Step(Protocol):
    """A training step of one batch that can be run repeatedly, until `release`."""

    def gradients(self) -> Tensor:
        """Adds the gradients of the mean loss to the parameters' `grad`; returns that loss."""

    def zero_grad(self) -> None:
        """Discards the gradients."""

    def __call__(self, mark: Mark) -> None:
        """Runs forward, backward and AdamW's update; calls `mark` with the name of each part when it is done."""

    def release(self) -> None:
        """Frees the memory that steps use."""


@dataclass(frozen=True)
class Variant:
    """A variant of the training step of a padded batch.

    Attributes:
        attach: prepares a model; leaving the context manager restores it.
        loss: the mean loss, from what `attach` yields and the laid-out batch.
        lay_out: converts a batch on the model's device to this variant's layout.
        is_ours: whether it uses SEBP.
    """

    name: str
    attach: Callable[[nn.Module], AbstractContextManager]
    loss: Callable[[object, object], Tensor]
    lay_out: Callable[[Batch], object] = lambda batch: batch
    is_ours: bool = False

    def unsupported_reason(self, device: torch.device) -> str | None:
        """What this variant needs and `device` lacks, in words; None if nothing."""
        return None

    def step(self, handle, model: nn.Module, batch: Batch) -> Step:
        """The training step of a batch; `handle` is what `attach` yields."""
        inputs = self.lay_out(batch)
        return EagerStep(trained(model), lambda: self.loss(handle, inputs))


@dataclass(frozen=True)
class Captured(Variant):
    """Level 3: replays one captured graph for forward and backward, and one for the update."""

    def unsupported_reason(self, device: torch.device) -> str | None:
        return None if device.type == "cuda" else "CUDA graphs need an NVIDIA GPU"

    def step(self, handle: Hoisted, model: nn.Module, batch: Batch) -> Step:
        return CapturedStep(trained(model), handle, self.lay_out(batch))


def trained(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that a step trains."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


class EagerStep:
    """The step of a plain training loop.

    Attributes:
        loss: runs the forward pass alone.
    """

    def __init__(self, parameters: list[nn.Parameter], loss: Callable[[], Tensor]):
        self.loss, self._parameters = loss, parameters
        on_gpu = parameters[0].is_cuda
        self._optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=on_gpu or None)

    def gradients(self) -> Tensor:
        loss = self.loss()
        loss.backward()
        return loss.detach()

    def zero_grad(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def __call__(self, mark: Mark) -> None:
        loss = self.loss()
        mark("forward")
        loss.backward()
        mark("backward")
        self._optimizer.step()
        self._optimizer.zero_grad()
        mark("update")

    def release(self) -> None:
        self.zero_grad()


class CapturedStep:
    """The step that `Personalizer` makes on a GPU."""

    def __init__(self, parameters: list[nn.Parameter], handle: Hoisted, tokens: ActiveTokens):
        self._tokens = tokens
        self._loss = torch.zeros((), device=parameters[0].device)
        graphs = GraphPool(parameters[0].device, silent)
        self._update = Update(parameters, Recipe(name="bench", description=""))
        try:
            self._update.capture(graphs)
        except BaseException:
            self._update.release()
            raise
        self._micro_batches = MicroBatchGraphs(graphs, handle, {GRADIENTS: self._update}, self._loss)

    def gradients(self) -> Tensor:
        self._loss.zero_()
        self._micro_batches.accumulate(self._tokens, len(self._tokens.targets))
        return self._loss

    def zero_grad(self) -> None:
        self._update.zero_gradients()

    def __call__(self, mark: Mark) -> None:
        self._update.begin(LEARNING_RATE)
        self.gradients()
        mark("forward and backward")
        self._update.finish()
        mark("update")

    def release(self) -> None:
        self._update.release()


@contextmanager
def _sparsified(model: nn.Module) -> Iterator[nn.Module]:
    with Sparsified(model):
        yield model


@contextmanager
def _with_varlen_if_supported(model: nn.Module) -> Iterator[nn.Module]:
    """Gives the model variable-length attention over packed sequences, if flash attention runs its head size here."""
    decoder = without_adapter(model)
    config, before = decoder.config.get_text_config(), decoder.config._attn_implementation
    if runs_flash_attention(decoder.get_input_embeddings().weight.new_empty(0, head_size_of(config))):
        decoder.set_attn_implementation(ATTENTION)
    try:
        yield model
    finally:
        decoder.set_attn_implementation(before)


def _padded_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Calls the model as an ordinary training loop does."""
    return model(
        input_ids=batch.input_ids, attention_mask=batch.attention_mask, labels=batch.labels, use_cache=False
    ).loss


def _packed_loss(model: nn.Module, row: dict) -> Tensor:
    boundaries = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
    varlen = without_adapter(model).config._attn_implementation == ATTENTION
    # Without these keywords, transformers builds a block-diagonal mask from the position ids.
    keywords = row if varlen else {name: value for name, value in row.items() if name not in boundaries}
    return model(**keywords, use_cache=False).loss


def _hoisted_loss(handle: Hoisted, tokens: ActiveTokens) -> Tensor:
    return handle.row_losses(tokens).mean()


def trim_to_longest(batch: Batch) -> Batch:
    """Pads the same sequences to the longest of them only."""
    longest = int(batch.attention_mask.sum(dim=1).max())
    shorter = (each[:, :longest] for each in (batch.input_ids, batch.attention_mask, batch.labels))
    return Batch(*shorter, batch.plan)


def packed(batch: Batch) -> dict:
    """Packs all sequences into one row [1, N]; positions restart in each, and none predicts the next one's start."""
    real_BT = batch.attention_mask.bool()
    labels_BT = batch.labels.clone()
    labels_BT[:, 0] = IGNORE
    lengths_B = real_BT.sum(dim=1)
    cu_seqlens, longest = F.pad(lengths_B.cumsum(0), (1, 0)).int(), int(lengths_B.max())
    return {
        "input_ids": batch.input_ids[real_BT][None],
        "labels": labels_BT[real_BT][None],
        "position_ids": (real_BT.cumsum(dim=1) - 1)[real_BT][None],
        "cu_seq_lens_q": cu_seqlens,
        "cu_seq_lens_k": cu_seqlens,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def _active(batch: Batch) -> ActiveTokens:
    return ActiveTokens.gather(batch.input_ids, batch.plan)


def active_on_host(batch: Batch) -> ActiveTokens:
    """A batch's active tokens on the host, where captured steps take them from."""
    return ActiveTokens.gather(batch.input_ids.cpu(), batch.plan.to("cpu"))


DENSE = Variant("dense padded", nullcontext, _padded_loss)
DROP_IN = Variant("drop-in", _sparsified, _padded_loss, is_ours=True)
DYNAMIC = Variant("dynamic padding", nullcontext, _padded_loss, trim_to_longest)
PACKED = Variant("packed", _with_varlen_if_supported, _packed_loss, packed)
HOISTED = Variant("hoisted", Hoisted, _hoisted_loss, _active, is_ours=True)
GRAPH = Captured("graph", Hoisted, _hoisted_loss, active_on_host, is_ours=True)
VARIANTS = (DENSE, DROP_IN, DYNAMIC, PACKED, HOISTED, GRAPH)
