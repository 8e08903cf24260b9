"""Models, padded batches and the gradient check for benchmarks of whole models.

Weights are random, in bf16, and all of them are trained. Texts are padded on the right; an encoder gets an attention
mask, and a decoder gets none, since right padding needs none.
"""

import copy
import json
import random
import tomllib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    PretrainedConfig,
)

from sebp_edge.models.architecture import ENCODERS
from sebp_edge.models.catalog import CATALOG, bundled_config, resolve
from sebp_edge.research.bench.correctness import Gradients, errors, in_fp32, loss_and_gradients, norms, total_norm
from sebp_edge.research.bench.timer import running
from sebp_edge.research.bench.variants import DENSE, Variant
from sebp_edge.sparse.rows.row_plan import IGNORE
from sebp_edge.texts.batches import Batch

LENGTHS = Path(__file__).with_name("lengths.json")
SHAPES = tomllib.loads(Path(__file__).with_name("shapes.toml").read_text(encoding="utf-8"))
TINY = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
# Tolerance relative to a parameter's own gradient: the error of a bias with two elements varies by more than 2x by
# chance.
PARAMETER_TOLERANCE = 0.02


class WrongGradients(Exception):
    """The gradients of a variant differ from the dense model's."""


@dataclass(frozen=True)
class Case:
    """One model on one batch.

    Attributes:
        texts: the data set in lengths.json whose text lengths are used.
        target: the hoped-for speed-up of the hoisted backward pass over the dense one, in GPU time.
    """

    model: str
    config: PretrainedConfig
    texts: str
    batch_size: int
    context_length: int
    target: float


def published_sizes(name: str) -> dict:
    """The values of the config of a model in the catalog or in shapes.toml."""
    if name in CATALOG:
        return json.loads(bundled_config(resolve(name)).read_text(encoding="utf-8"))
    return {key: value for key, value in SHAPES[name].items() if key != "exactness"}


def known_config(name: str) -> PretrainedConfig:
    """The config of a model in the catalog or in shapes.toml."""
    return AutoConfig.for_model(**published_sizes(name))


def make_model(config: PretrainedConfig, device: torch.device) -> nn.Module:
    """A model with random bf16 weights and no zero row in the embedding.

    transformers leaves the padding token's embedding zero. In Gemma's configs that is token 0, with which the bundled
    tokenizer begins every text. A row that stays zero through all RMSNorms has its gradient multiplied by 1 / sqrt(eps)
    in each of them, which overflows in any dtype.
    """
    auto = AutoModelForSequenceClassification if config.model_type in ENCODERS else AutoModelForCausalLM
    with device:
        model = auto.from_config(copy.deepcopy(config), dtype=torch.bfloat16)
    embedding = model.get_input_embeddings()
    if embedding.padding_idx is not None:
        nn.init.normal_(embedding.weight.data[embedding.padding_idx], std=config.initializer_range)
    return model


def make_batch(case: Case, device: torch.device) -> tuple[Batch, int]:
    """A right-padded batch of random tokens with the lengths of `text_lengths`, and its number of real tokens."""
    lengths_B = text_lengths(case.texts, case.batch_size)
    mask_BT = torch.arange(case.context_length) < lengths_B[:, None]
    input_ids_BT = torch.randint(10, case.config.vocab_size, mask_BT.shape) * mask_BT
    if isinstance(case.config, LlamaConfig):
        mask, labels = None, input_ids_BT.masked_fill(~mask_BT, IGNORE)
    else:
        mask, labels = mask_BT.long().to(device), torch.randint(0, case.config.num_labels, (case.batch_size,))
    return Batch(input_ids_BT.to(device), mask, labels.to(device), plan=None), int(lengths_B.sum())


def text_lengths(texts: str, batch_size: int) -> Tensor:
    """Lengths drawn from a data set's distribution; for a single text, its mean length."""
    counts = json.loads(LENGTHS.read_text())[texts]["counts"]
    if batch_size == 1:
        return torch.tensor([round(sum(length * count for length, count in enumerate(counts)) / sum(counts))])
    return torch.tensor(random.Random(0).choices(range(len(counts)), weights=counts, k=batch_size))


def without_padding(batch: Batch) -> Batch:
    """Pads the same texts to the longest of them only; id 0 occurs only as padding."""
    longest = int(batch.input_ids.ne(0).sum(dim=1).max())
    mask = None if batch.attention_mask is None else batch.attention_mask[:, :longest]
    labels = batch.labels if batch.labels.dim() == 1 else batch.labels[:, :longest]
    return Batch(batch.input_ids[:, :longest], mask, labels, plan=None)


def gradients(model: nn.Module, variant: Variant, batch: Batch) -> Gradients:
    """Every element of every gradient of a variant."""
    with running(model, batch, variant) as step:
        return loss_and_gradients(step, model, copy_gradient=Tensor.clone)[1]


def gradient_errors(model: nn.Module, batch: Batch, variants: tuple[Variant, ...]) -> dict[str, float]:
    """The relative error of each variant's gradients against those in fp32, without padding beyond the longest text.

    Dropout is off. Errors are relative to the norm of the fp32 gradients, by the names of the variants; `variants` must
    contain DENSE.

    Raises:
        WrongGradients: the error of a parameter's gradient exceeds the sum of twice the dense variant's error, 2 % of
            the gradient's own norm, and 1e-4 of the norm of all gradients.
    """
    model.eval()
    with in_fp32(model):
        exact = gradients(model, DENSE, without_padding(batch))
    exact_norms = norms(exact)
    norm = total_norm(exact_norms)
    found = {variant.name: errors(gradients(model, variant, batch), exact) for variant in variants}
    for variant, by_parameter in found.items():
        for name, error in by_parameter.items():
            if not error <= 2 * found[DENSE.name][name] + PARAMETER_TOLERANCE * exact_norms[name] / norm + 1e-4:
                raise WrongGradients(
                    f"{variant}: the gradient of {name} is off by more than twice as much as the dense one in bf16."
                )
    return {variant: total_norm(by_parameter) for variant, by_parameter in found.items()}
