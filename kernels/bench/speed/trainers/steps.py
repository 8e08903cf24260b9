"""The training steps that are compared: plain loops with an optimizer of choice, and steps in CUDA graphs.

Every step names its moments, all that its optimizer keeps of each weight. None of them keeps more, such as Kahan
compensation: our own AdamW rounds bf16 weights stochastically with random bits that it computes, torch's and
bitsandbytes' round to the nearest.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from sebp_edge.engine.sparse.hoist import Hoisted
from sebp_edge.engine.sparse.rows.active_tokens import ActiveTokens
from sebp_edge.engine.sparse.rows.batches import Batch
from sebp_edge.engine.training.captured_gradients import CapturedGradients
from sebp_edge.engine.training.graphs import GRADIENTS, GraphPool, MicroBatchGraphs
from sebp_edge.engine.training.update import Update
from sebp_edge.events import silent
from sebp_edge.recipe import Recipe

LEARNING_RATE = 1e-5
MOMENTS = {torch.uint8: "8 bits", torch.bfloat16: "bf16", torch.float32: "fp32"}

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
Mark = Callable[[str], None]


class Step(Protocol):
    """A training step of one batch that can be run repeatedly, until `release`."""

    def gradients(self) -> Tensor:
        """Computes the gradients of the mean loss as the parameters' `grad`; returns that loss."""

    def zero_grad(self) -> None:
        """Drops the gradients, unless the next ones overwrite them."""

    def __call__(self, mark: Mark) -> None:
        """Runs forward, backward and the update; calls `mark` with the name of each part when it is done."""

    def moments(self) -> list[Tensor]:
        """What the optimizer keeps of each weight."""

    def release(self) -> None:
        """Frees the memory that steps use."""


def trained(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that a step trains."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def fused_adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """torch's AdamW, whose moments have the dtype of the weights."""
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=parameters[0].is_cuda or None)


