"""One optimizer update: gradients are clipped to a global norm, AdamW follows them, and they are zero again."""

from collections.abc import Callable

import torch
from torch import Tensor

from sebp_edge.recipe import Recipe
from sebp_edge.training.graph import Graphs


class Update:
    """AdamW (Loshchilov and Hutter 2019) of parameters whose `grad` it owns; to be called once a step."""

    def __init__(self, parameters: list[Tensor], recipe: Recipe):
        self._parameters, self._max_norm = parameters, recipe.max_grad_norm
        device = parameters[0].device
        self._learning_rate, self._norm = torch.zeros((), device=device), torch.zeros((), device=device)
        on_gpu = device.type == "cuda"
        self._optimizer = torch.optim.AdamW(
            parameters,
            lr=self._learning_rate if on_gpu else 0.0,
            weight_decay=recipe.weight_decay,
            # One kernel for many tensors, and a learning rate that is read on the device.
            fused=on_gpu or None,
            capturable=on_gpu,
        )
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        self._replay: Callable[[], None] | None = None

    def __call__(self, learning_rate: float) -> Tensor:
        """Updates the parameters; gives the gradients' norm before clipping, on the device."""
        group = self._optimizer.param_groups[0]
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(learning_rate)
        else:
            group["lr"] = learning_rate
        (self._replay or self._step)()
        return self._norm.clone()

    def capture(self, graphs: Graphs) -> None:
        """Replays a graph from now on; parameters, gradients and moments stay what they are, bit for bit.

        Raises:
            CannotCapture: it goes on as it was.
        """
        # Gradients and learning rate are zero: the run before the capture makes the moments and moves nothing.
        self._replay = graphs.capture("update", self._step)
        self.reset()

    def reset(self) -> None:
        """Forgets moments and gradients."""
        for state in self._optimizer.state.values():
            for value in state.values():
                value.zero_()
        self.zero_gradients()

    def zero_gradients(self) -> None:
        """Forgets what was added up since the last update."""
        torch._foreach_zero_([parameter.grad for parameter in self._parameters])

    def release(self) -> None:
        """Gives the memory of gradients and moments back; there is no update after that."""
        self._replay = None
        self._optimizer.state.clear()
        for parameter in self._parameters:
            parameter.grad = None

    def _step(self) -> None:
        self._norm.copy_(torch.nn.utils.clip_grad_norm_(self._parameters, self._max_norm))
        self._optimizer.step()
        self.zero_gradients()
