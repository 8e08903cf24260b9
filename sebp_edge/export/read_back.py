"""Compares what other programs compute with exported files with what these should give.

Letters: T tokens of a row, V vocabulary.
"""

import gc
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from sebp_edge.basics.units import percent
from sebp_edge.engine.models.adaptation import load
from sebp_edge.engine.models.architecture import longest_sequence
from sebp_edge.engine.models.loading import BaseModel, load_base_model
from sebp_edge.engine.sparse.patches.stops import Stops
from sebp_edge.engine.sparse.rows.batches import Collator
from sebp_edge.engine.training.scoring import scoring
from sebp_edge.errors import ExportError, TextsError
from sebp_edge.export.child import TOP, Predicted
from sebp_edge.export.export_result import ExportProgress
from sebp_edge.export.model_weights import Read
from sebp_edge.export.source import Source
from sebp_edge.lessons.examples import encode
from sebp_edge.lessons.general_probe import read_probe
from sebp_edge.recipe import Recipe
from sebp_edge.values.example import Example
from sebp_edge.values.model_reference import ModelReference
from sebp_edge.values.reading import Reading

# Number of tokens of a text that are compared.
NUM_TOKENS = 200
# Bounds for what is the same. llama.cpp rounds what it multiplies with weights as it rounds the weights, so its largest
# difference is several times the mean one, and it takes another token where two are almost as likely.
MAX_DIFFERENCE = 5e-3
MAX_QUANTISED_DIFFERENCE = 0.1
CLEAR = 0.5
MIN_SAME = 0.99
_CONTEXT_LENGTH = 512
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Agreement:
    """How a program's predictions agree with those expected (see `ExportResult`).

    Attributes:
        same_if_clear: `same_likeliest`, if a token counts as the same that is expected to be almost as likely.
    """

    mean_difference: float
    largest_difference: float
    same_likeliest: float
    same_if_clear: float


@dataclass(frozen=True)
class ComparedTexts:
    """What models are compared on; `rows` are 200 tokens of the longest examples."""

    examples: list[Example]
    rows: list[list[int]]
    texts: list[str]
    context_length: int


class BaseComparison:
    """The base model on the CPU in fp32, with the adapter or with other weights in turn: one model in memory.

    Attributes:
        progress: is told of each evaluation; may raise to stop.
        expected: the log-probabilities with the adapter.
        loss_base, loss_adapter: the losses of the base model and with the adapter, in nats per token.
    """

    def __init__(self, source: Source, reading: Reading | None, progress: ExportProgress):
        self._source, self.progress = source, progress
        recipe = Recipe.load("notes").replace(load_in_4bit=False)
        self._base = load_base_model(source.reference, recipe, CPU, progress.check)
        progress.check()
        self.texts = _texts(source, self._base, reading)
        self.loss_base = self._loss(self.model)
        self.expected, self.loss_adapter = (
            self.with_adapter(source.folder) if source.is_lora else self.with_weights(source.weights.read)
        )

    @property
    def model(self) -> nn.Module:
        """The model, with its present weights."""
        return self._base.model

    def with_weights(self, read: Read) -> tuple[list[Tensor], float]:
        """Replaces the weights, a tensor at a time; returns the log-probabilities and the loss."""
        self._fill(read)
        return self._measure(self.model)

    def loss_with_weights(self, read: Read) -> float:
        """Replaces the weights, a tensor at a time; returns the loss."""
        self._fill(read)
        return self._loss(self.model)

    @torch.no_grad()
    def _fill(self, read: Read) -> None:
        tensors = self.model.state_dict()
        for name in self._source.weights.shapes:
            tensors[name].copy_(read(name))
            self.progress.check()

    def with_adapter(self, folder: Path) -> tuple[list[Tensor], float]:
        """Returns the log-probabilities and the loss with an adapter in PEFT's layout on the present weights."""
        adaptation = load(self._base, folder)
        found = self._measure(adaptation.model)
        adaptation.detach()
        return found

    def with_model(self, folder: Path) -> tuple[list[Tensor], float]:
        """Returns the log-probabilities and the loss of a model in a folder, which takes the place of this one."""
        self._base = None
        gc.collect()
        reference = ModelReference(self._source.name, "local", str(folder))
        self._base = load_base_model(reference, Recipe.load("notes"), CPU, self.progress.check)
        return self._measure(self.model)

    def _measure(self, model: nn.Module) -> tuple[list[Tensor], float]:
        return self._log_probabilities(model), self._loss(model)

    def _loss(self, model: nn.Module) -> float:
        collator, told = Collator(self.texts.context_length, self._base.pad_token_id), self.progress
        with scoring(model, self.texts.examples, collator, CPU, told.on_event, check=told.check) as losses:
            return losses().mean

    @torch.no_grad()
    def _log_probabilities(self, model: nn.Module) -> list[Tensor]:
        """Returns the log-probabilities after each token of each row, [T, V]."""
        with Stops(model, self.progress.check):
            return [model(torch.tensor([row])).logits[0].float().log_softmax(dim=-1) for row in self.texts.rows]


