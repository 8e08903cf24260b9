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
from sebp_edge.values.training_facts import TrainingFigures

RECORD = "sebp_edge.json"
# The layout of an adapter's folder and record. A record without `format` is of format 1, which 0.1.0 wrote.
FORMAT = 1
_TRAINED_ON_ALL = ", in the judged state; then it was trained on all documents, which was not judged by itself"


@dataclass(frozen=True, kw_only=True)
class _Identity:
    """What comes first in the file."""

    base_model: str
    model: str
    fingerprint: str
    recipe: dict


@dataclass(frozen=True, kw_only=True)
class AdapterRecord(TrainingFigures, _Identity):
    """What an adapter is, with the figures of its training: see `TrainingFigures`.

    Attributes:
        base_model: the base model's public name.
        model: the base model's name, which loads it again unless it is a local folder; never a path.
        fingerprint: the fingerprint of the base model's weights.
        recipe: the recipe's values.
        quiz: what a quiz showed (see `QuizFigures`); None without one.
        created: when it was made, in UTC, as an ISO 8601 string.
        sebp_edge: the version of sebp-edge that made it.
        format: the format of the folder and of this record (see FORMAT).
    """

    quiz: dict[str, int | None] | None = None
    created: str = dataclasses.field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    sebp_edge: str = dataclasses.field(default_factory=lambda: __version__)
    format: int = FORMAT

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
    plain = [value for key, value in values.items() if key not in ("sparsity", "learning_rate")]
    is_named = all(isinstance(values.get(key), str) for key in ("name", "method"))
    rates = values.get("learning_rate")
    plain += rates if isinstance(rates, list | tuple) else [rates]
    return is_named and all(isinstance(value, str | int | float | bool | NoneType) for value in plain)
