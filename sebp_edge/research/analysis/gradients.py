"""dL/dY in the linear layers of a model, from a plain forward pass and a dense backward pass: row norms, and elements.

Nothing is sparsified, and no weight gets a gradient. L is the sum of the losses in nats, not their mean, so a row's
norm depends on its own example only. Examples run one by one, each padded to the context length as in a larger batch.
Shapes: E examples, T positions, M outputs of a layer.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sebp_edge.engine.models.architecture import blocks_of, is_linear, layers_after_attention, reads_first_token
from sebp_edge.errors import ModelError
from sebp_edge.ops import nonzero_rows, row_norms
from sebp_edge.research.analysis.objectives import Objective
from sebp_edge.research.rules.histogram import LogHistogram

# Rows whose elements are counted together; bounds the memory of the counting.
_ROWS_AT_ONCE = 64


@dataclass(frozen=True)
class LayerInfo:
    """The position of a linear layer in a model.

    Attributes:
        block: index of its block, from 0; None for the head.
        projection: its name within the block, such as "q_proj"; with the names of its parents if another layer of the
            block has the same one, such as "mlp.c_proj" in GPT-2.
        num_weights: number of its weights; each costs two or four operations per row of the backward pass.
        after_attention: whether it is the head or in the last block (keys and values aside), where only loss rows
            carry gradient.
    """

    block: int | None
    projection: str
    num_weights: int
    after_attention: bool


def linear_layers(model: nn.Module) -> dict[nn.Module, LayerInfo]:
    """The linear layers that compute a row for each position, in the model's order; without fused experts.

    The head of an encoder is left out if it reads the first token only.
    """
    blocks = dict(enumerate(blocks_of(model, guess=True)))
    numbers = {module: number for number, block in blocks.items() for module in block.modules()}
    paths = {layer: path.split(".") for path, layer in model.named_modules()}
    paths |= {layer: path.split(".") for block in blocks.values() for path, layer in block.named_modules()}
    found = [layer for layer in model.modules() if is_linear(layer) or isinstance(layer, nn.Linear)]
    if reads_first_token(model):
        found = [layer for layer in found if layer in numbers]
    # The number of layers of each block whose paths end with these names.
    counts = Counter((numbers.get(layer), *names) for layer in found for names in _ends(paths[layer]))
    after_attention = layers_after_attention(model)
    infos = {}
    for layer in found:
        block, path = numbers.get(layer), paths[layer]
        name = next((names for names in _ends(path) if counts[block, *names] == 1), path)
        infos[layer] = LayerInfo(block, ".".join(name), _num_weights(layer), layer in after_attention)
    return infos


def _ends(path: list[str]) -> list[list[str]]:
    """The last name of a path, its last two names, and so on."""
    return [path[-count:] for count in range(1, len(path) + 1)]


def _num_weights(layer: nn.Module) -> int:
    # A 4-bit weight is packed, so its numel() is smaller.
    return layer.in_features * layer.out_features if isinstance(layer, nn.Linear) else layer.weight.numel()


def row_gradients(model: nn.Module, objective: Objective, on_example: Callable[[], None]) -> list["RowGradients"]:
    """The rows of dL/dY of each linear layer."""
    layers, batches = linear_layers(model), objective.batches
    device, size = next(model.parameters()).device, (len(batches), batches[0].input_ids.shape[1])
    found = {layer: RowGradients(info, size, device) for layer, info in layers.items()}
    with torch.enable_grad(), _without_weight_gradients(model):
        for number, batch in enumerate(batches):
            with ExitStack() as hooks:
                for layer, rows in found.items():
                    hooks.enter_context(layer.register_forward_hook(rows.hook(number, len(batch.plan.loss_rows))))
                objective.loss(model, batch).backward()
            on_example()
    for rows in found.values():
        rows.move_to_host()
    if not 0 < sum(float(rows.energy_ET.sum()) for rows in found.values()) < float("inf"):
        raise ModelError("The model's gradients on these texts are all zero or not finite; choose another model.")
    return list(found.values())


class RowGradients:
    """The rows of dL/dY of one linear layer, recorded on its device until they are moved to the host.

    Attributes:
        energy_ET: squared norms; on the host in fp64.
        is_zero_ET: whether all M elements are exactly zero; bool.
        elements: the histogram of the absolute values of the elements, in the gradient of each example's mean loss.
        num_elements: the number of all elements, zeros included.
    """

    def __init__(self, info: LayerInfo, size: tuple[int, int], device: torch.device):
        self.info = info
        self.energy_ET = torch.zeros(size, device=device)
        self.is_zero_ET = torch.ones(size, dtype=torch.bool, device=device)
        self.elements, self.num_elements = LogHistogram(device), 0

    def hook(self, example: int, num_losses: int) -> Callable:
        """A forward hook that records an example in the backward pass."""

        def record(dout: Tensor) -> None:
            dout_TM, energy_T = dout.flatten(0, -2), self.energy_ET[example]
            if len(dout_TM) != len(energy_T):
                raise ModelError(
                    f"{self.info.projection} computes {len(dout_TM)} rows for a sequence of {len(energy_T)} tokens, "
                    "so its rows have no position; choose a model without experts."
                )
            is_nonzero_T = nonzero_rows(dout_TM)
            energy_T.copy_(row_norms(dout_TM))
            self.is_zero_ET[example] = ~is_nonzero_T
            self.num_elements += dout_TM.numel()
            for part_RM in dout_TM[is_nonzero_T].split(_ROWS_AT_ONCE):
                magnitude_RM = part_RM.float().abs() / num_losses
                self.elements.count(magnitude_RM, magnitude_RM.square())

        def after_forward(layer: nn.Module, inputs: tuple, output: Tensor) -> None:
            output.register_hook(record)

        return after_forward

    def move_to_host(self) -> None:
        self.energy_ET, self.is_zero_ET = self.energy_ET.cpu().double(), self.is_zero_ET.cpu()


@contextmanager
def _without_weight_gradients(model: nn.Module) -> Iterator[None]:
    """Computes gradients down to the embedding's output, but none of weights."""
    trained = {parameter: parameter.requires_grad for parameter in model.parameters()}
    hook = model.get_input_embeddings().register_forward_hook(lambda layer, inputs, output: output.requires_grad_())
    model.requires_grad_(False)
    try:
        yield
    finally:
        hook.remove()
        for parameter, requires_grad in trained.items():
            parameter.requires_grad_(requires_grad)
