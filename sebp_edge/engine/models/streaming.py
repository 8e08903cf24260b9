"""Keeps frozen weights of a decoder's blocks in host memory, and copies each block's to the device before it is used.

Two buffers on the device hold one block each. A block's weights are views of one of them, always the same, so all code
finds them where it finds any weight; but they are right only between the block's own hooks, which wait for its copy
before its forward pass, and again before its backward pass, and start that of the block that follows:

    forward     block   0   1   2   3              backward     block   3   2   1   0
                copies  1   2   3   -                           copies  -   1   0   -

A pass over n blocks with gradients makes 2 n - 2 copies, in parallel with computing, and a captured graph includes
them. Autograd may keep a view of a buffer, whose values are there again in the backward pass, but no copy of it.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from sebp_edge.basics.out_of_memory import ran_out_of_memory
from sebp_edge.basics.units import gigabytes
from sebp_edge.engine.models.architecture import blocks_of
from sebp_edge.engine.models.shape import spread
from sebp_edge.errors import MachineError, ModelError
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
        self._num_locked = 0
        self._places: list[list[_Place]] = []  # until `begin`
        self._buffers: list[Tensor] = []
        # Which block each buffer holds, or will once its copy has ended; and the block that goes on with the pass.
        self._held: list[int | None] = [None, None]
        self._next: int | None = None

    def lock(self, size: int) -> Tensor:
        """Allocates bytes of host memory that stay where they are, so that the GPU copies and reads them by itself."""
        try:
            memory = torch.zeros(size, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        except RuntimeError as error:
            if not ran_out_of_memory(error):
                raise
            got, more = gigabytes(self._num_locked), gigabytes(size)
            raise MachineError(
                f"Streamed weights got {got} of locked host memory, and {more} more were refused; close other "
                "programs, raise the memory budget, so that more stays on the GPU, or choose a smaller model."
            ) from error
        self._num_locked += size
        return memory

    def add(self, block: nn.Module) -> None:
        """Moves a block's frozen matrices to host memory; raises a MachineError if that is full."""
        number, places, end = len(self._hosts), [], 0
        for owner, attribute in _frozen(block):
            tensor = getattr(owner, attribute)
            begin = -(-end // _ALIGNMENT) * _ALIGNMENT
            end = begin + tensor.nbytes
            places.append(_Place(owner, attribute, tensor.dtype, tensor.shape, slice(begin, end)))
        host = self.lock(end)
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
        self._device = self._buffers[0].device  # with its number, which names its stream
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


def stream_blocks(
    model: PreTrainedModel,
    number: int,
    device: torch.device,
    compute_dtype: torch.dtype | None,
    check: Callable[[nn.Module], None],
) -> None:
    """Moves a model from the host to a device, with the frozen matrices of some blocks streamed.

    Embeddings that are not tied to the head stay in host memory too: a GPU reads their rows from there.

    Args:
        model: on the CPU.
        number: of how many blocks the matrices are streamed; they are spread evenly.
        compute_dtype: loads the linear layers of blocks in 4 bits, which compute in it; None leaves them as they are.
        check: called with each block on the device before it is streamed.
    """
    blocks = blocks_of(model)
    if len(blocks) < number:
        raise ModelError(f"{number} blocks were to be streamed, but this model has {len(blocks)} that are known.")
    streamed, chosen = StreamedBlocks(device), set(spread(number, len(blocks)))
    for place, block in enumerate(blocks):
        if compute_dtype is not None:
            _quantise(block, device, compute_dtype)
        _move(block, device)
        check(block)
        if place in chosen:
            streamed.add(block)
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    if embedding is not head and device.type == "cuda":
        host = streamed.lock(embedding.nbytes).view(embedding.dtype).view(embedding.shape)
        embedding.data = _readable_by_gpu(host.copy_(embedding.data))
    _move(model, device)
    streamed.begin()
    if compute_dtype is not None:
        model.is_loaded_in_4bit = True


def _frozen(block: nn.Module) -> Iterator[tuple[object, str]]:
    """Yields a block's matrices, and the scales of those in 4 bits, as objects with the name of an attribute."""
    for parent in block.modules():
        children = dict(parent.named_children())
        ordered = [*(name for name in _TOGETHER if name in children), *children]
        for name in dict.fromkeys(ordered):
            for weight in children[name].parameters(recurse=False):
                if weight.dim() > 1:
                    weight.is_streamed = True
                    yield weight, "data"
                    if (state := getattr(weight, "quant_state", None)) is not None:
                        yield state, "absmax"


def _move(module: nn.Module, device: torch.device) -> None:
    """Moves all tensors to the device, but those that are streamed."""
    for part in module.modules():
        for weight in part.parameters(recurse=False):
            if not getattr(weight, "is_streamed", False) and weight.device.type != device.type:
                weight.data = weight.data.to(device)
        for name, buffer in part.named_buffers(recurse=False):
            part._buffers[name] = buffer.to(device)


def _quantise(block: nn.Module, device: torch.device, compute_dtype: torch.dtype) -> None:
    """Replaces a block's linear layers by ones in 4 bits, as transformers does, quantised on the device."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    for path, layer in list(block.named_modules()):
        if type(layer) is not nn.Linear and not isinstance(layer, Conv1D):
            continue
        weight_MK = layer.weight.data.T if isinstance(layer, Conv1D) else layer.weight.data
        with torch.device("meta"):
            options = {"compute_dtype": compute_dtype, "compress_statistics": True, "quant_type": "nf4"}
            in_4_bits = Linear4bit(weight_MK.shape[1], weight_MK.shape[0], layer.bias is not None, **options)
        settings = vars(in_4_bits.weight)
        in_4_bits.weight = Params4bit(weight_MK.to(device), requires_grad=False, **settings).to(device)
        in_4_bits.bias = layer.bias
        in_4_bits.requires_grad_(False)
        block.set_submodule(path, in_4_bits)


class _Mapped:
    """Locked host memory under the address by which a GPU reads it, as torch takes memory of other libraries."""

    def __init__(self, host: Tensor):
        self._host = host
        self.__cuda_array_interface__ = {
            "shape": (host.nbytes,),
            "typestr": "|u1",
            "data": (host.data_ptr(), False),
            "version": 3,
        }


def _readable_by_gpu(host: Tensor) -> Tensor:
    """Returns locked host memory as a tensor on the GPU, which reads it over the bus each time."""
    return torch.as_tensor(_Mapped(host)).view(host.dtype).view(host.shape)
