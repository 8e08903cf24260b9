"""Row norms of dL/dY in every linear layer of a decoder, from a plain forward pass and a dense backward pass.

Nothing is sparsified, and no weight gets a gradient. L is the sum of the losses in nats, not their mean, so a row's
norm depends on its own example only. Examples run one by one, each padded to the context length as in a larger batch.
Shapes: E examples, T positions, M outputs of a layer.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sebp_edge.errors import ModelError
from sebp_edge.models.architecture import blocks_of, is_linear, layers_after_attention
from sebp_edge.ops import nonzero_rows, row_norms
from sebp_edge.rows.row_plan import IGNORE
from sebp_edge.texts.batches import Batch


@dataclass(frozen=True)
class LayerInfo:
    """The position of a linear layer in a decoder.

    Attributes:
        block: index of its block, from 0; None for the head.
        projection: its name within the block, such as "q_proj".
        num_weights: number of its weights; each costs two or four operations per row of the backward pass.
        after_attention: whether it is the head or in the last block (keys and values aside), where only loss rows
            carry gradient.
    """

    block: int | None
    projection: str
    num_weights: int
    after_attention: bool


@dataclass(frozen=True)
class RowGradients:
    """The rows of dL/dY of one linear layer, on the host.

    Attributes:
        energy_ET: squared norms, fp64.
        is_zero_ET: whether all M elements are exactly zero; bool.
    """

    info: LayerInfo
    energy_ET: Tensor
    is_zero_ET: Tensor


def linear_layers(model: nn.Module) -> dict[nn.Module, LayerInfo]:
    """Every linear layer of a decoder in the model's order; 4-bit layers are included, fused experts are not."""
    blocks = {module: number for number, block in enumerate(blocks_of(model, guess=True)) for module in block.modules()}
    found = {path: layer for path, layer in model.named_modules() if is_linear(layer) or isinstance(layer, nn.Linear)}
    # A name that occurs twice in a block, as "c_proj" in GPT-2, gets its parent's name in front.
    names = {path: path.split(".") for path in found}
    counts = Counter((blocks.get(found[path]), parts[-1]) for path, parts in names.items())
    after_attention = layers_after_attention(model)
    infos = {}
    for path, layer in found.items():
        block, name = blocks.get(layer), names[path][-1]
        name = name if counts[block, name] == 1 else ".".join(names[path][-2:])
        infos[layer] = LayerInfo(block, name, _num_weights(layer), layer in after_attention)
    return infos


def _num_weights(layer: nn.Module) -> int:
    # A 4-bit weight is packed, so its numel() is smaller.
    return layer.in_features * layer.out_features if isinstance(layer, nn.Linear) else layer.weight.numel()


def row_gradients(model: nn.Module, batches: list[Batch], on_example: Callable[[], None]) -> list[RowGradients]:
    """The rows of dL/dY of each linear layer, for batches of one example each.

    Args:
        model: a decoder on its device, in evaluation mode.
        batches: on the host, right-padded to the same length.
        on_example: called after each batch.

    Raises:
        ModelError: a layer's number of rows differs from the batch's, or the gradients are not finite or all zero.
    """
    infos, device = linear_layers(model), next(model.parameters()).device
    size = (len(infos), len(batches), batches[0].input_ids.shape[1])
    energies_LET = torch.zeros(size, device=device)
    are_zero_LET = torch.ones(size, dtype=torch.bool, device=device)
    with torch.enable_grad(), _without_weight_gradients(model):
        for number, batch in enumerate(batches):
            handles = [
                layer.register_forward_hook(
                    _recording_hook(info, energies_LET[index, number], are_zero_LET[index, number])
                )
                for index, (layer, info) in enumerate(infos.items())
            ]
            try:
                _loss(model, batch, device).backward()
            finally:
                for handle in handles:
                    handle.remove()
            on_example()
    energies_LET, are_zero_LET = energies_LET.cpu().double(), are_zero_LET.cpu()
    if not 0 < energies_LET.sum() < float("inf"):
        raise ModelError("The model's gradients on these texts are all zero or not finite; choose another model.")
    return [RowGradients(*fields) for fields in zip(infos.values(), energies_LET, are_zero_LET, strict=True)]


def _recording_hook(info: LayerInfo, energy_T: Tensor, is_zero_T: Tensor) -> Callable:
    """A forward hook that records the row norms of a layer's dL/dY on its device, in the backward pass."""

    def record(dout: Tensor) -> None:
        dout_TM = dout.flatten(0, -2)
        if len(dout_TM) != len(energy_T):
            raise ModelError(
                f"{info.projection} computes {len(dout_TM)} rows for a sequence of {len(energy_T)} tokens, so its rows "
                "have no position; choose a model without experts."
            )
        energy_T.copy_(row_norms(dout_TM))
        is_zero_T.copy_(~nonzero_rows(dout_TM))

    def after_forward(layer: nn.Module, inputs: tuple, output: Tensor) -> None:
        output.register_hook(record)

    return after_forward


def _loss(model: nn.Module, batch: Batch, device: torch.device) -> Tensor:
    """The summed loss of a batch in nats, from all logits, as transformers computes it."""
    inputs = {"input_ids": batch.input_ids.to(device), "attention_mask": batch.attention_mask.to(device)}
    logits_NV = model(**inputs, use_cache=False).logits[:, :-1].flatten(0, 1)
    labels_N = batch.labels[:, 1:].flatten().to(device)
    return F.cross_entropy(logits_NV.float(), labels_N, ignore_index=IGNORE, reduction="sum")


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
