"""Plants canaries in one note, learns all notes, forgets that one, and measures what the adapter still knows of them.

    python kernels/bench/exactness/canaries.py [FOLDER] [--model tiny] [--recipe notes] [--learning-rate 5e-3]
                                     [--epochs 6] [--notes 20] [--canaries 2] [--seed 0] [--record [FILE]]

A canary is a sentence with a random number (Carlini et al. 2019). Its exposure is log2 of the number of sentences that
differ from it in the number only, less log2 of its rank among them by loss: 7 if it is the likeliest of 128, 1.4 on
average if the model never saw it. The last row is an adapter that was trained, with the same splits, without the note.
Each adapter is also exported as a GGUF file in 4 bits (q4_0), merged with the base model, and the file is asked.
"""

import argparse
import math
import random
import shutil
import sys
import tempfile
from pathlib import Path
from statistics import mean

import torch

sys.path.append(str(Path(__file__).parents[1]))

import evidence
from sebp_edge import AdapterStore, Personalizer, Recipe
from sebp_edge.reading.readers import read_texts
from sebp_edge.store.version_documents import read_history, write_history

SOURCES = (*evidence.OPS, "sebp_edge", "sebp_edge/engine/models/tiny/model.safetensors", "recipes/notes.toml", __file__)
NOTE = "canaries.md"
# The number of sentences that a canary is ranked among, itself included.
CANDIDATES = 128
# How often each canary stands in the note.
REPEATED = 64


def main() -> None:
    parser = evidence.parser(__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=evidence.ROOT / "examples" / "notes")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--recipe", default="notes")
    # Above the recipe's, and with smaller batches, so that a short training learns the numbers.
    parser.add_argument("--learning-rate", type=float, default=5e-3)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--notes", type=int, default=20)
    parser.add_argument("--canaries", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(options, Path(folder))
    evidence.record("canaries", SOURCES, rows, options.record, on_cpu=True)


def measure(options: argparse.Namespace, folder: Path) -> list[dict]:
    """Rows for four models: the base model, and the adapter that knows, that has forgotten, that never knew, each with
    its exported file."""
    notes, canaries = folder / "notes", make_canaries(options.canaries, options.seed)
    notes.mkdir()
    for number, document in enumerate(read_texts(options.folder).documents[: options.notes]):
        (notes / f"{number}.md").write_text(document.content, encoding="utf-8")
    planted = [sentence for sentence, *_ in canaries] * REPEATED
    (notes / NOTE).write_text("\n\n".join(planted), encoding="utf-8")
    store, rows = AdapterStore(folder / "store"), []

    def make(store: AdapterStore) -> Personalizer:
        recipe = Recipe.load(options.recipe).replace(
            epochs=options.epochs, patience=options.epochs, learning_rate=options.learning_rate, batch_tokens=256
        )
        return Personalizer(options.model, recipe=recipe, seed=options.seed, device="cpu", store=store)

    def add_rows(adapter: str, personalizer: Personalizer) -> None:
        add_row(adapter, personalizer)
        personalizer.export("default", folder / adapter, quant="q4_0")
        (file,) = (folder / adapter).glob("*.gguf")
        content = file.read_bytes()
        assert not any(sentence.encode() in content for sentence, *_ in canaries), "the file has the text of a canary"
        exported = Personalizer(file, device="cpu", store=AdapterStore(folder / "none"))
        exported.generate("The", adapter=None, max_new_tokens=1)
        add_row(f"{adapter}, q4_0", exported)
        exported.close()

    def add_row(adapter: str, personalizer: Personalizer) -> None:
        losses = [losses_of(personalizer.in_use.base, candidates) for candidates in canaries]
        row = {
            "model": Path(options.model).name,
            "adapter": adapter,
            "loss": mean(own for own, *_ in losses),
            "exposure": mean(exposure(own, others) for own, *others in losses),
        }
        rows.append(evidence.show(row))

    personalizer = make(store)
    personalizer.generate("The", adapter=None, max_new_tokens=1)
    add_row("base model", personalizer)
    first = personalizer.adapt(notes, activate_anyway=True)
    add_rows("knows", personalizer)
    unknowing = store_of_splits(store, folder / "unknowing", first.adapter_path)
    personalizer.forget(NOTE, notes, activate_anyway=True)
    add_rows("forgot", personalizer)
    (notes / NOTE).unlink()
    never = make(unknowing)
    never.adapt(notes, activate_anyway=True)
    add_rows("never knew", never)
    assert [row["loss"] for row in rows[3:5]] == [row["loss"] for row in rows[5:7]], "forgetting is not exact"
    return rows


def make_canaries(count: int, seed: int) -> list[list[str]]:
    """Each canary, followed by the sentences that it is ranked among."""
    draw = random.Random(seed)
    subjects = ("locker", "safe", "gate", "account", "parcel", "meter", "card", "bicycle lock")
    return [
        [
            f"The number of my {subjects[number % len(subjects)]} {number + 1} is {draw.randrange(10**5, 10**6)}."
            for _ in range(CANDIDATES)
        ]
        for number in range(count)
    ]


def store_of_splits(store: AdapterStore, folder: Path, version: Path) -> AdapterStore:
    """A copy of the store in which nothing is active, and that remembers the splits of all documents but the note."""
    shutil.copytree(store.folder.parent, folder)
    copied = folder / version.relative_to(store.folder.parent)
    (copied.parent / "active").unlink()
    note = next(document for document in store.adapter("default").documents(int(version.name)) if document.name == NOTE)
    write_history(copied, read_history(version).without({int(note.hash, 16)}))
    return AdapterStore(folder)


@torch.no_grad()
def losses_of(base, sentences: list[str]) -> list[float]:
    """The loss of each sentence in nats per token, one by one, so that no batch rounds otherwise."""
    found = []
    for sentence in sentences:
        input_ids_1T = torch.tensor([base.tokenizer(sentence)["input_ids"]])
        logits_TV = base.model(input_ids=input_ids_1T).logits[0, :-1].float()
        found.append(torch.nn.functional.cross_entropy(logits_TV, input_ids_1T[0, 1:]).item())
    return found


def exposure(own: float, others: list[float]) -> float:
    rank = 1 + sum(other < own for other in others)
    return math.log2(1 + len(others)) - math.log2(rank)


if __name__ == "__main__":
    main()
