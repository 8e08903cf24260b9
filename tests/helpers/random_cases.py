"""Makes random inputs for the operations, and checks their results against tolerances."""

import weakref

import torch

from sebp_edge.ops import Chunks, LoraProjection, QuantisedWeight
from sebp_edge.research.rules.selection import AppliedRule

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if torch.cuda.is_available() else [])


def draw(*size, dtype=torch.float32, seed=0):
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def random_case(num_rows, num_in, num_out, active, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(*size):
        return torch.randn(*size, generator=generator, dtype=torch.float64).to(dtype)

    rows = torch.randperm(num_rows, generator=generator)[:active].sort().values
    x, weight, bias = draw(num_rows, num_in), draw(num_out, num_in), draw(num_out)
    dout = torch.zeros(num_rows, num_out, dtype=dtype)
    dout[rows] = draw(active, num_out)
    return x, weight, bias, rows, dout


def random_heads(num_heads, num_kv_heads, head_size, dtype, device="cpu", lengths=(7, 0, 1, 13)):
    """q, k, v as parts of one matrix, and cosines and sines of the rows' angles."""
    num_rows = sum(lengths)
    wide = torch.randn(num_rows, num_heads + 2 * num_kv_heads, head_size, device=device, dtype=dtype)
    angles = torch.rand(num_rows, head_size // 2, device=device).mul(6.28).repeat(1, 2)
    cu_seqlens = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    return wide, (angles.cos().to(dtype), angles.sin().to(dtype)), cu_seqlens


def chunks_of(lengths, device="cpu"):
    """Where packed texts of these lengths begin."""
    return Chunks.of(torch.tensor([0, *lengths], device=device).cumsum(0).int(), sum(lengths))


def results(function, inputs, dout):
    """The output, and the gradients of the inputs."""
    out = function(*inputs)
    return [out, *torch.autograd.grad(out, inputs, dout.to(out.dtype))]


def gradients(function, tensors, dout):
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    out = function(*leaves)
    out.backward(dout)
    return out.detach(), [leaf.grad for leaf in leaves]


def random_group(num_rows, num_in, outs, rank, active, dtype=torch.float64, adapter_dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(*size, dtype=dtype):
        return torch.randn(*size, generator=generator, dtype=torch.float64).to(dtype)

    rows = torch.randperm(num_rows, generator=generator)[:active].sort().values
    projections = [
        LoraProjection(
            draw(m, num_in),
            draw(m) if number % 2 else None,
            draw(rank, num_in, dtype=adapter_dtype),
            draw(m, rank, dtype=adapter_dtype),
            1.5,
        )
        for number, m in enumerate(outs)
    ]
    douts = []
    for m in outs:
        dout = torch.zeros(num_rows, m, dtype=dtype)
        dout[rows] = draw(active, m)
        douts.append(dout)
    return draw(num_rows, num_in), projections, rows, douts


def as_leaves(projections, dtype, adapter_dtype):
    return [
        LoraProjection(
            p.weight.to(DEVICE, dtype),
            None if p.bias is None else p.bias.to(DEVICE, dtype),
            p.lora_A.to(DEVICE, adapter_dtype).requires_grad_(),
            p.lora_B.to(DEVICE, adapter_dtype).requires_grad_(),
            p.scaling,
        )
        for p in projections
    ]


def results_of_parts(x, projections, douts):
    """Returns the outputs of projections and the gradients of x, all lora_A and all lora_B, without our code."""
    x = x.clone().requires_grad_()
    leaves = [p._replace(lora_A=p.lora_A.requires_grad_(), lora_B=p.lora_B.requires_grad_()) for p in projections]
    outs = [torch.nn.functional.linear(x, p.weight, p.bias) + p.scaling * (x @ p.lora_A.T @ p.lora_B.T) for p in leaves]
    adapters = [*(p.lora_A for p in leaves), *(p.lora_B for p in leaves)]
    return [*(out.detach() for out in outs), *torch.autograd.grad(outs, [x, *adapters], douts)]


def quantised(projection, buffers):
    """Returns the projection with its weight in 8 bits, and dequantised; `buffers` collects each dequantisation."""
    scale = projection.weight.abs().max() / 127
    packed = (projection.weight / scale).round().to(torch.int8)

    def dequantise(buffer):
        buffers.append(weakref.ref(buffer))
        buffer.copy_(packed.to(scale.dtype) * scale)

    weight = QuantisedWeight(scale.dtype, dequantise)
    return projection._replace(weight=weight), projection._replace(weight=packed.to(scale.dtype) * scale)


def random_energy(num_rows, seed=0, spread=1.5, zeros=0.3):
    """Returns squared norms that span several decades, some of them zero; fp64 [N]."""
    generator = torch.Generator().manual_seed(seed)
    energy = 10 ** (2 * spread * torch.randn(num_rows, generator=generator, dtype=torch.float64))
    return energy * (torch.rand(num_rows, generator=generator) >= zeros)


def random_gradient(num_rows, num_out, seed=0):
    generator = torch.Generator().manual_seed(seed)
    direction = torch.randn(num_rows, num_out, generator=generator, dtype=torch.float64)
    return torch.nn.functional.normalize(direction) * random_energy(num_rows, seed, spread=0.4).sqrt()[:, None]


def selector(rule):
    layer = torch.nn.Identity()
    return AppliedRule(torch.nn.Sequential(layer), rule).selector([layer])


def chosen(rule, dout):
    """The rows that a rule keeps of these gradients."""
    return selector(rule)((dout,)).on_host().ids.tolist()


def assert_no_worse_than_torch(found, plain, truth):
    """Checks that the error is at most twice that of PyTorch in the same dtype, plus 1e-4 of the truth."""
    assert found.dtype == plain.dtype
    error, allowed = ((value.double() - truth).norm() for value in (found, plain))
    assert error <= 2 * allowed + 1e-4 * truth.norm()


def assert_as_good(found, truth, dtype):
    """Checks that the error is at most that of sums in fp32, rounded once to `dtype`."""
    assert (found.double() - truth).norm() <= max(1e-6, torch.finfo(dtype).eps) * truth.norm()


def twice(compute):
    """Two results of a computation, to compare their bits. The interpreter has no races, so one is both there."""
    first = compute()
    return first, compute() if DEVICE == "cuda" else first
