"""Runs the paper's language modelling on your files with the SDK: WinoGrande, ARC, HellaSwag, WikiText-2, PTB.

    python examples/lm.py --model llama-3.2-3b --data FILE... [--recipe lm] [--out FOLDER] [--seed 0] [--device cuda]

A .jsonl file contains WinoGrande, ARC or HellaSwag as published; a question with all its choices and its answer becomes
one text. In a .txt file, each line is one text.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from sebp_edge import Personalizer, SebpEdgeError
from sebp_edge.errors import TextsError


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny", help="name, folder or Hub id of the base model")
    parser.add_argument("--data", type=Path, nargs="+", required=True, help="files of one or more data sets")
    parser.add_argument("--recipe", default="lm", help="a recipe's name, or a TOML file")
    parser.add_argument("--out", type=Path, help="save into this new folder")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", help="cuda, mps or cpu")
    options = parser.parse_args(arguments)
    try:
        texts = [{"text": text} for path in options.data for text in read(path)]
        personalizer = Personalizer(options.model, recipe=options.recipe, device=options.device, seed=options.seed)
        result = personalizer.adapt(texts, name="lm", out=options.out)
    except SebpEdgeError as error:
        sys.exit(f"lm: {error}")
    print(f"{result.documents} texts, {result.tokens} tokens, {result.tokens_per_second:,.0f} tokens/s in training")
    if result.gain is not None:
        print(f"held-out loss {result.heldout_loss_before:.4f} -> {result.heldout_loss_after:.4f}")
    print(result.summary)


def read(path: Path) -> Iterator[str]:
    """Yields the texts of a file."""
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8-sig").split("\n") if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise TextsError(f"{str(path)!r} cannot be read: {getattr(error, 'strerror', 'it is not UTF-8')}.") from error
    if path.suffix == ".txt":
        yield from lines
        return
    for number, line in enumerate(lines, start=1):
        try:
            yield format_question(*parse_question(json.loads(line)))
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise TextsError(
                f"Line {number} of {str(path)!r} is not a question with its answer in the format of WinoGrande, ARC or "
                "HellaSwag."
            ) from error


def parse_question(record: dict) -> tuple[str, list[str], int]:
    """Returns a question, its choices, and the index of the correct one."""
    if "option1" in record:  # WinoGrande
        return record["sentence"], [record["option1"], record["option2"]], int(record["answer"]) - 1
    if "endings" in record:  # HellaSwag
        return record["ctx"], record["endings"], int(record["label"])
    question = record["question"]  # ARC, in its authors' nested form or as a flat table
    if isinstance(question, dict):
        choices = question["choices"]
        texts, labels, question = [one["text"] for one in choices], [one["label"] for one in choices], question["stem"]
    else:
        texts, labels = record["choices"]["text"], record["choices"]["label"]
    return question, texts, labels.index(record["answerKey"])


def format_question(question: str, choices: list[str], answer: int) -> str:
    return "\n".join([question, *(f"- {choice}" for choice in choices), f"Answer: {choices[answer]}"])


if __name__ == "__main__":
    main()
