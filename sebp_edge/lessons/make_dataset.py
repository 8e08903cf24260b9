"""Makes the dataset of a user's texts: its examples, their splits, and what was left out."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from sebp_edge.lessons.boilerplate import common_lines
from sebp_edge.lessons.concerns import find_concerns
from sebp_edge.lessons.examples import encode
from sebp_edge.lessons.split_history import take_fingerprints
from sebp_edge.lessons.splits import draw_splits
from sebp_edge.recipe import Recipe
from sebp_edge.values.dataset import Dataset
from sebp_edge.values.documents import LeftOut
from sebp_edge.values.draw import Draw, Fingerprint
from sebp_edge.values.example import Example
from sebp_edge.values.preparation_progress import SILENT, Progress
from sebp_edge.values.reading import Reading
from sebp_edge.values.remembered import SplitHistory


@dataclass(frozen=True)
class Drawing:
    """What the splits of documents are drawn from.

    Attributes:
        seed: decides about new documents.
        earlier: the documents of earlier versions of the adapter, which keep their splits, and the salt.
        keeps: whether all documents keep them, however few are left in one.
        most_in_folds, most_tokens: up to how many clusters and tokens are split into folds though they are enough for
            a split.
    """

    seed: int
    earlier: SplitHistory = field(default_factory=SplitHistory)
    keeps: bool = False
    most_in_folds: int = 0
    most_tokens: float = math.inf

    def draw(self, fingerprints: Mapping[int, Fingerprint], num_tokens: int = 0) -> Draw:
        """Draws the splits of documents with so many tokens, as far as they are known."""
        most = self.most_in_folds if num_tokens <= self.most_tokens else 0
        return draw_splits(fingerprints, self.seed, self.earlier, keeps=self.keeps, most_in_folds=most)


def make_dataset(
    reading: Reading,
    tokenizer,
    recipe: Recipe,
    model_limit: int | None,
    drawing: Drawing,
    progress: Progress = SILENT,
    encode: Callable[..., tuple[list[Example], list[LeftOut]]] = encode,
) -> Dataset:
    """Encodes documents as examples and draws their splits.

    Args:
        recipe: sets the context length and whether to use the chat template.
        model_limit: the maximum sequence length that the model supports; None if it has no limit.
        encode: makes the examples of the documents.
    """
    context_length = min(recipe.context_length, model_limit or recipe.context_length)
    texts = {number: document.own_text for number, document in enumerate(reading.documents)}
    fingerprints = take_fingerprints(texts, drawing.earlier.salt, progress)
    draw = progress.run(lambda: drawing.draw(fingerprints))
    lines = progress.run(lambda: common_lines(texts, draw.cluster_of))
    examples, left_out = encode(
        reading.documents,
        tokenizer,
        context_length,
        chat_template=recipe.chat_template,
        common_lines=lines,
        progress=progress,
    )
    used = sorted({example.document for example in examples})
    num_tokens = sum(example.num_tokens for example in examples)
    if len(used) < len(texts) or num_tokens > drawing.most_tokens:
        are_used = set(used)
        fingerprints = {number: fingerprints[number] for number in fingerprints if number in are_used}
        draw = progress.run(lambda: drawing.draw(fingerprints, num_tokens))
    chats = {example.document for example in examples if example.is_chat}
    return Dataset(
        examples,
        context_length,
        len(used),
        reading.left_out + left_out,
        draw,
        progress.run(
            lambda: find_concerns([texts[number] for number in used], draw.cluster_of, reading.num_equal, tokenizer)
        ),
        is_chat=2 * len(chats) > len(used),
        names={number: name for number in used if (name := reading.documents[number].name) is not None},
    )
