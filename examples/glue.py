"""Fine-tunes an encoder on your GLUE files, in a plain training loop with `sparsify` around it.

    python examples/glue.py --model FOLDER --data FOLDER [--recipe glue] [--dense] [--seed 0] [--device cpu]

The data folder contains a file with "train" in its name and one with "dev" or "val"; if there are several, the first by
name is used. Formats are GLUE's own: TSV with a header (CoLA's has none), or JSONL. Labels are classes, or numbers to
predict as in STS-B. With --dense, the same training runs without SEBP.
"""

import argparse
import csv
import json
import math
import random
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from sebp_edge import Recipe, SebpEdgeError, sparsify
from sebp_edge.errors import ModelError, TextsError
from sebp_edge.research import learning_rates

# The names of text columns (one or two) and label columns in GLUE's tasks.
TEXTS = (
    ("sentence1", "sentence2"),
    ("question1", "question2"),
    ("question", "sentence"),
    ("premise", "hypothesis"),
    ("#1 String", "#2 String"),
    ("sentence",),
)
LABELS = ("gold_label", "label", "is_duplicate", "Quality", "score")
COLA = ("source", "label", "star", "sentence")


class Text(NamedTuple):
    """One or two texts to classify, and their label: the name of a class, or a number to predict."""

    texts: tuple[str, ...]
    label: str | float


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="a folder with an encoder and its tokenizer")
    parser.add_argument("--data", type=Path, required=True, help="a folder with a train and a dev file")
    parser.add_argument("--recipe", default="glue", help="a recipe's name, or a TOML file")
    parser.add_argument("--dense", action="store_true", help="train without SEBP")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("cuda", "mps", "cpu"), help="by default the best available one")
    options = parser.parse_args(arguments)
    try:
        run(options)
    except SebpEdgeError as error:
        sys.exit(f"glue: {error}")


def run(options: argparse.Namespace) -> None:
    recipe = Recipe.load(options.recipe)
    device = torch.device(options.device or torch.accelerator.current_accelerator(check_available=True) or "cpu")
    train, dev = (read(find(options.data, words)) for words in (("train",), ("dev", "val")))
    names = classes(train, dev)
    torch.manual_seed(options.seed)
    classifier = Classifier(options.model, names, recipe, device)
    length = classifier.context_length
    kind = f"{len(names)} classes" if names else "numeric labels"
    print(f"{len(train)} texts for training, {len(dev)} for evaluation, {kind}, padded to {length} tokens")
    print(f"before: {classifier.evaluate(dev)}")
    generator = random.Random(options.seed)
    epochs = [make_batches(generator.sample(train, len(train)), recipe.batch_tokens) for _ in range(recipe.epochs)]
    optimizer = torch.optim.AdamW(classifier.model.parameters(), weight_decay=recipe.weight_decay)
    rates = learning_rates(recipe, sum(map(len, epochs)))
    with nullcontext() if options.dense else sparsify(classifier.model):
        for number, batches in enumerate(epochs, start=1):
            begin = time.perf_counter()
            loss = train_epoch(classifier, batches, optimizer, rates, recipe)
            if device.type != "cpu":
                torch.accelerator.synchronize()
            seconds = time.perf_counter() - begin
            print(f"epoch {number}: loss {loss:.4f}, {seconds:.1f} s; {classifier.evaluate(dev)}", flush=True)


def train_epoch(classifier: "Classifier", batches: list[list[Text]], optimizer, rates, recipe: Recipe) -> float:
    """Trains on all batches once and returns the mean loss."""
    parameters, total = list(classifier.model.parameters()), 0.0
    classifier.model.train()
    for step, batch in enumerate(batches, start=1):
        optimizer.param_groups[0]["lr"] = next(rates)
        loss = classifier(batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, recipe.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        total += loss.detach()
        if step % 20 == 0:
            print(f"  step {step}/{len(batches)}  loss {float(total) / step:.4f}", flush=True)
    return float(total) / len(batches)


class Classifier:
    """An encoder with a new classification head for `names`, or a regression head without names; downloads nothing.

    Attributes:
        context_length: tokens that texts are padded to, on the right, as in the paper.
    """

    def __init__(self, folder: Path, names: list[str], recipe: Recipe, device: torch.device):
        self._names, self._batch_size, self._device = names, recipe.batch_tokens, device
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
            model = AutoModelForSequenceClassification.from_pretrained(
                folder, num_labels=len(names) or 1, local_files_only=True
            )
        except (OSError, ValueError) as error:
            raise ModelError(
                f"The folder {str(folder)!r} does not contain an encoder with its tokenizer; give another one."
            ) from error
        self.model = model.to(device)
        self._tokenizer.padding_side = "right"
        limits = (self._tokenizer.model_max_length, model.config.max_position_embeddings)
        self.context_length = min(recipe.context_length, *limits)

    def __call__(self, texts: list[Text]):
        """Returns the model's output for a batch, with loss and logits; uses bf16 autocast on a GPU."""
        batch = self._tokenizer(
            *map(list, zip(*(text.texts for text in texts), strict=True)),
            padding="max_length",
            truncation=True,
            max_length=self.context_length,
            return_tensors="pt",
        ).to(self._device)
        labels = torch.tensor(self._targets(texts), device=self._device)
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._device.type == "cuda"):
            return self.model(**batch, labels=labels)

    @torch.no_grad()
    def evaluate(self, texts: list[Text]) -> str:
        """Returns the scores on `texts` in words."""
        self.model.eval()
        logits = torch.cat([self(batch).logits for batch in make_batches(texts, self._batch_size)])
        if not self._names:
            return correlations(logits.squeeze(1).tolist(), self._targets(texts))
        return scores(logits.argmax(1).tolist(), self._targets(texts), len(self._names))

    def _targets(self, texts: list[Text]) -> list[int] | list[float]:
        return [self._names.index(text.label) if self._names else text.label for text in texts]


