"""Settings on which a patched block's memory depends, beside its sizes. Each patch's file ends with its own share."""

from typing import NamedTuple

FP32 = 4  # bytes


class Execution(NamedTuple):
    """How a decoder's blocks run in a training.

    Attributes:
        rank: rank of the LoRA adapter on every linear layer; 0 if all weights are trained.
        itemsize: bytes of one number of the base model and of activations.
        on_gpu: whether the device is an NVIDIA GPU, with captured graphs.
        has_kernels: whether norms, gates and the loss run on our kernels.
    """

    rank: int
    itemsize: int
    on_gpu: bool
    has_kernels: bool

    @property
    def trains_all(self) -> bool:
        """Whether all weights are trained, rather than an adapter."""
        return self.rank == 0

    @property
    def has_flash_attention(self) -> bool:
        """Whether one operation computes attention for all sequences; otherwise it runs sequence by sequence."""
        return self.on_gpu and self.itemsize == 2
