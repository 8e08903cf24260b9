"""The variants of a training step: how each lays out a batch, prepares the model and computes the loss.

Shapes: B texts, T positions, N tokens of all texts, C loss rows.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sebp_edge.engine.models.lora import without_adapter
from sebp_edge.engine.sparse.hoist import Hoisted
from sebp_edge.engine.sparse.rows.active_tokens import ActiveTokens
from sebp_edge.engine.sparse.rows.batches import Batch
from sebp_edge.engine.sparse.rows.row_plan import IGNORE, RowPlan
from sebp_edge.engine.sparse.sparsify import Sparsified
from speed.trainers.steps import Compiled, Graphed, Ours, OursWithTorchsAdamW, Packed, Variant, adamw_8bit

# Captured and compiled steps have token counts that are multiples of this.
GRID_STEP = 32


def packed(batch: Batch) -> dict:
    """Packs all texts into one row [1, N]; positions restart in each, and none predicts the next one's start."""
    real_BT = batch.attention_mask.bool()
    labels_BT = batch.labels.clone()
    labels_BT[:, 0] = IGNORE
    lengths_B = real_BT.sum(dim=1)
    texts_BT = torch.arange(len(lengths_B), dtype=torch.int32, device=lengths_B.device)[:, None].expand_as(real_BT)
    cu_seqlens, longest = F.pad(lengths_B.cumsum(0), (1, 0)).int(), int(lengths_B.max())
    return {
        "input_ids": batch.input_ids[real_BT][None],
        "labels": labels_BT[real_BT][None],
        "position_ids": (real_BT.cumsum(dim=1) - 1)[real_BT][None],
        # For states; transformers raises an error if its code cannot restart them.
        "seq_idx": texts_BT[real_BT][None],
        "cu_seq_lens_q": cu_seqlens,
        "cu_seq_lens_k": cu_seqlens,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def packed_in_bucket(batch: Batch) -> dict:
    """Packs all texts into one row of a fixed size; the filler is a further text without labels."""
    row = packed(batch)
    filler = -row["input_ids"].shape[1] % GRID_STEP
    longest = max(row["max_length_q"], filler)
    cu_seqlens = F.pad(row["cu_seq_lens_q"], (0, 1), value=row["input_ids"].shape[1] + filler)
    return {
        "input_ids": F.pad(row["input_ids"], (0, filler)),
        "labels": F.pad(row["labels"], (0, filler), value=IGNORE),
        "position_ids": torch.cat([row["position_ids"], torch.arange(filler, device=cu_seqlens.device)[None]], dim=1),
        "seq_idx": F.pad(row["seq_idx"], (0, filler), value=len(batch.input_ids)),
        "cu_seq_lens_q": cu_seqlens,
        "cu_seq_lens_k": cu_seqlens,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def packed_with_lengths(batch: Batch) -> dict:
    """Packs all texts into one row, with their lengths in the form that Unsloth takes."""
    row = packed(batch)
    row = {name: row[name] for name in ("input_ids", "labels", "position_ids")}
    return row | {"packed_seq_lengths": batch.attention_mask.sum(dim=1).int().cpu()}


def padded(batch: Batch) -> dict:
    """Keeps the padding to the context length."""
    return {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask, "labels": batch.labels}


def padded_to_longest(batch: Batch) -> dict:
    longest = int(batch.attention_mask.sum(dim=1).max())
    return {name: each[:, :longest] for name, each in padded(batch).items()}


def padded_without_mask(batch: Batch) -> dict:
    """Pads to the longest text: what follows a text cannot reach it, and a mask would be read on the host."""
    row = padded_to_longest(batch)
    return {name: row[name] for name in ("input_ids", "labels")}


def active(batch: Batch) -> ActiveTokens:
    return ActiveTokens.gather(batch.input_ids, batch.plan)


def active_on_host(batch: Batch) -> ActiveTokens:
    """A batch's active tokens on the host, where captured steps take them from."""
    return ActiveTokens.gather(batch.input_ids.cpu(), batch.plan.to("cpu"))


def all_rows(batch: Batch) -> tuple[ActiveTokens, Tensor]:
    """The active tokens as if every token had a loss, and which of those losses count: bool [C]."""
    labels = batch.input_ids.masked_fill(batch.attention_mask == 0, IGNORE)
    plan = RowPlan.from_labels(labels).to(batch.input_ids.device)
    return ActiveTokens.gather(batch.input_ids, plan), torch.isin(plan.loss_rows, batch.plan.loss_rows)


@contextmanager
def sparsified(model: nn.Module) -> Iterator[nn.Module]:
    with Sparsified(model):
        yield model


@contextmanager
def layers_compiled(model: nn.Module) -> Iterator[nn.Module]:
    """Compiles each decoder layer for fixed sizes, into CUDA graphs.

    On an H200 compiling a whole 3B model took 78 s instead of 18, and made a step on 80 tokens 3 % faster.
    """
    layers = without_adapter(model).model.layers
    for layer in layers:
        layer.compile(mode="reduce-overhead", dynamic=False)
    try:
        yield model
    finally:
        for layer in layers:
            layer._compiled_call_impl = None
        torch._dynamo.reset()


def _called(model: nn.Module, inputs: dict) -> Tensor:
    """Calls the model as transformers' Trainer does with bf16=True: adapters are in fp32, and compute in bf16."""
    is_mixed = without_adapter(model) is not model and inputs["input_ids"].is_cuda
    with torch.autocast("cuda", torch.bfloat16, enabled=is_mixed):
        return model(**inputs, use_cache=False).loss


def _called_plainly(model: nn.Module, inputs: dict) -> Tensor:
    """Calls the model without autocast, under which the drop-in leaves LoRA to PEFT."""
    return model(**inputs, use_cache=False).loss


def _called_compiled(model: nn.Module, inputs: dict) -> Tensor:
    # Tells the compiled graphs that the memory of the last step is free.
    torch.compiler.cudagraph_mark_step_begin()
    return _called(model, inputs)


def _unsloths_loss(model: nn.Module, inputs: dict) -> Tensor:
    """Calls the model without autocast: Unsloth's kernels cast adapters themselves."""
    return model(**inputs).loss


def _hoisted_loss(handle: Hoisted, tokens: ActiveTokens) -> Tensor:
    return handle.row_losses(tokens).mean()


def _loss_of_all_rows(handle: Hoisted, everywhere: tuple[ActiveTokens, Tensor]) -> Tensor:
    """The loss with all rows computed in the head and the last layer: padding-free, but not completion-only."""
    tokens, asked_C = everywhere
    return handle.row_losses(tokens)[asked_C].mean()


PADDED = Variant("dense padded", nullcontext, _called, padded)
DROP_IN = Variant("drop-in", sparsified, _called_plainly, padded, is_ours=True)
DYNAMICALLY_PADDED = Variant("dynamic padding", nullcontext, _called, padded_to_longest)
# The attention function receives the boundaries of the texts as keywords.
PACKED = Packed("packed", nullcontext, _called, packed)
PACKED_8_BIT = replace(PACKED, make_optimizer=adamw_8bit)
PACKED_GRAPH = Graphed("graph", nullcontext, _called, packed_in_bucket)
PADDED_GRAPH = Graphed("padded graph", nullcontext, _called, padded_without_mask)
PACKED_COMPILED = Compiled("compiled", layers_compiled, _called_compiled, packed_in_bucket)
UNSLOTH_PADDED = Variant("unsloth", nullcontext, _unsloths_loss, padded_to_longest)
UNSLOTH_PACKED = Variant("unsloth packed", nullcontext, _unsloths_loss, packed_with_lengths)
HOISTED = Variant("hoisted", Hoisted, _hoisted_loss, active, is_ours=True)
HOISTED_WITH_ALL_ROWS = Variant("all rows", Hoisted, _loss_of_all_rows, all_rows, is_ours=True)
OUR_STEP = Ours("graph", Hoisted, _hoisted_loss, active_on_host, is_ours=True)
# A 3B model has 28 blocks.
OUR_STEP_KEEPING_14, OUR_STEP_KEEPING_28 = (
    replace(OUR_STEP, attach=partial(Hoisted, dequantised_blocks=blocks)) for blocks in (14, 28)
)
OUR_STEP_WITH_TORCHS_ADAMW = OursWithTorchsAdamW(**vars(OUR_STEP))