def make_batches(texts: list[Text], size: int) -> list[list[Text]]:
    return [texts[begin : begin + size] for begin in range(0, len(texts), size)]


def scores(predicted: list[int], expected: list[int], num_labels: int) -> str:
    """Returns the accuracy; for two labels also the F1 of the second, and Matthews' correlation, CoLA's score."""
    pairs = list(zip(predicted, expected, strict=True))
    accuracy = f"accuracy {sum(one == other for one, other in pairs) / len(pairs):.3f}"
    if num_labels != 2:
        return accuracy
    tp, fp, fn, tn = (pairs.count(pair) for pair in ((1, 1), (1, 0), (0, 1), (0, 0)))
    f1 = 2 * tp / max(1, 2 * tp + fp + fn)
    scale = (tp + fp) * (tp + fn) * (tn + fp) * (tn + fn)
    return f"{accuracy}, F1 {f1:.3f}, Matthews {(tp * tn - fp * fn) / max(1, scale) ** 0.5:.3f}"


def correlations(predicted: list[float], expected: list[float]) -> str:
    """Returns Pearson's and Spearman's correlations, STS-B's scores; 0 if one side is constant."""
    values = torch.tensor([predicted, expected], dtype=torch.float64)
    # Equal values get the mean of their ranks.
    ranks = [(one[:, None] > one).sum(1) + 0.5 * (one[:, None] == one).sum(1) for one in values]
    pearson, spearman = (torch.corrcoef(pair)[0, 1].nan_to_num() for pair in (values, torch.stack(ranks)))
    return f"Pearson {pearson:.3f}, Spearman {spearman:.3f}"


# ------------------------------------------------------------------------------------------------------------- files


def find(folder: Path, words: tuple[str, ...]) -> Path:
    """Returns the first file, by name, whose name contains one of `words`."""
    if not folder.is_dir():
        raise TextsError(f"There is no folder {str(folder)!r}; give one with a train and a dev file.")
    endings = (".tsv", ".jsonl")
    for path in sorted(folder.iterdir()):
        if path.suffix in endings and any(word in path.stem.lower() for word in words):
            return path
    raise TextsError(
        f"{str(folder)!r} has no {' or '.join(endings)} file with {' or '.join(map(repr, words))} in its name."
    )


def read(path: Path) -> list[Text]:
    """Reads the texts of a file in one of GLUE's formats."""
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
        records = list(records_of(path.suffix, [line.rstrip("\r") for line in lines if line.strip()]))
        columns = records[0].keys()
    except (OSError, ValueError, LookupError, AttributeError) as error:
        raise TextsError(
            f"{str(path)!r} is not valid {path.suffix[1:].upper()} in UTF-8 ({type(error).__name__})."
        ) from error
    texts = next((names for names in TEXTS if columns >= set(names)), None)
    label = next((name for name in LABELS if name in columns), None)
    if texts is None or label is None:
        known = ", ".join(" and ".join(names) for names in TEXTS)
        raise TextsError(
            f"{str(path)!r} lacks the columns of a task; expected one of {known}; and one of {', '.join(LABELS)}."
        )
    found = []
    for number, record in enumerate(records, start=1):
        try:
            found.append(Text(tuple(_text(record[name]) for name in texts), label_of(record[label], label)))
        except (LookupError, TypeError, ValueError) as error:
            raise TextsError(
                f"Row {number} of {str(path)!r} lacks a text, or a label that is a name or a number."
            ) from error
    return found


def _text(value: str | int) -> str:
    if not isinstance(value, str | int):
        raise TypeError
    return str(value)


def label_of(value: str | float, column: str) -> str | float:
    """Reads a label: a score or a JSON float is a number to predict, anything else the name of a class."""
    if column != "score" and not isinstance(value, float):
        return _text(value)
    number = float(value)
    if not math.isfinite(number):
        raise ValueError
    return number


def records_of(ending: str, lines: list[str]) -> Iterator[dict]:
    if ending == ".jsonl":
        return map(json.loads, lines)
    # GLUE's files have no quoting: a quotation mark is part of the text.
    first = lines[0].split("\t")
    is_cola = len(first) == len(COLA) and first[1] in ("0", "1")
    return csv.DictReader(lines, COLA if is_cola else None, delimiter="\t", quoting=csv.QUOTE_NONE)


def classes(train: list[Text], dev: list[Text]) -> list[str]:
    """Returns the names of the classes, or an empty list if the labels are numbers to predict.

    Raises:
        TextsError: labels mix names and numbers, there are not 2 to 20 classes, or a class is only in the dev file.
    """
    numbers = {isinstance(text.label, float) for text in train + dev}
    if len(numbers) == 2:
        raise TextsError("Some labels are numbers and some are classes; give files of one task.")
    if True in numbers:
        return []
    names = sorted({text.label for text in train})
    if not 2 <= len(names) <= 20:
        raise TextsError(f"The train file has {len(names)} different labels, but 2 to 20 are needed.")
    unknown = {text.label for text in dev} - set(names)
    if unknown:
        raise TextsError(f"The dev file has the label {min(unknown)!r}, which is not in the train file.")
    return names


if __name__ == "__main__":
    main()
