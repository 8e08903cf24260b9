"""The trainers that peers.py compares: how each loads its model, and in which tables it is."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import nn

from speed.trainers import four_bit, variants
from speed.trainers.attention import VARLEN
from speed.trainers.steps import Variant
from speed.trainers.work import RANK, Job, make_base, make_model, shape_config, with_adapters

LORA, FULL, FOUR_BIT, LOSS_SHARE = "LoRA", "all weights", "4 bits", "a share of the loss"


@dataclass(frozen=True)
class Arm:
    """A trainer and how it makes its step.

    Attributes:
        tables: the kinds of runs it is in.
        load: makes the model; what is trained requires gradients.
        packages: what it needs besides torch, transformers and PEFT.
        max_texts: the most texts in a batch; larger batches are left out.
        apart: whether each batch has a process of its own, so that none waits for another's failure.
    """

    variant: Variant
    tables: set[str]
    load: Callable[[Job], nn.Module] = make_model
    packages: tuple[str, ...] = ()
    max_texts: int = 64
    apart: bool = False

    def unsupported_reason(self, job: Job) -> str | None:
        """What this arm needs and this machine lacks, in words; None if nothing."""
        packages = (*self.packages, *(["bitsandbytes"] if job.four_bit else []))
        missing = [name for name in packages if find_spec(name) is None]
        return (
            f"needs {missing[0]}, which is not installed"
            if missing
            else self.variant.unsupported_reason(torch.device(job.device))
        )


def with_varlen(job: Job) -> nn.Module:
    return make_model(job, attention=VARLEN)


def with_rounded_weights(job: Job) -> nn.Module:
    """The model in full precision, with the values of its weights in 4 bits."""
    base = make_base(job)
    four_bit.round_(base)
    return with_adapters(base, job)


def with_liger(job: Job) -> nn.Module:
    from liger_kernel import transformers

    apply = getattr(transformers, f"apply_liger_kernel_to_{shape_config(job.shape).model_type}")
    apply(fused_linear_cross_entropy=True, cross_entropy=False)
    return with_varlen(job)


def with_unsloth(job: Job) -> nn.Module:
    # process.py has imported it, before everything else.
    unsloth = sys.modules["unsloth"]
    model, _ = unsloth.FastLanguageModel.from_pretrained(
        str(job.model_folder), max_seq_length=4096, dtype=job.dtype, load_in_4bit=job.four_bit
    )
    return unsloth.FastLanguageModel.get_peft_model(
        model,
        r=RANK,
        lora_alpha=RANK,
        lora_dropout=0,
        bias="none",
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        use_gradient_checkpointing=False,
    ).train()


UNSLOTH = ("unsloth", "bitsandbytes")
ARMS = {
    "hf padded to 4096": Arm(variants.PADDED, {LORA}, max_texts=4),
    "hf dynamic padding": Arm(variants.DYNAMICALLY_PADDED, {LORA}),
    "hf padded graph": Arm(variants.PADDED_GRAPH, {LORA}),
    "hf packed varlen": Arm(variants.PACKED, {LORA, FULL, FOUR_BIT, LOSS_SHARE}, with_varlen),
    "hf packed varlen adamw8bit": Arm(variants.PACKED_8_BIT, {FULL}, with_varlen, ("bitsandbytes",)),
    "hf compiled": Arm(variants.PACKED_COMPILED, {LORA}, with_varlen, apart=True),
    "hf graph": Arm(variants.PACKED_GRAPH, {LORA, FULL, FOUR_BIT, LOSS_SHARE}, with_varlen),
    "liger packed varlen": Arm(variants.PACKED, {LORA, LOSS_SHARE}, with_liger, ("liger_kernel",)),
    "unsloth dynamic padding": Arm(variants.UNSLOTH_PADDED, {LORA, FOUR_BIT}, with_unsloth, UNSLOTH),
    "unsloth packed": Arm(variants.UNSLOTH_PACKED, {LORA, FOUR_BIT}, with_unsloth, UNSLOTH),
    "drop-in padded to 4096": Arm(variants.DROP_IN, {LORA}, max_texts=4),
    "sebp-edge all rows": Arm(variants.HOISTED_WITH_ALL_ROWS, {LOSS_SHARE}),
    "sebp-edge hoisted": Arm(variants.HOISTED, {LORA, FULL}),
    "sebp-edge step": Arm(variants.OUR_STEP, {LORA, FULL, FOUR_BIT, LOSS_SHARE}),
    "sebp-edge step keeping 14 blocks": Arm(variants.OUR_STEP_KEEPING_14, {FOUR_BIT}),
    "sebp-edge step keeping 28 blocks": Arm(variants.OUR_STEP_KEEPING_28, {FOUR_BIT}),
    "sebp-edge step in full precision": Arm(variants.OUR_STEP, {FOUR_BIT}, with_rounded_weights),
    "sebp-edge step torch adamw": Arm(variants.OUR_STEP_WITH_TORCHS_ADAMW, {FULL}),
}
