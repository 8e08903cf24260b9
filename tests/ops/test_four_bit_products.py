"""Products with weights in 4 bits, against fp64 products with the matrices that these stand for."""

import os
import re
from functools import partial

import pytest
import torch
from command import start
from pairwise import pairwise
from random_cases import DEVICE, assert_as_good, draw, twice

from sebp_edge.ops import (
    FourBits,
    GatedInputs,
    LoraGroup,
    LoraProjection,
    QuantisedScales,
    QuantisedWeight,
    Recompute,
    detect,
    gated,
    gated_lora_linear,
    lora_linear,
)

pytest.importorskip("triton", reason="Triton is not installed on this platform")
from sebp_edge.ops.frozen_weights import FEW_ROWS
from sebp_edge.ops.gpu import four_bit_products
from sebp_edge.ops.gpu.four_bit_products import FourBitTiles

# Layers multiply only by tensor cores, in 16 bits; Triton's interpreter has no bf16.
DTYPES = [torch.float16, torch.bfloat16 if DEVICE == "cuda" else torch.float32]
RANK, SCALING = 5, 1.5
# More and fewer columns than rows of a tile, with and without parts.
TILES = [FourBitTiles(64, 64, 4, 4, 3), FourBitTiles(64, 128, 1, 4, 2), FourBitTiles(128, 64, 40, 4, 3)]
OUTPUT_TILES = [
    *TILES[:2],
    FourBitTiles(64, 256, 4, 4, 2, in_registers=True),
    FourBitTiles(128, 256, 1, 4, 3, in_registers=True),
]


pytestmark = pytest.mark.usefixtures("our_kernels")


