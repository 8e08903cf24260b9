"""The training steps that peers.py compares: plain loops with an optimizer of choice, and steps in CUDA graphs.

Every step names its moments, all that its optimizer keeps of each weight. None of them keeps more, such as Kahan
compensation: our own AdamW rounds bf16 weights stochastically with random bits that it computes, torch's and
bitsandbytes' round to the nearest.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sebp_edge.events import silent
from sebp_edge.research.bench.variants import LEARNING_RATE, Captured, CapturedStep, EagerStep, Mark, Variant, trained
from sebp_edge.sparse.hoist import Hoisted
from sebp_edge.sparse.rows.active_tokens import ActiveTokens
from sebp_edge.texts.batches import Batch
from sebp_edge.training.captured_gradients import CapturedGradients
from sebp_edge.training.graphs import GraphPool

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
MOMENTS = {torch.uint8: "8 bits", torch.bfloat16: "bf16", torch.float32: "fp32"}


def fused_adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """torch's AdamW, whose moments have the dtype of the weights."""
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=parameters[0].is_cuda or None)


def adamw_8bit(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """bitsandbytes' AdamW, whose moments take 8 bits each."""
    from bitsandbytes.optim import AdamW8bit

    return AdamW8bit(parameters, lr=LEARNING_RATE)


@dataclass(frozen=True)
class Eager(Variant):
    """A plain training loop."""

    make_optimizer: MakeOptimizer = fused_adamw

    @classmethod
    def of(cls, variant: Variant, **changes) -> "Eager":
        """Returns the same variant, with steps of this kind."""
        return cls(**vars(variant) | changes)

    def step(self, handle, model: nn.Module, batch: Batch) -> "LoopStep":
        inputs = self.lay_out(batch)
        return LoopStep(trained(model), lambda: self.loss(handle, inputs), self.make_optimizer)


class Packed(Eager):
    """A plain training loop with torch's variable-length attention."""

    def unsupported_reason(self, device: torch.device) -> str | None:
        return None if device.type == "cuda" else "variable-length attention needs an NVIDIA GPU"


class Compiled(Eager):
    """A plain training loop over a model whose parts torch.compile has put into CUDA graphs."""

    unsupported_reason = Captured.unsupported_reason


class Graphed(Eager):
    """Forward and backward in one captured graph, and the update in another."""

    unsupported_reason = Captured.unsupported_reason

    def step(self, handle, model: nn.Module, batch: Batch) -> "GraphedStep":
        inputs = self.lay_out(batch)
        return GraphedStep(trained(model), lambda: self.loss(handle, inputs))


class Ours(Captured):
    """The captured step of this project, with its own AdamW."""

    def step(self, handle: Hoisted, model: nn.Module, batch: Batch) -> "OurStep":
        return OurStep(trained(model), handle, self.lay_out(batch))


class OursWithTorchsAdamW(Captured):
    """The captured gradients of this project, with torch's fused AdamW in a graph."""

    def step(self, handle: Hoisted, model: nn.Module, batch: Batch) -> "CapturedGradientsStep":
        return CapturedGradientsStep(trained(model), handle, self.lay_out(batch))


class LoopStep(EagerStep):
    """The step of a plain training loop with an optimizer of choice."""

    def __init__(self, parameters: list[nn.Parameter], loss: Callable[[], Tensor], make_optimizer: MakeOptimizer):
        super().__init__(parameters, loss)
        self._optimizer = make_optimizer(parameters)

    def moments(self) -> list[Tensor]:
        return _moments_of(self._optimizer)


class OurStep(CapturedStep):
    """The step that `Personalizer` makes on a GPU, and its moments."""

    def moments(self) -> list[Tensor]:
        return [values for moments in self._update._moments for values in moments if values is not None]


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
    def gradients(self) -> Tensor:
        """Computes the gradients; returns the loss."""

    @abstractmethod
    def zero_grad(self) -> None:
        """Drops the gradients, unless the next ones overwrite them."""

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
