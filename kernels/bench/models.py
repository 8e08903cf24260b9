"""What benchmarks of whole models share: a model, a padded batch, and the gate that gradients pass before being timed.

Weights are random, in bf16, and all of them are trained. A decoder's texts are padded on the right, where no mask is
needed and none is given; an encoder gets one.
"""

import copy
import json
import random
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

from sebp_edge.insight.bench.gate import Gradients, combined, errors, in_fp32, loss_and_gradients, norms
from sebp_edge.insight.bench.timer import running
from sebp_edge.insight.bench.ways import DENSE, Way
from sebp_edge.models.architecture import ENCODERS
from sebp_edge.models.catalog import bundled_config, resolve
from sebp_edge.rows.row_plan import IGNORE
from sebp_edge.texts.batches import Batch

LENGTHS = Path(__file__).with_name("lengths.json")
TINY = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
# Two numbers of a head's bias, say, are off by chance by more than twice as much as another way's.
OF_OWN_NORM = 0.02


class WrongGradients(Exception):
    """A way does not compute what the dense model computes."""


@dataclass(frozen=True)
class Case:
    """One model on one batch.

    Attributes:
        texts: whose lengths these are, in lengths.json.
        target: the least ratio of the dense backward pass's GPU time to the hoisted ones' that is hoped for.
    """

    model: str
    config: PretrainedConfig
    texts: str
    batch_size: int
    context_length: int
    target: float


def known_config(name: str) -> PretrainedConfig:
    """The sizes of a model that is known by name."""
    return AutoConfig.from_pretrained(bundled_config(resolve(name)))


def make_model(config: PretrainedConfig, device: torch.device) -> nn.Module:
    """Random bf16 weights, no row of the embedding zero.

    transformers leaves the padding token's row zero. In Gemma's configs that is token 0, which begins every text of the
    bundled tokenizer: a first row that stays zero through all RMSNorms multiplies its gradient by 1 / sqrt(eps) in each
    of them, until it overflows in any dtype.
    """
    auto = AutoModelForSequenceClassification if config.model_type in ENCODERS else AutoModelForCausalLM
    with device:
        model = auto.from_config(copy.deepcopy(config), dtype=torch.bfloat16)
    embedding = model.get_input_embeddings()
    if embedding.padding_idx is not None:
        nn.init.normal_(embedding.weight.data[embedding.padding_idx], std=config.initializer_range)
    return model


def make_batch(case: Case, device: torch.device) -> tuple[Batch, int]:
    """Random tokens in texts of `text_lengths`, padded on the right; and how many tokens they are."""
    lengths_B = text_lengths(case.texts, case.batch_size)
    mask_BT = torch.arange(case.context_length) < lengths_B[:, None]
    input_ids_BT = torch.randint(10, case.config.vocab_size, mask_BT.shape) * mask_BT
    if isinstance(case.config, LlamaConfig):
        mask, labels = None, input_ids_BT.masked_fill(~mask_BT, IGNORE)
    else:
        mask, labels = mask_BT.long().to(device), torch.randint(0, case.config.num_labels, (case.batch_size,))
    return Batch(input_ids_BT.to(device), mask, labels.to(device), plan=None), int(lengths_B.sum())


def text_lengths(texts: str, batch_size: int) -> Tensor:
    """Lengths drawn from those of a data set; of a single text, their mean."""
    counts = json.loads(LENGTHS.read_text())[texts]["counts"]
    if batch_size == 1:
        return torch.tensor([round(sum(length * count for length, count in enumerate(counts)) / sum(counts))])
    return torch.tensor(random.Random(0).choices(range(len(counts)), weights=counts, k=batch_size))


def without_padding(batch: Batch) -> Batch:
    """The same texts, padded to the longest of them only; id 0 is padding, and there alone."""
    longest = int(batch.input_ids.ne(0).sum(dim=1).max())
    mask = None if batch.attention_mask is None else batch.attention_mask[:, :longest]
    labels = batch.labels if batch.labels.dim() == 1 else batch.labels[:, :longest]
    return Batch(batch.input_ids[:, :longest], mask, labels, plan=None)


def gradients(model: nn.Module, way: Way, batch: Batch) -> Gradients:
    """All elements of all gradients."""
    with running(model, batch, way) as step:
        return loss_and_gradients(step, model, take=Tensor.clone)[1]


def gradient_errors(model: nn.Module, batch: Batch, ways: tuple[Way, ...]) -> dict[str, float]:
    """The error of each way's gradients against those in fp32 with no padding beyond the longest text.

    Without dropout, and over the norm of these gradients; by the ways' names, of which the dense one is the first.

    Raises:
        WrongGradients: a parameter's gradient errs by more than twice the dense way's, 2 % of its own norm and 1e-4 of
            the norm of all.
    """
    model.eval()
    with in_fp32(model):
        exact = gradients(model, DENSE, without_padding(batch))
    own = norms(exact)
    norm = combined(own)
    found = {way.name: errors(gradients(model, way, batch), exact) for way in ways}
    for way, by_parameter in found.items():
        for name, error in by_parameter.items():
            if not error <= 2 * found[DENSE.name][name] + OF_OWN_NORM * own[name] / norm + 1e-4:
                raise WrongGradients(f"{way}: the gradient of {name} is off by more than twice the dense one in bf16.")
    return {way: combined(by_parameter) for way, by_parameter in found.items()}