def adamw_8bit(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """bitsandbytes' AdamW, whose moments take 8 bits each."""
    from bitsandbytes.optim import AdamW8bit

    return AdamW8bit(parameters, lr=LEARNING_RATE)


@dataclass(frozen=True)
class Variant:
    """A way to run the training step of a padded batch; this one is a plain training loop.

    Attributes:
        attach: prepares a model; leaving the context manager restores it.
        loss: the mean loss, from what `attach` yields and the laid-out batch.
        lay_out: converts a batch on the model's device to this variant's layout, before the clock starts.
        is_ours: whether it uses SEBP.
    """

    name: str
    attach: Callable[[nn.Module], AbstractContextManager]
    loss: Callable[[object, object], Tensor]
    lay_out: Callable[[Batch], object] = lambda batch: batch
    is_ours: bool = False
    make_optimizer: MakeOptimizer = fused_adamw

    def unsupported_reason(self, device: torch.device) -> str | None:
        """What this variant needs and `device` lacks, in words; None if nothing."""
        return None

    def step(self, handle, model: nn.Module, batch: Batch) -> Step:
        """The training step of a batch; `handle` is what `attach` yields."""
        inputs = self.lay_out(batch)
        return LoopStep(trained(model), lambda: self.loss(handle, inputs), self.make_optimizer)


class Packed(Variant):
    """A plain training loop with torch's variable-length attention."""

    def unsupported_reason(self, device: torch.device) -> str | None:
        return None if device.type == "cuda" else "variable-length attention needs an NVIDIA GPU"


class Compiled(Variant):
    """A plain training loop over a model whose parts torch.compile has put into CUDA graphs."""

    def unsupported_reason(self, device: torch.device) -> str | None:
        return None if device.type == "cuda" else "CUDA graphs need an NVIDIA GPU"


class Graphed(Compiled):
    """Forward and backward in one captured graph, and the update in another."""

    def step(self, handle, model: nn.Module, batch: Batch) -> "GraphedStep":
        inputs = self.lay_out(batch)
        return GraphedStep(trained(model), lambda: self.loss(handle, inputs))


class Ours(Compiled):
    """The captured step of this project, with its own AdamW."""

    def step(self, handle: Hoisted, model: nn.Module, batch: Batch) -> "OurStep":
        return OurStep(trained(model), handle, self.lay_out(batch))


class OursWithTorchsAdamW(Compiled):
    """The captured gradients of this project, with torch's fused AdamW in a graph."""

    def step(self, handle: Hoisted, model: nn.Module, batch: Batch) -> "CapturedGradientsStep":
        return CapturedGradientsStep(trained(model), handle, self.lay_out(batch))


class LoopStep:
    """The step of a plain training loop with an optimizer of choice."""

    def __init__(self, parameters: list[nn.Parameter], loss: Callable[[], Tensor], make_optimizer: MakeOptimizer):
        self._parameters, self._compute = parameters, loss
        self._optimizer = make_optimizer(parameters)

    def gradients(self) -> Tensor:
        loss = self._compute()
        loss.backward()
        return loss.detach()

    def zero_grad(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def __call__(self, mark: Mark) -> None:
        loss = self._compute()
        mark("forward")
        loss.backward()
        mark("backward")
        self._optimizer.step()
        self._optimizer.zero_grad()
        mark("update")

    def moments(self) -> list[Tensor]:
        return _moments_of(self._optimizer)

    def release(self) -> None:
        self.zero_grad()


class OurStep:
    """The step that `Personalizer` makes on a GPU: one graph for forward and backward, and one for the update."""

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

    def moments(self) -> list[Tensor]:
        return [values for moments in self._update._moments for values in moments if values is not None]

    def release(self) -> None:
        self._update.release()


class _TwoGraphs(ABC):
    """A step whose gradients are in one graph, which overwrites them, and whose update is in another.

    The update is torch's fused AdamW, on the parameters' `grad` as they are when the graph is captured.
    """

    def __init__(self, parameters: list[nn.Parameter], graphs: GraphPool):
        self._parameters = parameters
        on_gpu = parameters[0].is_cuda
        learning_rate = torch.zeros((), device=parameters[0].device)
        self._optimizer = torch.optim.AdamW(parameters, lr=learning_rate, fused=on_gpu or None, capturable=on_gpu)
        # At a learning rate of zero the weights stay what they are.
        graphs.warm_up(self._optimizer.step)
        self._update = graphs.capture("update", self._optimizer.step)
        learning_rate.fill_(LEARNING_RATE)

    @abstractmethod
    def gradients(self) -> Tensor: ...

    @abstractmethod
    def zero_grad(self) -> None: ...

    def __call__(self, mark: Mark) -> None:
        self.gradients()
        mark("forward and backward")
        self._update()
        mark("update")
        self.zero_grad()

    def moments(self) -> list[Tensor]:
        return _moments_of(self._optimizer)

    def release(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None


class GraphedStep(_TwoGraphs):
    """A step of any trainer in CUDA graphs. The inputs are fixed tensors; each replay overwrites the gradients."""

    def __init__(self, parameters: list[nn.Parameter], loss: Callable[[], Tensor]):
        self._parameters, self._compute = parameters, loss
        self._loss = torch.zeros((), device=parameters[0].device)
        graphs = GraphPool(parameters[0].device, silent)
        graphs.warm_up(self._pass)
        self._replay = graphs.capture("forward and backward", self._pass)
        # A capture computes nothing, and the update's first run reads the gradients.
        self._replay()
        super().__init__(parameters, graphs)

    def _pass(self) -> None:
        # So that the gradients are written to the graph's memory instead of added to.
        self.release()
        loss = self._compute()
        loss.backward()
        self._loss.copy_(loss.detach())

    def gradients(self) -> Tensor:
        self._replay()
        return self._loss

    def zero_grad(self) -> None:
        """Does nothing: the next replay overwrites the gradients."""


class CapturedGradientsStep(_TwoGraphs):
    """The step of a training loop with `CapturedGradients`."""

    def __init__(self, parameters: list[nn.Parameter], handle: Hoisted, tokens: ActiveTokens):
        self._tokens, self._captured = tokens, CapturedGradients(handle)
        self._captured.add(tokens)
        super().__init__(parameters, GraphPool(parameters[0].device, silent))
        self.zero_grad()

    def gradients(self) -> Tensor:
        return self._captured.add(self._tokens)

    def zero_grad(self) -> None:
        self.release()


def _moments_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The tensors of an optimizer's state, each once, without those that only count steps."""
    tensors = [each for state in optimizer.state.values() for each in state.values() if isinstance(each, Tensor)]
    return list({each.data_ptr(): each for each in tensors if each.dim()}.values())


def described(moments: list[Tensor]) -> dict:
    """What a row says of the moments: their number format and their bytes, scales included."""
    largest = max(moments, key=lambda tensor: tensor.numel())
    return {"moments": MOMENTS[largest.dtype], "moments_bytes": sum(tensor.nbytes for tensor in moments)}