def in_4_bits(num_outputs, num_inputs, block=64, nested=True, seed=0):
    """A weight of random codes, whose last block may not be full."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    draw = partial(torch.rand, generator=generator, device=DEVICE)
    blocks = -(-num_outputs * num_inputs // block)
    packed = torch.randint(
        256, (num_outputs * num_inputs // 2, 1), dtype=torch.uint8, generator=generator, device=DEVICE
    )
    code, scales, of_scales = draw(16).sort().values * 2 - 1, draw(blocks) / 8, None
    if nested:
        scales = torch.randint(256, (blocks,), dtype=torch.uint8, generator=generator, device=DEVICE)
        of_scales = QuantisedScales(draw(256).sort().values * 2 - 1, draw(-(-blocks // 4)) / 8, draw(()), 4)
    return FourBits(packed, code, scales, block, of_scales)


def matrix_of(weight, num_outputs, num_inputs, dtype):
    """The matrix in `dtype`, by definition."""
    scales = weight.scales
    if weight.of_scales:
        code, second, offset, block = weight.of_scales
        scales = code[scales.int()] * second.repeat_interleave(block)[: len(scales)] + offset
    codes = torch.cat([weight.packed >> 4, weight.packed & 15], dim=1).flatten()
    values = weight.code[codes.int()] * scales.repeat_interleave(weight.block)[: len(codes)]
    return values.to(dtype).view(num_outputs, num_inputs)


def within_nan(matrix):
    """The same matrix, with NaN around it in memory."""
    buffer = torch.full((matrix.shape[0] + 2, matrix.shape[1] + 3), torch.nan, dtype=matrix.dtype, device=DEVICE)
    buffer[1:-1, 2:-1] = matrix
    return buffer[1:-1, 2:-1]


CASES = dict(
    num_rows=[1, 7, 64, 80, 96, 128],
    # FourBitTiles that are not full, a block across rows, one that is not full, and a single row.
    **{"num_inputs, outs": [(64, (64,)), (192, (70,)), (320, (33, 1, 40)), (64, (3, 130)), (256, (1,))]},
    block_nested=[(64, True), (128, False), (64, False), (4096, True)],
    dtype=DTYPES,
)


def random_weights(num_inputs, outs, block_nested, dtype):
    weights = [in_4_bits(each, num_inputs, *block_nested, seed=number) for number, each in enumerate(outs)]
    return weights, [matrix_of(weight, each, num_inputs, dtype) for weight, each in zip(weights, outs, strict=True)]


@pairwise(tiles=OUTPUT_TILES, **CASES)
def test_outputs(num_rows, num_inputs, outs, block_nested, dtype, tiles, poisoned_memory):
    weights, matrices = random_weights(num_inputs, outs, block_nested, dtype)
    x = within_nan(draw(num_rows, num_inputs, dtype=dtype))
    before = draw(num_rows, sum(outs), dtype=dtype, seed=1)
    truth = before.double() + x.double() @ torch.cat(matrices).double().T
    # Rows around the outputs, which must stay as they are.

    def add():
        buffer = torch.full((num_rows + 2, sum(outs)), torch.nan, dtype=dtype, device=DEVICE)
        buffer[1:-1] = before
        four_bit_products.add_outputs_(buffer[1:-1], x, weights, outs, tiles)
        return buffer

    first, again = twice(add)
    assert_as_good(first[1:-1], truth, dtype)
    assert first[0].isnan().all() and first[-1].isnan().all()
    assert torch.equal(first[1:-1], again[1:-1])


@pairwise(tiles=TILES, **CASES)
def test_inputs(num_rows, num_inputs, outs, block_nested, dtype, tiles, poisoned_memory):
    weights, matrices = random_weights(num_inputs, outs, block_nested, dtype)
    dout = within_nan(draw(num_rows, sum(outs), dtype=dtype))
    truth = dout.double() @ torch.cat(matrices).double()
    first, again = twice(lambda: four_bit_products.inputs(dout, weights, outs, num_inputs, tiles=tiles))
    assert_as_good(first, truth, dtype)
    assert torch.equal(first, again)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block, nested", [(64, True), (64, False), (128, True)])
def test_rows_with_a_single_one_give_weights_bit_for_bit(block, nested, dtype):
    # A GPU looks codes up by instructions of its own, the interpreter in plain Triton.
    (weight,), (matrix,) = random_weights(128, (70,), (block, nested), dtype)
    ones = torch.eye(128, dtype=dtype, device=DEVICE)
    out = torch.zeros(128, 70, dtype=dtype, device=DEVICE)
    four_bit_products.add_outputs_(out, ones, [weight], [70])
    assert torch.equal(out.T, matrix)
    assert torch.equal(four_bit_products.inputs(ones[:70, :70], [weight], [70], 128), matrix)


@pytest.mark.parametrize("steps", [[24], [24, 8, 8], [64, 64], [1, 2, 1]])
@pytest.mark.parametrize("most", [0, 1, 5, 10, 11])
def test_a_contraction_has_as_many_parts_as_programs_fit(steps, most):
    def num_parts(share):
        return sum(-(-each // share) for each in steps)

    share = four_bit_products._share(steps, most)
    assert num_parts(share) <= max(most, len(steps))
    assert share == 1 or num_parts(share - 1) > most


COMPILED_FOR_HOPPER = """
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from sebp_edge.ops.gpu.four_bit_products import INPUT_TILES, LOW, _output_tiles, _row_blocks
from sebp_edge.ops.gpu.four_bit_products import _four_bit_product_kernel as kernel

for of_inputs, sizes in ((False, (16, 80, 128)), (True, (80, 128))):
    for num_rows in sizes:
        tiles = INPUT_TILES if of_inputs else _output_tiles(num_rows)
        blocks = _row_blocks(num_rows, of_inputs=of_inputs)
        constants = dict(stride_fr=1, OF_INPUTS=of_inputs, IS_EVEN=True, BLOCK=64, SCALE_BLOCK=256)
        constants |= dict(IN_PTX=True, COLUMNS=tiles.columns, DEPTH=tiles.depth, BLOCKS=blocks)
        constants |= dict(LOW_BLOCK_R=16, **LOW) | ({} if tiles.in_registers else {"interleaved_ptr": None})
        types = dict.fromkeys(["packed_ptrs", "scales_ptrs"], ("*u8",)) | {"outs": ("i32",), "scaling": "fp32"}
        types |= dict.fromkeys(["code_ptrs", "scale_code_ptrs", "second_scales_ptrs", "offset_ptrs"], ("*fp32",))
        types |= dict.fromkeys(["x_ptr", "interleaved_ptr", "factor_ptr"], "*bf16")
        types |= dict.fromkeys(["out_ptr", "low_ptr"], "*fp32")
        types = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
        values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
        options = dict(num_warps=tiles.num_warps, num_stages=tiles.num_stages, enable_fp_fusion=False)
        # Else X would not be loaded ahead, and words not 16 bytes at a time.
        in_x = ["x_ptr", "interleaved_ptr", "stride_xn"]
        places = [(kernel.arg_names.index(name),) for name in in_x if name not in constants]
        places.append((kernel.arg_names.index("packed_ptrs"), 0))
        aligned = dict.fromkeys(places, [["tt.divisibility", 16]])
        compiled = compile(ASTSource(kernel, types, values, aligned), GPUTarget("cuda", 90, 32), options)
        print(compiled.asm["ttgir"])
        of_x = 2 * tiles.num_stages * sum(blocks) * tiles.depth
        print("shared:", compiled.metadata.shared, "of X:", of_x)
