"""Makes cuBLAS add the parts of a split product in fp32.

If a product has few rows, cuBLAS splits it along its inner dimension, and torch lets it add the parts in bf16. So the
gradients of active rows alone would be further from the exact ones than those of the padded batch, whose products are
large enough to stay whole. Measured with LoRA on GPT-2's layers, which are split at the sizes of usual batches.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def precise_sums() -> Iterator[None]:
    """Context in which the whole process adds the parts of products in fp32; on exit, what was allowed before is again.

    A context within another one changes nothing, so contexts of several threads may overlap.
    """
    matmul = torch.backends.cuda.matmul
    names = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")
    allowed = [name for name in names if getattr(matmul, name)]
    for name in allowed:
        setattr(matmul, name, False)
    try:
        yield
    finally:
        for name in allowed:
            setattr(matmul, name, True)
