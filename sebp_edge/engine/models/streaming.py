"""Keeps frozen weights of a decoder's blocks in host memory, and copies each block's to the device before it is used.

Two buffers on the device hold one block each. A block's weights are views of one of them, always the same, so all code
finds them where it finds any weight; but they are right only between the block's own hooks, which wait for its copy
before its forward pass, and again before its backward pass, and start that of the block that follows:

    forward     block   0   1   2   3              backward     block   3   2   1   0
                copies  1   2   3   -                           copies  -   1   0   -

A pass over n blocks with gradients makes 2 n - 2 copies, in parallel with computing, and a captured graph includes
them. Autograd may keep a view of a buffer, whose values are there again in the backward pass, but no copy of it.
"""

from collections import Counter
from collections.abc import Callable, Container, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from sebp_edge.engine.models.architecture import blocks_of, lookup_tables
from sebp_edge.engine.models.shape import spread
from sebp_edge.errors import ModelError
from sebp_edge.machine.locked_memory import lock, readable_by_gpu
from sebp_edge.machine.side_copies import WEIGHTS, begin_copy, wait_for_copies

# Weights begin at multiples of so many bytes, as in torch's allocator, so that products choose the same kernels.
_ALIGNMENT = 256
# Projections that are multiplied together lie side by side.
_TOGETHER = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")


class _Place(NamedTuple):
    """Where a frozen tensor of a block is: an attribute, and its bytes in the block's memory."""

    owner: object
    attribute: str
    dtype: torch.dtype
    shape: torch.Size
    bytes: slice

    def put(self, memory: Tensor) -> None:
        """Makes the tensor a view of `memory`, with a version of its own: copies are no changes to autograd."""
        setattr(self.owner, self.attribute, memory[self.bytes].view(self.dtype).view(self.shape).data)


