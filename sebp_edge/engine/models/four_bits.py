"""Base models in 4 bits: how large they are, and where they run. Imports no torch."""

from collections.abc import Iterable
from importlib.util import find_spec

# NF4 has an 8-bit scale for each block of weights, and an fp32 scale for 256 of those (Dettmers et al. 2023).
NF4_BLOCK = 64
NF4_BYTES = 0.5 + (1 + 4 / 256) / NF4_BLOCK
INSTALL_4_BITS = "pip install 'sebp-edge[4bit]'"


def has_bitsandbytes() -> bool:
    """Whether bitsandbytes is installed; base models in 4 bits need it."""
    return find_spec("bitsandbytes") is not None


def takes_4_bits(device: str, inputs: Iterable[int]) -> bool:
    """Whether linear layers with these numbers of inputs can run in 4 bits on a device of this kind."""
    return device == "cuda" or (device == "cpu" and not any(number % NF4_BLOCK for number in inputs))
