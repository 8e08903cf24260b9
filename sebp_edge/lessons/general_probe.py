"""The bundled text of general language, on which the cost of an adaptation is measured. Nothing is trained on it."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from sebp_edge.basics.labels import IGNORE
from sebp_edge.lessons.examples import encode
from sebp_edge.values.documents import Content, Document
from sebp_edge.values.example import Example

PROBE = Path(__file__).parent / "probe"
CONTEXT_LENGTH = 512


def read_probe() -> list[Document]:
    """Reads the bundled general text."""
    return [Document(path.name, path.read_text(encoding="utf-8").strip()) for path in sorted(PROBE.glob("*.txt"))]


def encode_probe(tokenizer, limit: int | None, others: Iterable[Content] = ()) -> list[Example]:
    """Returns the probe's examples, in which the end of a text has no loss: which token ends it is no general text.

    Args:
        limit: the most tokens of an example, if fewer than usual.
        others: what to encode after the probe's texts.
    """
    documents = [*read_probe(), *(Document("", content) for content in others)]
    examples, _ = encode(documents, tokenizer, min(CONTEXT_LENGTH, limit or CONTEXT_LENGTH))
    return [
        replace(each, labels=[*each.labels[:-1], IGNORE]) if each.input_ids[-1] == tokenizer.eos_token_id else each
        for each in examples
    ]
