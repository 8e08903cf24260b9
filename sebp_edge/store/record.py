"""The record of an adapter: the file sebp_edge.json beside its weights."""

import dataclasses
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import NoneType
from typing import Literal

from sebp_edge.basics.files import NewerFormat, parse_dataclass, read_json
from sebp_edge.basics.version import __version__
from sebp_edge.errors import AdapterError
from sebp_edge.values.probe_figures import ProbeFigures, describe
from sebp_edge.values.word_figures import WordFigures

RECORD = "sebp_edge.json"
# The layout of an adapter's folder and record. A record without `format` is of format 1, which 0.1.0 wrote.
FORMAT = 1
_TRAINED_ON_ALL = ", in the judged state; then it was trained on all documents, which was not judged by itself"


@dataclass(frozen=True, kw_only=True)
class AdapterRecord:
    """Counts, losses and settings of an adapter.

    Attributes:
        base_model: the base model's public name.
        model: the base model's name, which loads it again unless it is a local folder; never a path.
        fingerprint: the fingerprint of the base model's weights.
        recipe: the recipe's values.
        documents, examples, tokens: how many of each were used.
        heldout_loss_before, heldout_loss_after: the test loss in nats per token, of the base model and of the judged
            states, without boilerplate lines; None if the adapter was not judged.
        verdict: what the gate said (see `sebp_edge.engine.training.gate.Verdict`); None if the adapter was not judged.
        trained_on_all: whether it was trained on all documents after the gate; None in records of older versions.
        general_loss_before, general_loss_after: the loss on the bundled general text in nats per token; None if it was
            not measured.
        language, facts: how many bundled items the base model and the adapter know; None if it was not measured,
            and in older records.
        explanation: why the gate found it better or not, in words; None if it was not judged, and in older records.
        compared_with: the version that was active before; None if there was none.
        compared_loss_before, compared_loss_after: the losses of that version's judged states and of this one's, on the
            test documents that neither has been trained on; None if the two were not compared.
        best_before: the best version so far, which it was compared with, too; None if there was none.
        best_loss_before, best_loss_after: the losses of that version's judged states and of this one's, as above.
        is_best: whether it is the best version from then on, which takes that it is surely no worse; None in older
            records.
        refused: how many versions of its name the gate had refused beside an earlier one, this one included; None in
            older records.
        learnt_on_from: the version that it learnt on from; None if it began at the base model, and in older records.
        packages: the versions of Python and of the packages that compute; None in older records.
        threads: how many threads computed on the CPU; None on a GPU, and in older records.
        seed: the random seed of the adaptation.
        chat: whether prompts are rendered with the model's chat template, as most of the documents were; None in
            records of older versions, in which the recipe's chat_template decides.
        quiz: what a quiz showed (see `sebp_edge.engine.training.quiz.QuizFigures`); None without one.
        words: what ghost text would have done in the test documents; None if that was not counted, and in older
            records.
        created: when it was made, in UTC, as an ISO 8601 string.
        sebp_edge: the version of sebp-edge that made it.
        format: the format of the folder and of this record (see FORMAT).
    """

    base_model: str
    model: str
    fingerprint: str
    recipe: dict
    documents: int
    examples: int
    tokens: int
    heldout_loss_before: float | None = None
    heldout_loss_after: float | None = None
    seed: int
    verdict: str | None = None
    trained_on_all: bool | None = None
    general_loss_before: float | None = None
    general_loss_after: float | None = None
    language: ProbeFigures | None = None
    facts: ProbeFigures | None = None
    chat: bool | None = None
    explanation: str | None = None
    compared_with: int | None = None
    compared_loss_before: float | None = None
    compared_loss_after: float | None = None
    best_before: int | None = None
    best_loss_before: float | None = None
    best_loss_after: float | None = None
    is_best: bool | None = None
    refused: int | None = None
    learnt_on_from: int | None = None
    packages: dict[str, str] | None = None
    threads: int | None = None
    quiz: dict[str, int | None] | None = None
    words: WordFigures | None = None
    created: str = dataclasses.field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    sebp_edge: str = dataclasses.field(default_factory=lambda: __version__)
    format: int = FORMAT

    @property
    def kept(self) -> str:
        """How much of what the model could before is left, in words; empty if that is not known."""
        return describe(self.language, self.facts)

    @property
    def uses_chat_template(self) -> bool:
        """Whether prompts are rendered with the model's chat template."""
        return self.recipe.get("chat_template", False) if self.chat is None else self.chat

    @property
    def prompts(self) -> Literal["text", "chat", "question"]:
        """How prompts are rendered: as they are, with the chat template, or as a question in the plain format."""
        if self.uses_chat_template:
            return "chat"
        return "question" if self.recipe.get("questions") else "text"

    @property
    def is_interrupted(self) -> bool:
        """Whether it is the best state of a training that was stopped; unknown, so False, in records of 0.1.0."""
        return self.verdict is None and self.trained_on_all is False

    @classmethod
    def read(cls, folder: Path) -> "AdapterRecord":
        """Reads the record in an adapter's folder.

        Raises:
            AdapterError: there is none, it is damaged, or a newer sebp-edge wrote it.
        """
        try:
            values = {"format": 1} | read_json(folder / RECORD)
            if values.get("verdict") == "kept":  # as sebp-edge called it at first
                values["verdict"] = "better"
            record = parse_dataclass(values, cls)
            if not _is_recipe(record.recipe):
                raise ValueError("recipe")
            return record
        except NewerFormat as newer:
            raise AdapterError(
                f"The adapter in {str(folder)!r} was saved by a newer sebp-edge, in format {newer}; this one reads up "
                f"to format {FORMAT}. Upgrade sebp-edge."
            ) from newer
        except (OSError, ValueError) as error:
            reason = f" ({error.strerror})" if isinstance(error, PermissionError) else ""
            raise AdapterError(
                f"{str(folder)!r} is not an adapter of sebp-edge: {RECORD} cannot be read{reason}."
            ) from error

    def model_card(self) -> str:
        """Returns the text of the folder's README.md, which contains none of the user's texts and no path."""
        losses = ""
        if self.heldout_loss_before is not None and self.heldout_loss_after is not None:
            losses = (
                f"\nTest loss in nats per token: {self.heldout_loss_before:.3f} before, {self.heldout_loss_after:.3f} "
                f"after{_TRAINED_ON_ALL if self.trained_on_all else ''}.\n"
            )
        if self.general_loss_before is not None and self.general_loss_after is not None:
            losses += (
                f"\nLoss on general text in nats per token: {self.general_loss_before:.3f} before, "
                f"{self.general_loss_after:.3f} after.\n"
            )
        if self.kept:
            losses += f"\nWhat the model could before: {self.kept}.\n"
        if self.quiz:
            losses += (
                f"\nAnswers {self.quiz['right_after']} of {self.quiz['questions']} questions about notes "
                f"({self.quiz['right_before']} before).\n"
            )
        kind = "LoRA adapter" if self.recipe["method"] == "lora" else "fully fine-tuned model"
        return f"""---
base_model: {self.base_model}
library_name: {"peft" if self.recipe["method"] == "lora" else "transformers"}
---
# A {kind} for {self.base_model}

Made by sebp-edge {self.sebp_edge} on its owner's machine from {self.documents} documents
({self.tokens} tokens), with the recipe "{self.recipe["name"]}".
{losses}
This folder does not contain the training texts, apart from samples.json if its owner asked for it, but the model may
repeat parts of them: keep it as private as they are.
"""


def _is_recipe(values: dict) -> bool:
    """Whether these may be a recipe's values: plain ones with a name and a method; recipes had a table `sparsity`."""
    plain = [value for key, value in values.items() if key != "sparsity"]
    is_named = all(isinstance(values.get(key), str) for key in ("name", "method"))
    return is_named and all(isinstance(value, str | int | float | bool | NoneType) for value in plain)
