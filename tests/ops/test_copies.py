"""Many small copies run in one launch."""

import pytest
import torch
from random_cases import (
    DTYPES,
    draw,
)

from sebp_edge.ops.copies import TensorCopy, copy_all, repeatedly


@pytest.mark.parametrize("dtype", DTYPES)
def test_many_copies_in_one_launch_have_the_bits_of_each(dtype, poisoned_memory):
    sizes = [(1, 1), (3, 5000), (70, 33), (0, 4), (2048, 1)]
    wide = [draw(rows + 1, 2 * columns, dtype=dtype, seed=rows) for rows, columns in sizes]
    expected = [each.clone() for each in wide]

    def copies(targets):
        return [
            TensorCopy(draw(*size, seed=number), target[1:, size[1] :], scale)
            for number, (size, target, scale) in enumerate(zip(sizes, targets, (1.0, 0.3, 2.0, 1.0, -1.0), strict=True))
        ]

    run = repeatedly(copies(wide))
    copy_all(copies(expected))
    run()
    assert all(map(torch.equal, wide, expected))
    run()
    assert all(map(torch.equal, wide, expected))
