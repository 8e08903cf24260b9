"""Weights in 4 bits: the kernel writes bitsandbytes' values, bit for bit."""

import pytest
import torch
from pairwise import pairwise
from random_cases import DEVICE, DTYPES

from sebp_edge.engine.models.lora import four_bits_of
from sebp_edge.ops import QuantisedWeight
from sebp_edge.ops.frozen_weights import dequantise

functional = pytest.importorskip(
    "bitsandbytes.functional", reason="bitsandbytes is not installed: pip install 'sebp-edge[4bit]'"
)


pytestmark = pytest.mark.usefixtures("our_kernels")


def refuse(out):
    raise AssertionError("the kernel can read this weight")


def packed(shape, dtype, seed=0, **options):
    """A random weight in 4 bits, as an op takes it, and the matrix that it stands for."""
    generator = torch.Generator().manual_seed(seed)
    # Blocks of different sizes, the first of zeros only.
    weight = torch.randn(shape, generator=generator) * torch.rand(shape[0], 1, generator=generator) ** 9
    weight[0] = 0
    options = {"quant_type": "nf4"} | options
    data, state = functional.quantize_4bit(weight.to(DEVICE, dtype), **options)
    data.quant_state = state
    # bitsandbytes compiles what it computes of blocks that are not full, for each shape and dtype.
    with torch.compiler.set_stance("force_eager"):
        return QuantisedWeight(dtype, refuse, None, four_bits_of(data)), dequantised(data, state)


def dequantised(data, state):
    """The values as bitsandbytes computes them on a GPU, and by definition elsewhere.

    On a CPU with AVX-512, bitsandbytes 0.50 takes the scales of other blocks where a block ends within a row, and
    flushes subnormal values to zero.
    """
    if data.is_cuda:
        return functional.dequantize_4bit(data, state)
    scales = state.absmax
    if state.nested:
        scales = functional.dequantize_blockwise(scales, state.state2) + state.offset
    codes = torch.stack([data.flatten() >> 4, data.flatten() & 15], dim=1).flatten()[: state.shape.numel()]
    values = state.code[codes.long()] * scales.float().repeat_interleave(state.blocksize)[: len(codes)]
    return values.to(state.dtype).view(state.shape)


@pairwise(
    # A block that is not full, an odd number of weights, more than one tile and more than one block of scales.
    shapes=[[(7, 64)], [(5, 33), (3, 33), (1, 33)], [(70, 192), (2, 192)], [(1, 3)], [(300, 67), (31, 67), (31, 67)]],
    dtype=DTYPES,
    compress_statistics=[True, False],
    blocksize=[64, 128, 4096],
)
def test_matrices_are_bitsandbytes_bit_for_bit(shapes, dtype, compress_statistics, blocksize, poisoned_memory):
    options = {"compress_statistics": compress_statistics, "blocksize": blocksize}
    weights, expected = zip(*(packed(each, dtype, n, **options) for n, each in enumerate(shapes)), strict=True)
    columns = [each[0] for each in shapes]
    # Rows around the matrices, which must stay as they are.
    buffer = torch.empty(sum(columns) + 2, shapes[0][1], dtype=dtype, device=DEVICE)
    dequantise(weights, buffer[1:-1].split(columns))
    assert torch.equal(buffer[1:-1], torch.cat(expected))
    assert buffer[0].isnan().all() and buffer[-1].isnan().all()


def test_two_runs_give_the_same_bits(poisoned_memory):
    weights, _ = zip(*(packed((65, 129), torch.float16, n) for n in range(2)), strict=True)
    first, second = (torch.empty(130, 129, dtype=torch.float16, device=DEVICE) for _ in range(2))
    for buffer in (first, second):
        dequantise(weights, buffer.split(65))
    assert torch.equal(first, second)


@pytest.mark.parametrize("others", [{"quant_type": "fp4"}, {"blocksize": 128}, {"compress_statistics": False}], ids=str)
def test_weights_that_one_launch_cannot_read_are_dequantised_by_bitsandbytes(others):
    (one, matrix), (other, other_matrix) = packed((3, 64), torch.float32), packed((2, 64), torch.float32, **others)
    one, other = (
        weight._replace(dequantise=lambda out, known=known: out.copy_(known))
        for weight, known in ((one, matrix), (other, other_matrix))
    )
    buffer = torch.empty(5, 64, device=DEVICE)
    dequantise([one, other], buffer.split([3, 2]))
    assert torch.equal(buffer, torch.cat([matrix, other_matrix]))


@pytest.mark.gpu
def test_a_matrix_may_have_more_than_2_to_the_31_elements():
    rows, columns = 2**20 + 19, 2**11
    few, _ = packed((rows % 4096, columns), torch.bfloat16, compress_statistics=True)
    period = few.four_bits.packed.numel()
    times = -(-rows * columns // 2 // period)

    def repeated(tensor, count):
        return tensor.flatten().repeat(times)[:count].contiguous()

    blocks = rows * columns // 64
    many = few.four_bits._replace(
        packed=repeated(few.four_bits.packed, rows * columns // 2),
        scales=torch.randint(256, (blocks,), dtype=torch.uint8, device=DEVICE),
        of_scales=few.four_bits.of_scales._replace(scales=torch.rand(-(-blocks // 256), device=DEVICE)),
    )
    matrix = torch.full((rows, columns), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    dequantise([few._replace(four_bits=many)], [matrix])
    # The last rows, whose blocks of scales begin at a multiple of 256.
    first = (rows - 8) * columns // 64 // 256 * 256
    end = many._replace(
        packed=many.packed[first * 32 :],
        scales=many.scales[first:],
        of_scales=many.of_scales._replace(scales=many.of_scales.scales[first // 256 :]),
    )
    expected = torch.empty(rows * columns - first * 64, dtype=torch.bfloat16, device=DEVICE)
    dequantise([few._replace(four_bits=end)], [expected])
    assert rows * columns > 2**31 and first * 64 > 2**31
    assert torch.equal(matrix.flatten()[first * 64 :], expected)
    assert not any(part.isnan().any() for part in matrix.split(2**17))
