"""Tells whether an error says that memory ran out."""

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