"""


@pytest.mark.slow
def test_products_read_registers_and_end_before_these_are_reused():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    with start([COMPILED_FOR_HOPPER], cold=True, env=environment) as compiler:
        program, errors = compiler.communicate(timeout=200)
    assert compiler.returncode == 0, errors
    # `pendings` products may still run after a wait.
    waits = re.findall(r"warp_group_dot_wait .*pendings = (\d+)", program)
    assert len(waits) == program.count("warp_group_dot ") > 6
    assert set(waits) == {"0"}
    shared = [tuple(map(int, found)) for found in re.findall(r"shared: (\d+) of X: (\d+)", program)]
    # Weights of outputs are multiplied where they were expanded.
    assert all(whole == of_x for whole, of_x in shared[:2])
    # What any GPU has since Ampere.
    assert max(shared)[0] <= 99 * 1024


LOW_CASES = dict(
    num_rows=[1, 33, 80, 128],
    **{"num_inputs, outs": [(64, (64,)), (192, (70,)), (320, (33, 1, 40)), (64, (3, 130))]},
    rank=[1, 5, 16, 40, 64],
    # Terms of a part: of some projections fewer than of others, which then have parts of zeros.
    share=[16, 48, 1024],
    dtype=DTYPES,
)


def with_shares_of(share, monkeypatch):
    """Splits D and U into parts of this many terms."""
    monkeypatch.setattr(four_bit_products, "LOW", four_bit_products.LOW | {"LOW_SHARE": share, "LOW_DEPTH": 16})


@pairwise(tiles=OUTPUT_TILES, **LOW_CASES)
def test_outputs_with_d(num_rows, num_inputs, outs, rank, share, dtype, tiles, monkeypatch, poisoned_memory):
    with_shares_of(share, monkeypatch)
    weights, matrices = random_weights(num_inputs, outs, (64, True), dtype)
    x = within_nan(draw(num_rows, num_inputs, dtype=dtype))
    lora_A = draw(rank * len(outs), num_inputs, dtype=dtype, seed=1)
    first, again = twice(lambda: four_bit_products.outputs_and_low(x, weights, outs, lora_A, tiles))
    truths = x.double() @ torch.cat(matrices).double().T, x.double() @ lora_A.double().T
    for parts, same, truth in zip(first, again, truths, strict=True):
        assert_as_good(parts.sum(0).to(dtype), truth, dtype)
        assert torch.equal(parts, same)


@pairwise(tiles=TILES, **LOW_CASES)
def test_inputs_with_u(num_rows, num_inputs, outs, rank, share, dtype, tiles, monkeypatch, poisoned_memory):
    with_shares_of(share, monkeypatch)
    weights, matrices = random_weights(num_inputs, outs, (64, True), dtype)
    dout = within_nan(draw(num_rows, sum(outs), dtype=dtype))
    lora_B = draw(sum(outs), rank, dtype=dtype, seed=1)
    first, again = twice(
        lambda: four_bit_products.inputs_and_low(dout, weights, outs, num_inputs, lora_B, SCALING, tiles)
    )
    sides = zip(dout.double().split(outs, dim=1), lora_B.double().split(outs), strict=True)
    truths = dout.double() @ torch.cat(matrices).double(), SCALING * torch.cat([d @ b for d, b in sides], dim=1)
    for parts, same, truth in zip(first, again, truths, strict=True):
        assert_as_good(parts.sum(0).to(dtype), truth, dtype)
        assert torch.equal(parts, same)


# ---------------------------------------------------------------------------------------------------------- in layers


def refuse(*_, **__):
    raise AssertionError("not this way")


def random_layers(num_inputs, outs, dtype, rank=RANK):
    """Projections of one input in 4 bits, and their matrices."""
    weights, matrices = random_weights(num_inputs, outs, (64, True), dtype)
    projections = [
        LoraProjection(
            QuantisedWeight(dtype, refuse, None, weight),
            draw(each, dtype=dtype, seed=each) if number % 2 else None,
            draw(rank, num_inputs, seed=number).requires_grad_(),
            draw(each, rank, seed=number).requires_grad_(),
            SCALING,
        )
        for number, (weight, each) in enumerate(zip(weights, outs, strict=True))
    ]
    return projections, matrices


def true_outputs(x, projections, matrices):
    """The outputs in fp64, of adapters as the op rounds them."""
    dtype, outputs = matrices[0].dtype, []
    for (_, bias, lora_A, lora_B, scaling), matrix in zip(projections, matrices, strict=True):
        lora_A, lora_B = (each + (each.detach().to(dtype) - each.detach()).double() for each in (lora_A, lora_B))
        out = x @ matrix.double().T + scaling * (x @ lora_A.T) @ lora_B.T
        outputs.append(out if bias is None else out + bias.double())
    return outputs


def gradients_of(outputs, douts, leaves):
    return torch.autograd.grad(outputs, leaves, [dout.to(out.dtype) for dout, out in zip(douts, outputs, strict=True)])


@pairwise(
    num_rows=[1, 80, FEW_ROWS],
    given=["all", "rows", "slice", "detect"],
    outs=[(40, 33), (70,), (24, 9, 90)],
    joined=[False, True],
    rank=[1, RANK, 16],
)
def test_layers_multiply_few_rows_by_the_codes(num_rows, given, outs, joined, rank, monkeypatch, poisoned_memory):
    with_shares_of(32, monkeypatch)
    dtype = torch.float16
    projections, matrices = random_layers(192, outs, dtype, rank)
    x = draw(num_rows, 192, dtype=dtype).requires_grad_()
    active = torch.arange(num_rows, device=DEVICE)[num_rows // 3 : num_rows // 3 + max(1, num_rows // 4)]
    rows = {"all": None, "rows": active, "slice": slice(active[0].item(), active[-1].item() + 1), "detect": detect}[
        given
    ]
    douts = [draw(num_rows, each, dtype=dtype, seed=each) for each in outs]
    for dout in douts if given != "all" else []:
        dout[[row for row in range(num_rows) if row not in active]] = 0
    leaves = [x, *(leaf for each in projections for leaf in (each.lora_A, each.lora_B))]
    group = LoraGroup.stack(projections, joined=joined)
    assert (group.joined is not None) == joined

    def compute():
        outputs = lora_linear(x, group, rows)
        return outputs, gradients_of(outputs, douts, leaves)

    (outputs, found), (same_outputs, same) = twice(compute)
    truths = true_outputs(x.double(), projections, matrices)
    for output, truth in zip(outputs, truths, strict=True):
        # D is rounded, too.
        assert (output.double() - truth).norm() <= 2 * torch.finfo(dtype).eps * truth.norm()
    for one, other in zip(found, gradients_of(truths, douts, leaves), strict=True):
        assert (one.double() - other).norm() <= 2 * torch.finfo(dtype).eps * other.norm()
    assert all(map(torch.equal, (*outputs, *found), (*same_outputs, *same)))
    if given != "all":
        assert not found[0][[row for row in range(num_rows) if row not in active]].any()


@pytest.mark.slow
@pytest.mark.parametrize("joined", [False, True])
def test_a_gated_layer_multiplies_few_rows_by_the_codes(joined, monkeypatch, poisoned_memory):
    with_shares_of(32, monkeypatch)
    dtype = torch.float16
    projections, matrices = random_layers(192, (70,), dtype)
    gate, up = (draw(80, 192, dtype=dtype, seed=number).requires_grad_() for number in range(2))
    dout = draw(80, 70, dtype=dtype, seed=2)
    group = LoraGroup.stack(projections, joined=joined)
    out = gated_lora_linear(gated(gate, up, "silu"), GatedInputs(gate, up, "silu"), group)
    hidden = torch.nn.functional.silu(gate.double()) * up.double()
    (truth,) = true_outputs(hidden, projections, matrices)
    assert (out.double() - truth).norm() <= 3 * torch.finfo(dtype).eps * truth.norm()
    leaves = [gate, up, projections[0].lora_A, projections[0].lora_B]
    for one, other in zip(gradients_of([out], [dout], leaves), gradients_of([truth], [dout], leaves), strict=True):
        assert (one.double() - other).norm() <= 3 * torch.finfo(dtype).eps * other.norm()


@pytest.mark.parametrize(
    "num_rows, num_inputs, dtype", [(FEW_ROWS + 1, 64, torch.float16), (7, 96, torch.float16), (7, 64, torch.float32)]
)
def test_more_rows_and_other_weights_are_multiplied_by_matrices(num_rows, num_inputs, dtype, monkeypatch):
    monkeypatch.setattr(four_bit_products, "_launch", refuse)
    projections, matrices = random_layers(num_inputs, (40, 33), dtype)
    x = draw(num_rows, num_inputs, dtype=dtype)
    truths = true_outputs(x.double(), projections, matrices)
    for found, truth in zip(lora_linear(x, LoraGroup.stack(projections)), truths, strict=True):
        assert (found.double() - truth).norm() <= 2 * max(1e-6, torch.finfo(dtype).eps) * truth.norm()


def test_no_rows_and_large_ranks_are_multiplied_apart(monkeypatch):
    monkeypatch.setattr(four_bit_products, "outputs_and_low", refuse)
    for rank, num_rows in ((RANK, 0), (four_bit_products.MAX_LOW_RANK + 1, 7)):
        projections, matrices = random_layers(64, (40, 33), torch.float16, rank)
        x = draw(num_rows, 64, dtype=torch.float16)
        outputs = lora_linear(x, LoraGroup.stack(projections, joined=True))
        for found, truth in zip(outputs, true_outputs(x.double(), projections, matrices), strict=True):
            assert found.shape == truth.shape
            assert (found.double() - truth).norm() <= 2 * torch.finfo(torch.float16).eps * truth.norm()


def test_recomputed_inputs_and_changed_adapters_are_used():
    projections, matrices = random_layers(64, (40, 33), torch.float16)
    group, douts = LoraGroup.stack(projections, joined=True), [draw(80, 40, seed=1), draw(80, 33, seed=2)]
    with torch.no_grad():
        for each in projections:
            each.lora_A.mul_(3)
            each.lora_B.neg_()
    group.refresh()
    x = draw(80, 64, dtype=torch.float16)
    half, leaves = (x / 2).requires_grad_(), [leaf for each in projections for leaf in (each.lora_A, each.lora_B)]
    outputs = lora_linear(half, group, recompute=Recompute(lambda whole: whole / 2, (x,)))
    truths = true_outputs(x.double() / 2, projections, matrices)
    pairs = [*zip(outputs, truths, strict=True)]
    pairs += zip(gradients_of(outputs, douts, leaves), gradients_of(truths, douts, leaves), strict=True)
    for found, truth in pairs:
        assert (found.double() - truth).norm() <= 2 * torch.finfo(torch.float16).eps * truth.norm()


@pytest.mark.gpu
def test_a_weight_may_have_more_than_2_to_the_31_elements():
    num_outputs, num_inputs, last = 2**20 + 64, 2**11, 64
    weight = in_4_bits(num_outputs, num_inputs)
    # The last rows, whose blocks of scales begin at a multiple of 4.
    first = (num_outputs - last) * num_inputs // 64
    end = weight._replace(
        packed=weight.packed[first * 32 :],
        scales=weight.scales[first:],
        of_scales=weight.of_scales._replace(scales=weight.of_scales.scales[first // 4 :]),
    )
    assert first * 64 > 2**31 - 1
    matrix = matrix_of(end, last, num_inputs, torch.bfloat16).double()
    x = draw(16, num_inputs, dtype=torch.bfloat16)
    out = torch.zeros(16, num_outputs, dtype=torch.bfloat16, device=DEVICE)
    four_bit_products.add_outputs_(out, x, [weight], [num_outputs])
    assert not out.isnan().any()
    assert_as_good(out[:, -last:], x.double() @ matrix.T, torch.bfloat16)
    dout = torch.zeros(16, num_outputs, dtype=torch.bfloat16, device=DEVICE)
    dout[:, -last:] = draw(16, last, dtype=torch.bfloat16, seed=1)
    found = four_bit_products.inputs(dout, [weight], [num_outputs], num_inputs)
    assert_as_good(found, dout[:, -last:].double() @ matrix, torch.bfloat16)