def likeliest(log_probabilities: list[Tensor]) -> Predicted:
    """Returns what a model predicts, as other programs return it."""
    top = torch.cat(log_probabilities).topk(TOP)
    rows = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    return Predicted([list(zip(tokens, values, strict=True)) for tokens, values in rows], [])


def memory_needed(source: Source) -> int:
    """Returns the memory that a comparison takes, in bytes: a model in fp32, and its largest tensor twice more."""
    sizes = [math.prod(shape) for shape in source.weights.shapes.values()]
    return 4 * (sum(sizes) + 2 * max(sizes))


def _texts(source: Source, base: BaseModel, reading: Reading | None) -> ComparedTexts:
    """Encodes the user's texts, or else enough of the general text."""
    context = min(_CONTEXT_LENGTH, longest_sequence(base.model) or _CONTEXT_LENGTH)
    documents = reading.documents if reading else read_probe()
    chat = source.record.recipe.get("chat_template", False)
    examples, _ = encode(documents, source.tokenizer, context, chat_template=chat)
    if not examples:
        raise TextsError("These texts have no token to compare models on; give other texts.")
    texts = [document.own_text for document in documents]
    longest_first = sorted(examples, key=lambda example: -len(example.input_ids))
    if not reading:  # general text is only to show what the files compute, so a little of it is enough
        examples = longest_first = longest_first[:2]
    rows, left = [], NUM_TOKENS
    for example in longest_first:
        if left > 0:
            rows.append(list(example.input_ids[:left]))
            left -= len(rows[-1])
    return ComparedTexts(examples, rows, texts, context)


def agreement(expected: list[Tensor], predicted: Predicted, rows: list[list[int]]) -> Agreement:
    """Compares a program's predictions with the expected ones."""
    differences, margins = [], []
    following = (token for row in rows for token in [*row[1:], None])
    for expected_V, found, token in zip(torch.cat(expected), map(dict, predicted.likeliest), following, strict=True):
        first = next(iter(found))
        differences += [abs(expected_V[each].item() - found[each]) for each in {first, token} & found.keys()]
        margins.append(expected_V.max().item() - expected_V[first].item())
    # Tensors, since max() may lose a NaN.
    differences, margins = torch.tensor(differences), torch.tensor(margins)
    same, same_if_clear = ((margins <= bound).double().mean().item() for bound in (0, CLEAR))
    return Agreement(differences.mean().item(), differences.max().item(), same, same_if_clear)


def check_agreement(program: str, found: Agreement, quant: str | None = None) -> None:
    """Refuses files with which a program computes something else; `quant` is None if it computes in fp32."""
    if quant is None:
        is_same = found.largest_difference <= MAX_DIFFERENCE
    elif quant == "f16":
        is_same = found.mean_difference <= MAX_DIFFERENCE and found.same_if_clear >= MIN_SAME
    else:
        is_same = found.mean_difference <= MAX_QUANTISED_DIFFERENCE and found.same_if_clear >= MIN_SAME
    if not is_same:
        raise ExportError(
            f"{program} computes something else with the exported files (log-probabilities differ by "
            f"{found.mean_difference:.2g} on average and by up to {found.largest_difference:.2g}, the likeliest token "
            f"is the same for {percent(found.same_likeliest)}); nothing was exported. Please report this."
        )


def check_tokens(predicted: Predicted, expected: list[list[int]]) -> None:
    """Refuses a file of which llama.cpp reads other tokens."""
    if different := sum(found != right for found, right in zip(predicted.tokens, expected, strict=True)):
        raise ExportError(
            f"llama.cpp reads {different} of {len(expected)} texts as other tokens than the model's own tokenizer; "
            "nothing was exported. Use --format merged, or peft."
        )