class StreamedBlocks:
    """The host's copies of blocks' weights, and the two buffers; `add` the blocks in order, then `begin`."""

    def __init__(self, device: torch.device):
        self._device = device
        self._hosts: list[Tensor] = []
        self._places: list[list[_Place]] = []  # until `begin`
        self._buffers: list[Tensor] = []
        # Which block each buffer holds, or will once its copy has ended; and the block that goes on with the pass.
        self._held: list[int | None] = [None, None]
        self._next: int | None = None

    def add(self, block: nn.Module, shared: Container[nn.Parameter] = ()) -> None:
        """Moves a block's frozen matrices to host memory, but those shared; raises a MachineError if that is full."""
        number, places, end = len(self._hosts), [], 0
        for owner, attribute in _frozen(block, shared):
            tensor = getattr(owner, attribute)
            begin = -(-end // _ALIGNMENT) * _ALIGNMENT
            end = begin + tensor.nbytes
            places.append(_Place(owner, attribute, tensor.dtype, tensor.shape, slice(begin, end)))
        host = lock(end, self._device)
        for place in places:
            values = getattr(place.owner, place.attribute)
            host[place.bytes].copy_(values.contiguous().flatten().view(torch.uint8))
            place.put(host)
        self._hosts.append(host)
        self._places.append(places)

        def before_forward(_block, _inputs) -> None:
            if number != self._next:
                # A pass begins, and a graph may have been replayed since the last one.
                self._held = [None, None]
            self._next = number + 1
            self._use(number, number + 1)

        def before_backward(_gradient) -> None:
            self._next = None
            self._use(number, number - 1)

        def after_forward(_block, _inputs, output) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            if torch.is_grad_enabled() and hidden.requires_grad:
                hidden.register_hook(before_backward)

        block.register_forward_pre_hook(before_forward)
        block.register_forward_hook(after_forward)

    def begin(self) -> None:
        """Makes the buffers, and the blocks' weights views of them."""
        size = max(map(len, self._hosts))
        self._buffers = [torch.zeros(size, dtype=torch.uint8, device=self._device) for _ in self._held]
        for number, places in enumerate(self._places):
            for place in places:
                place.put(self._buffers[number % 2])
        self._places = []
        self._use(0, 1)  # so that a part of a block that is tried by itself computes with numbers
        wait_for_copies(self._device, WEIGHTS)

    def _use(self, number: int, following: int) -> None:
        """Has the device wait for a block's weights, and starts to copy the following block's."""
        self._fetch(number)
        wait_for_copies(self._device, WEIGHTS)
        if 0 <= following < len(self._hosts):
            self._fetch(following)

    def _fetch(self, number: int) -> None:
        """Starts to copy a block's weights into its buffer, whose last block has run, unless they are there."""
        if self._held[number % 2] != number:
            self._held[number % 2] = number
            host = self._hosts[number]
            begin_copy(self._buffers[number % 2][: len(host)], host, WEIGHTS)


def move_to_device(
    model: PreTrainedModel,
    device: torch.device,
    number: int,
    compute_dtype: torch.dtype | None,
    check: Callable[[nn.Module], None],
) -> None:
    """Moves a model, of which an adapter is to be trained, from the host to a device, except what stays in host memory.

    Streamed blocks leave their frozen matrices there. A GPU reads rows of tables from there: those of `lookup_tables`
    and, beside streamed blocks, the embeddings, unless they are tied to the head.

    Args:
        model: on the CPU.
        number: of how many blocks the matrices are streamed; they are spread evenly.
        compute_dtype: loads linear layers but the head in 4 bits, which compute in it; None leaves them as they are.
        check: called with each block on the device before it is streamed.
    """
    device = torch.empty(0, device=device).device  # with its number, which names its stream
    blocks, head = blocks_of(model), model.get_output_embeddings()
    if len(blocks) < number:
        raise ModelError(f"{number} blocks were to be streamed, but this model has {len(blocks)} that are known.")
    tables, embedding = lookup_tables(model), model.get_input_embeddings().weight
    if number and embedding is not head.weight:
        tables.append(embedding)
    for table in tables:
        table.is_on_host = True
    streamed, chosen = StreamedBlocks(device), set(spread(number, len(blocks)))
    # A weight of several blocks has no place of its own in a buffer.
    times = Counter(weight for block in blocks for weight in block.parameters())
    shared = {weight for weight, number_of_blocks in times.items() if number_of_blocks > 1}
    for place, block in enumerate(blocks):
        if compute_dtype is not None:
            _quantise(block, head, device, compute_dtype)
        _move(block, device)
        check(block)
        if place in chosen:
            streamed.add(block, shared)
    if compute_dtype is not None:
        _quantise(model, head, device, compute_dtype)
        model.is_loaded_in_4bit = True
    _move(model, device)
    for table in tables if device.type == "cuda" else ():
        host = lock(table.nbytes, device).view(table.dtype).view(table.shape)
        table.data = readable_by_gpu(host.copy_(table.data), device)
    if number:
        streamed.begin()


def _frozen(block: nn.Module, shared: Container[nn.Parameter]) -> Iterator[tuple[object, str]]:
    """Yields a block's own matrices, and the scales of those in 4 bits, as objects with the name of an attribute."""
    for parent in block.modules():
        children = dict(parent.named_children())
        ordered = [*(name for name in _TOGETHER if name in children), *children]
        for name in dict.fromkeys(ordered):
            for weight in children[name].parameters(recurse=False):
                if weight.dim() > 1 and weight not in shared:
                    weight.is_streamed = True
                    yield weight, "data"
                    if (state := getattr(weight, "quant_state", None)) is not None:
                        yield state, "absmax"


def _move(module: nn.Module, device: torch.device) -> None:
    """Moves all tensors to the device, but those that are streamed or stay in host memory."""
    for part in module.modules():
        for weight in part.parameters(recurse=False):
            stays = getattr(weight, "is_streamed", False) or getattr(weight, "is_on_host", False)
            if not stays and weight.device.type != device.type:
                weight.data = weight.data.to(device)
                if (state := getattr(weight, "quant_state", None)) is not None:  # of files in 4 bits
                    state.to(device)
        for name, buffer in part.named_buffers(recurse=False):
            part._buffers[name] = buffer.to(device)


def _quantise(module: nn.Module, head: nn.Module, device: torch.device, compute_dtype: torch.dtype) -> None:
    """Replaces linear layers but the head by ones in 4 bits, as transformers does, quantised on the device."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    for path, layer in list(module.named_modules()):
        if layer is head or (type(layer) is not nn.Linear and not isinstance(layer, Conv1D)):
            continue
        weight_MK = layer.weight.data.T if isinstance(layer, Conv1D) else layer.weight.data
        with torch.device("meta"):
            options = {"compute_dtype": compute_dtype, "compress_statistics": True, "quant_type": "nf4"}
            in_4_bits = Linear4bit(weight_MK.shape[1], weight_MK.shape[0], layer.bias is not None, **options)
        settings = vars(in_4_bits.weight)
        in_4_bits.weight = Params4bit(weight_MK.to(device), requires_grad=False, **settings).to(device)
        in_4_bits.bias = layer.bias
        in_4_bits.requires_grad_(False)
        module.set_submodule(path, in_4_bits)
