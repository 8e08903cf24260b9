"""Distils the base model with the note in its prompt into answers without it: an arm of know_quality.py.

The base model reads the note before the question and gives its 20 likeliest tokens at each token of the answer. Where
one of them is not the likeliest, the base model would answer something else, and the answer itself is trained on.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

from sebp_edge.preparation import Preparation
from sebp_edge.rows.row_plan import IGNORE
from sebp_edge.texts.batches import Collator
from sebp_edge.texts.examples import Example
from sebp_edge.texts.readers import read_texts
from sebp_edge.training.teacher import taught_by


@contextmanager
def distilled(folder: Path) -> Iterator[None]:
    """Context in which the answers to questions about the notes of a folder have a teacher, if it agrees with them."""
    texts = [document.content for document in read_texts(folder).documents]
    teach = Preparation.teach

    def teach_answers(self, dataset, base, options):
        dataset = teach(self, dataset, base, options)
        notes = [
            tuple(base.tokenizer(f"{text}\n\n", add_special_tokens=False, verbose=False)["input_ids"]) for text in texts
        ]
        trained = dataset.asked.trained
        pairs = [(below_note(example, notes[example.document], trained), example) for example in trained]
        collator = Collator(dataset.context_length, base.pad_token_id)
        fitting = [(teacher, example) for teacher, example in pairs if len(teacher.input_ids) <= dataset.context_length]
        taught = taught_by(
            base.model, fitting, collator, base.device, self.on_event, self.signal.check, options=options
        )
        with_teacher = {id(student): example for (_, student), example in zip(fitting, taught, strict=True)}
        agreed = [with_teacher.get(id(example), example) for example in trained]
        agreed = [example if agrees(example) else replace(example, teacher=None) for example in agreed]
        return replace(dataset, asked=replace(dataset.asked, trained=agreed))

    with patch.object(Preparation, "teach", teach_answers):
        yield


def below_note(example: Example, note: tuple[int, ...], examples: list[Example]) -> Example:
    """Returns an example with the note before the user's first words, which follow what all examples begin with."""
    columns = zip(*(each.input_ids for each in examples), strict=False)
    begin = next((at for at, column in enumerate(columns) if len(set(column)) > 1), 0)
    ids, labels = list(example.input_ids), list(example.labels)
    ids[begin:begin], labels[begin:begin] = note, [IGNORE] * len(note)
    return replace(example, input_ids=ids, labels=labels)


def agrees(example: Example) -> bool:
    """Whether the teacher's likeliest tokens are the answer's."""
    if example.teacher is None:
        return False
    answer = [label for label in example.labels if label != IGNORE]
    return list(example.teacher.ids[:: example.teacher.k]) == answer
