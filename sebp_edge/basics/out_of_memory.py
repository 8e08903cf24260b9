"""Tells whether an error says that memory ran out, and lets work that did not fit go on in smaller parts."""

from collections.abc import Callable

import torch

# Words in torch's messages if the error has no class of its own: on the CPU, on Apple's GPU, in CUDA calls, in cuBLAS.
_OUT_OF_MEMORY = ("DefaultCPUAllocator", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


def ran_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error, or one in its chain of causes, says that memory ran out."""
    known = set()
    while isinstance(error, RuntimeError | MemoryError) and id(error) not in known:
        known.add(id(error))
        has_own_class = isinstance(error, torch.OutOfMemoryError | MemoryError)
        if has_own_class or any(words in str(error) for words in _OUT_OF_MEMORY):
            return True
        error = error.__cause__ or error.__context__
    return False


class Attempt:
    """Context of work for which memory may run out.

    Args:
        can_be_smaller: called if it has run out; whether less is tried next. Otherwise the error is raised.

    Attributes:
        did_not_fit: whether less is to be tried. What was computed is free again only once the context has ended.
    """

    def __init__(self, can_be_smaller: Callable[[], bool]):
        self._can_be_smaller, self.did_not_fit = can_be_smaller, False

    def __enter__(self) -> "Attempt":
        return self

    def __exit__(self, kind, error: BaseException | None, trace) -> bool:
        self.did_not_fit = ran_out_of_memory(error) and self._can_be_smaller()
        return self.did_not_fit
