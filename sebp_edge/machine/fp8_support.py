"""Which devices multiply FP8. Imports no torch."""

from sebp_edge.errors import MachineError

# Of NVIDIA's Ada, Hopper and Blackwell.
LEAST_CAPABILITY = (8, 9)


def refuse_without_fp8(device: str, capability: tuple[int, int] = LEAST_CAPABILITY) -> None:
    """Raises a MachineError if a device of this kind, or of this compute capability, does not multiply FP8."""
    if device == "cuda" and capability >= LEAST_CAPABILITY:
        return
    found = f"this GPU has {capability[0]}.{capability[1]}" if device == "cuda" else f"this device is {device!r}"
    raise MachineError(
        "A base model in FP8 needs an NVIDIA GPU of compute capability 8.9 or more (Ada, Hopper, Blackwell), but "
        f"{found}; leave out load_in_fp8."
    )
