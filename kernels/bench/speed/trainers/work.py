"""The work that peers.py gives to every trainer: the same model shape, weights and texts in each process.

A fixed seed draws the weights, on their device, and the tokens, on the CPU.
"""

import math
import random
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
)

from models import published_sizes, scale_queries
from sebp_edge.engine.sparse.rows.batches import Batch, Collator
from sebp_edge.engine.sparse.rows.row_plan import IGNORE
from sebp_edge.values.example import Example
from speed.trainers import four_bit

RANK = 16
CONTEXT_LENGTH = 4096
PADDING_ID = 3
SHAPES = ("llama-3.2-3b", "gemma-3-1b", "qwen3-0.6b", "smollm2-135m", "lfm2-1.2b", "qwen3.5-0.8b", "gemma-4-e2b")
SHAPES += ("granite-4.0-h-350m",)
TINY = "tiny"
TINY_SIZES = {
    "vocab_size": 320,
    # Multiples of the 64 weights that share a scale in 4 bits.
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True)
class Job:
    """The settings that all arms of one run share.

    Attributes:
        shape: one of SHAPES, or TINY.
        device: "cuda" (in bf16) or "cpu" (in fp32).
        full: whether all weights are trained, instead of LoRA adapters in fp32.
        four_bit: whether the linear layers of the base model are in 4 bits, except the head.
        loss_share: the share of each text, at its end, that has a loss; 1.0 for whole texts.
        batches: the number of texts in each batch.
        folder: holds the reference, and the model if an arm needs its files.
        save_model: whether the reference's process writes the model into the folder.
    """

    shape: str
    device: str
    full: bool
    four_bit: bool
    loss_share: float
    batches: list[int]
    folder: str
    save_model: bool

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device == "cuda" else torch.float32

    @property
    def reference(self) -> Path:
        return Path(self.folder) / "reference.pt"

    @property
    def model_folder(self) -> Path:
        return Path(self.folder) / "model"


def shape_config(shape: str) -> PretrainedConfig:
    """The config of a model as its authors published it; TINY is for trying the benchmark."""
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": PADDING_ID}
    if shape == TINY:
        return LlamaConfig(**TINY_SIZES, **tokens)
    return AutoConfig.for_model(**published_sizes(shape) | tokens)


def lengths(loss_share: float) -> list[int]:
    """Token counts of 64 texts.

    Whole texts have 26 to 122 tokens, 58 on average. Texts with a loss on a part stand for instructions with answers,
    with lengths like Dolly's in Llama 3's tokens. Their log-normal has Dolly's median (128); its mean (192), its 90th
    and its 99th percentile (406, 1039) are near Dolly's (193, 402, 1027).
    """
    draw = random.Random(0)
    if loss_share == 1.0:
        return [max(26, min(196, int(draw.gauss(57, 25)))) for _ in range(64)]
    return [max(34, min(2103, int(draw.lognormvariate(math.log(128), 0.9)))) for _ in range(64)]


def make_texts(count: int, job: Job) -> list[Example]:
    """The first `count` of the 64 texts, with random tokens that are the same in every process."""
    generator = torch.Generator().manual_seed(0)
    highest = min(128000, shape_config(job.shape).vocab_size)
    texts = []
    for number, length in enumerate(lengths(job.loss_share)[:count]):
        ids = torch.randint(10, highest, (length,), generator=generator).tolist()
        # A text's first token is never predicted.
        without = max(1, length - round(length * job.loss_share))
        texts.append(Example(ids, [IGNORE] * without + ids[without:], number))
    return texts


def make_batch(count: int, job: Job) -> Batch:
    """The first `count` texts, padded to the context length that the model can take, on the job's device."""
    context_length = min(CONTEXT_LENGTH, shape_config(job.shape).max_position_embeddings)
    return padded_batch(make_texts(count, job), context_length, PADDING_ID, job.device)


def padded_batch(texts: list[Example], context_length: int, padding_id: int, device: torch.device | str) -> Batch:
    """All texts, padded on the right."""
    batch = Collator(context_length, padding_id)(texts)
    tensors = (each.to(device) for each in (batch.input_ids, batch.attention_mask, batch.labels))
    return Batch(*tensors, batch.plan.to(device))


def make_model(job: Job, attention: str = "sdpa") -> nn.Module:
    """The model to train: the base model itself, or with LoRA adapters in fp32."""
    model = make_base(job, attention)
    if job.four_bit:
        four_bit.quantise_(model)
    return with_adapters(model, job)


def make_base(job: Job, attention: str = "sdpa") -> nn.Module:
    """The base model before it is quantised, in the job's precision, with weights from the fixed seed."""
    with torch.device(job.device):
        model = AutoModelForCausalLM.from_config(
            shape_config(job.shape), dtype=job.dtype, attn_implementation=attention
        )
    fill(list(model.parameters()))
    scale_queries(model)
    return model


def with_adapters(model: nn.Module, job: Job) -> nn.Module:
    if not job.full:
        # The targets of `LoraAdapter.fresh`: linear attention and short convolutions have more than a Llama's seven.
        config = LoraConfig(r=RANK, lora_alpha=RANK, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(model, config)
    return model.train()


@torch.no_grad()
def fill(parameters: list[nn.Parameter]) -> None:
    """Fills matrices at random from a fixed seed, lora_B included so that lora_A has gradients; vectors with ones."""
    generator = torch.Generator(parameters[0].device).manual_seed(0)
    for parameter in parameters:
        if parameter.dim() == 1:
            parameter.fill_(1.0)
        else:
            parameter.normal_(0.0, 0.02, generator=generator)


def save_base(model: nn.Module, job: Job) -> None:
    """Saves the base model and a byte tokenizer, for arms that load from a folder."""
    model.save_pretrained(job.model_folder)
    names = ["<unk>", "<s>", "</s>", "<pad>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({name: number for number, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(job.model_folder)
