"""AdamW (Loshchilov and Hutter 2019) of one tensor in one pass over it, so that a backward pass can run it.

    m = β1 m + (1 - β1) f g          v = β2 v + (1 - β2) (f g)²          f: a factor that clips the gradient
    w = (1 - η λ) w - η (m / (1 - β1^t)) / (sqrt(v / (1 - β2^t)) + ε)

All of it runs in fp32. A bf16 weight is rounded stochastically: 16 random bits are added below the bits that bf16
keeps, and the rest is cut off. The expectation is the exact value, so updates far smaller than the gap between
neighbours count.

Moments of bf16 weights, and others on request, take 8 bits each, in blocks of 256 elements (Dettmers et al. 2022). A
block shares a power of two, that of its largest magnitude; m has a sign, 4 bits of exponent below it and 3 of mantissa,
v 5 and 3. They are rounded stochastically too: v moves by a thousandth a step, which rounding 3 bits of mantissa to the
nearest would lose. The shared factor is a power of two, so a value that does not change is not rounded again. A
non-zero v stays above zero; else m would be divided by ε.

Everything that changes between steps is read on the device, so an update can be captured in a CUDA graph. Random bits
depend on the seed, the step and the element's index. Shapes: any; P elements in the order of memory, Q blocks.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw as torch_adamw

from . import backend
from .reference import BLOCK


class Moments(NamedTuple):
    """Running means of one weight's gradient and of its square.

    Attributes:
        first, second: fp32 like the weight; or codes, uint8 [P].
        exponents: with codes, each block's exponent of fp32, for both moments: uint8 [2, Q]; else None.
    """

    first: Tensor
    second: Tensor
    exponents: Tensor | None

    @classmethod
    def of(cls, weight: Tensor, *, in_8_bits: bool | None = None) -> "Moments":
        """Zeros, in 8 bits or in fp32; None means 8 bits for bf16 weights only."""
        if not (weight.dtype == torch.bfloat16 if in_8_bits is None else in_8_bits):
            return cls(*(torch.zeros_like(weight, dtype=torch.float32) for _ in range(2)), None)
        first, second = (torch.zeros(weight.numel(), dtype=torch.uint8, device=weight.device) for _ in range(2))
        return cls(first, second, torch.zeros(2, -(-weight.numel() // BLOCK), dtype=torch.uint8, device=weight.device))

    def zero_(self) -> None:
        """Sets all moments to zero."""
        for values in self:
            if values is not None:
                values.zero_()


@dataclass(frozen=True)
class AdamW:
    """The state that all tensors of one optimizer share; CUDA graphs read its tensors, which change in place.

    Attributes:
        learning_rate: η, fp32 scalar.
        step: t, int64 scalar; 0 before the first step.
        corrections: 1 - β1^t and 1 - β2^t, fp32 [2].
        log_betas: log β1 and log β2, fp64 [2].
    """

    learning_rate: Tensor
    step: Tensor
    corrections: Tensor
    log_betas: Tensor
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0

    @classmethod
    def on(cls, device: torch.device, **settings) -> "AdamW":
        """An optimizer before its first step."""
        step = torch.zeros((), dtype=torch.int64, device=device)
        log_betas = torch.tensor(settings.get("betas", cls.betas), dtype=torch.float64).log().to(device)
        return cls(torch.zeros((), device=device), step, torch.ones(2, device=device), log_betas, **settings)

    def begin_step(self, learning_rate: float) -> None:
        """Counts a step, before its updates; does not wait for the device."""
        self.learning_rate.fill_(learning_rate)
        self.step.add_(1)
        # In fp64: the difference to 1 is small.
        self.corrections.copy_(torch.expm1(self.step * self.log_betas).neg_())

    def reset(self) -> None:
        """Goes back to before the first step."""
        self.step.zero_()


def adamw_(
    weight: Tensor, gradient: Tensor, moments: Moments, adamw: AdamW, *, seed: int, factor: Tensor | None = None
) -> None:
    """One AdamW update, in place; autograd notices the change if the weight is saved for a backward pass.

    Args:
        weight: bf16 or fp32, contiguous.
        gradient: like the weight; any strides and floating dtype. NaN and infinity propagate.
        moments: the weight's, from `Moments.of`.
        adamw: learning rate and step; `begin_step` has been called.
        seed: seeds the random bits, from 0 to 2^31 - 1; each tensor of a model needs its own.
        factor: fp32 scalar on the device that multiplies the gradient; None for 1.

    Raises:
        ValueError: the weight is not contiguous or in another dtype, the gradient has another
            shape, or the seed is out of range.
    """
    if weight.dtype not in (torch.bfloat16, torch.float32) or not weight.is_contiguous():
        raise ValueError(
            f"An AdamW update in place needs contiguous weights in bf16 or fp32, but got {weight.dtype} with strides "
            f"{weight.stride()}."
        )
    if gradient.shape != weight.shape:
        raise ValueError(f"The gradient's shape is {tuple(gradient.shape)}, the weight's {tuple(weight.shape)}.")
    if not 0 <= seed < 2**31:
        raise ValueError(f"The seed must be from 0 to 2^31 - 1, but is {seed}.")
    if weight.numel():
        with torch.no_grad():
            if updates_by_torch(weight, moments):
                _update_by_torch_(weight, gradient.contiguous(), moments, adamw, factor)
            else:
                implementation = backend.implementation(weight, "adamw")
                implementation.adamw_(weight, gradient.contiguous(), moments, adamw, seed, factor)
        torch.autograd.graph.increment_version(weight)


def updates_by_torch(weight: Tensor, moments: Moments) -> bool:
    """Whether torch's own kernel computes the update: on a CPU, if nothing is stored in fewer bits than fp32."""
    return weight.device.type == "cpu" and weight.dtype == torch.float32 and moments.exponents is None


def _update_by_torch_(weight: Tensor, gradient: Tensor, moments: Moments, adamw: AdamW, factor: Tensor | None) -> None:
    """The update of an fp32 weight by torch's own kernel, which takes one pass over a CPU's memory."""
    torch_adamw(
        [weight],
        [gradient.float() if factor is None else gradient.float() * factor],
        [moments.first],
        [moments.second],
        [],
        # Torch counts it up. A warm-up may come before the first step.
        [adamw.step.clamp(min=1).float() - 1],
        fused=True,
        amsgrad=False,
        beta1=adamw.betas[0],
        beta2=adamw.betas[1],
        lr=adamw.learning_rate,
        weight_decay=adamw.weight_decay,
        eps=adamw.eps,
        maximize=False,
    )
