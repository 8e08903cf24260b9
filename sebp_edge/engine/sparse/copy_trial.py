"""Compares hoisted and padded gradients on a small copy of a decoder, in fp32, or in fp64 if they differ.

A trial on the model itself has too few tokens to show how distant tokens interact, such as in a window that only the
mask applies, or by rotary angles that depend on the longest text. The copy has short windows and limits.

Shapes: B sequences, T positions, C loss rows.
"""

import functools
import json
import sys
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from sebp_edge.basics.out_of_memory import ran_out_of_memory
from sebp_edge.engine.models.small_copy import LONGEST, VOCABULARY, small_copy, spread
from sebp_edge.engine.sparse.hoist import Hoisted
from sebp_edge.engine.sparse.patches.agreement import FAILURES, gradients_agree
from sebp_edge.engine.sparse.rows.active_tokens import ActiveTokens
from sebp_edge.engine.sparse.rows.row_plan import IGNORE, RowPlan
from sebp_edge.engine.sparse.rows.share_beginnings import share_beginnings
from sebp_edge.errors import SparsityError
from sebp_edge.machine.devices import limited_threads

# Beyond the copy's windows and limits, between the two, and below both.
LENGTHS = (LONGEST - 4, 24, 7)
# Tokens that all of them begin with, if prefixes are shared.
NUM_SHARED = 5


def copy_mismatch(decoder: nn.Module, *, shares_prefixes: bool = False) -> str | None:
    """Returns None if a small copy has the same gradients hoisted and padded, else a sentence with the reason.

    It is hoisted as the decoder would be. A copy that has passed is not tried again in this process.
    """
    try:
        _try_copy(Code.of(decoder), shares_prefixes)
    except SparsityError as error:
        return str(error)
    return None


def padded_losses(model: nn.Module, input_ids_BT: Tensor, plan: RowPlan) -> Tensor:
    """The loss of every loss row of a right-padded batch by the model's own code, in nats: fp32 [C]."""
    # Needs no mask: no row attends to padding on its right. In some classes, rows whose keys are all masked give NaN.
    logits_BTV = model(input_ids=input_ids_BT, use_cache=False).logits
    logits_CV = logits_BTV.flatten(0, 1)[plan.loss_rows].float()
    return nn.functional.cross_entropy(logits_CV, plan.targets, reduction="none")


@dataclass(frozen=True)
class Code:
    """What a copy depends on: its class, all classes and functions beside it and its bases, and the config's values.

    These are without the name of the folder or the repository that the model was loaded from.
    """

    kind: type[nn.Module]
    parts: tuple
    values: str
    config: Any = field(compare=False)

    @classmethod
    def of(cls, decoder: nn.Module) -> "Code":
        kind, config = type(decoder), decoder.config
        modules = dict.fromkeys(sys.modules[base.__module__] for base in kind.__mro__)
        beside = [part for module in modules for part in vars(module).values() if isinstance(part, type | FunctionType)]
        # Libraries that replace code do so in these modules, or replace a class's forward.
        parts = (*beside, *(vars(part).get("forward") for part in beside))
        values = json.loads(config.to_json_string(use_diff=False)) | {"_name_or_path": ""}
        return cls(kind, parts, json.dumps(values), config)


@functools.lru_cache(maxsize=64)
def _try_copy(code: Code, shares_prefixes: bool) -> None:
    """Raises a SparsityError, which is not kept, with the reason for a mismatch."""
    if (reason := _find_mismatch(code.kind, code.config, shares_prefixes)) is not None:
        raise SparsityError(reason)


# Its tensors are so small that several threads take longer, many times if they do not find as many free cores.
@limited_threads(1)
def _find_mismatch(kind: type[nn.Module], config: Any, shares_prefixes: bool) -> str | None:
    def agree(model: nn.Module) -> bool:
        expected = _gradients(model, lambda: padded_losses(model, input_ids_BT, plan))
        with Hoisted(model) as hoisted:
            found = _gradients(model, lambda: hoisted.row_losses(tokens))
        return gradients_agree(expected, found)

    reason = None
    try:
        model = spread(small_copy(config, kind).model)
        input_ids_BT, plan = _batch(NUM_SHARED if shares_prefixes else 0)
        tokens = ActiveTokens.gather(input_ids_BT, plan)
        tokens = share_beginnings(tokens) if shares_prefixes else tokens
        if not agree(model):
            reason = "gradients of a small copy differ between active rows and the padded batch."
            # Rounding to fp32 explains that in a few models; a fault would show in fp64, too.
            if agree(model.double()):
                return None
    except SparsityError as error:
        return reason or str(error)
    except FAILURES as error:
        if ran_out_of_memory(error):
            raise
        return reason or f"a small copy of the model failed on a trial batch ({type(error).__name__})."
    return reason


def _batch(num_shared: int) -> tuple[Tensor, RowPlan]:
    """Token ids [B, T], padded on the right with token 0, and their plan; the first are the same, without loss."""
    draw = torch.Generator().manual_seed(0)
    input_ids_BT = torch.randint(1, VOCABULARY, (len(LENGTHS), max(LENGTHS)), generator=draw)
    input_ids_BT[:, :num_shared] = input_ids_BT[0, :num_shared]
    is_padding_BT = torch.arange(max(LENGTHS)) >= torch.tensor(LENGTHS)[:, None]
    labels_BT = input_ids_BT.masked_fill(is_padding_BT, IGNORE)
    labels_BT[:, : num_shared + 1] = IGNORE
    return input_ids_BT.masked_fill(is_padding_BT, 0), RowPlan.from_labels(labels_BT)


@torch.enable_grad()
def _gradients(model: nn.Module, losses) -> list[Tensor]:
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(losses().sum(), parameters, allow_unused=True)
    return [
        torch.zeros_like(parameter) if gradient is None else gradient
        for parameter, gradient in zip(parameters, gradients, strict=True)
    ]
