"""Measures how much of an adapter's gain each quantisation keeps, trained as usual and trained for the quantisation.

    python kernels/bench/export_gain.py [FOLDER] [--model tiny ...] [--notes 12] [--seeds 0 1] [--epochs N]
                                        [--quants q4_0 ...] [--learning-rate X] [--record [FILE]]

Trains on notes drawn from the folder, without the gate, and measures losses on them and on as many other notes, of the
rounded base model and the rounded merged one. Both gains are compared with that of the adapter trained as usual, before
rounding: an adapter that is trained for a quantisation also repairs what that does to the base model, so it may gain
more. Base models that come from a quantised file are on its grid already: the same quantisation may then round the
adapter's small changes away.
"""

import argparse
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

import evidence
from sebp_edge import AdapterStore, Recipe
from sebp_edge.events import silent
from sebp_edge.export.export import measure
from sebp_edge.export.formats import Gguf
from sebp_edge.export.gguf_file import QUANTISATIONS
from sebp_edge.export.read_back import CPU, Comparison
from sebp_edge.export.source import Source
from sebp_edge.learning_on.memory import TextsMemory
from sebp_edge.memory.guard import MemoryGuard
from sebp_edge.memory.options import FASTEST
from sebp_edge.models.architecture import longest_sequence
from sebp_edge.models.catalog import resolve
from sebp_edge.models.loading import load_base_model
from sebp_edge.ops.fake_quantise import GRIDS
from sebp_edge.saving import NewVersion, make_record
from sebp_edge.texts.dataset import Drawing, make_dataset
from sebp_edge.texts.readers import Reading, read_texts
from sebp_edge.texts.schedule import Schedule, shuffled_batches
from sebp_edge.training.gate import Gate
from sebp_edge.training.run import TrainingRun

SOURCES = (*evidence.STEP, "sebp_edge/export", "sebp_edge/models", "recipes/notes.toml", __file__)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", default=evidence.ROOT / "examples" / "notes")
    parser.add_argument("--model", nargs="+", default=["tiny"])
    parser.add_argument("--notes", type=int, default=12)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--learning-rate", type=float)
    parser.add_argument("--quants", nargs="+", default=QUANTISATIONS, choices=QUANTISATIONS)
    evidence.add_record_option(parser)
    options = parser.parse_args()
    recipe = Recipe.load("notes").replace(epochs=options.epochs, learning_rate=options.learning_rate).with_defaults()
    documents = random.Random(0).sample(read_texts(options.folder).documents, 2 * options.notes)
    texts = {"trained on": documents[: options.notes], "held out": documents[options.notes :]}
    rows = []
    for model in options.model:
        for seed in options.seeds:
            rows += measure_all(model, recipe, texts, seed, options.quants)
    if options.record:
        evidence.record("export-gain", SOURCES, rows, options.record, on_cpu=True)


def measure_all(model: str, recipe: Recipe, texts: dict[str, list], seed: int, quants: list[str]) -> Iterator[dict]:
    """Yields a row for each quantisation and texts, of the adapter trained as usual and of those trained for it."""
    for trained_for in [None, *(quant for quant in quants if quant in GRIDS)]:
        with tempfile.TemporaryDirectory() as folder:
            own = recipe if trained_for is None else recipe.replace(merge_for=trained_for)
            source = train(model, own, texts["trained on"], seed, AdapterStore(folder))
            for where, documents in texts.items():
                comparison = Comparison(source, Reading(documents), silent, lambda: None)
                for quant in quants if trained_for is None else [trained_for]:
                    found = measure(source, comparison, [Gguf(source, quant)])[0]
                    row = {"model": Path(model).name, "seed": seed, "trained_for": trained_for, "texts": where}
                    row |= {"quant": quant, "base": comparison.loss_base, "adapter": comparison.loss_adapter}
                    row |= {"rounded_base": found.loss_base, "rounded": found.loss}
                    print(*(f"{each:.4f}" if isinstance(each, float) else each for each in row.values()), flush=True)
                    yield row


def train(model: str, recipe: Recipe, documents: list, seed: int, store: AdapterStore) -> Source:
    """Trains an adapter on all documents, and saves it."""
    base = load_base_model(resolve(model), recipe, CPU)
    drawing = Drawing(seed)
    dataset = make_dataset(Reading(documents), base.tokenizer, recipe, longest_sequence(base.model), drawing)
    batches = shuffled_batches(dataset.examples, recipe.batch_tokens, recipe.epochs, seed)
    schedules = [Schedule(batches, trains_on_all=True)]
    with MemoryGuard(CPU) as guard:
        run = TrainingRun(base, dataset, schedules, recipe, seed, silent, FASTEST, guard)
        run.train(Gate(recipe.margin, dataset.draw.cluster_of, False, None))
    record = make_record(run, None, seed, TextsMemory())
    saved = store.save(NewVersion.of(run, TextsMemory()), record, "notes", activate=True)
    return Source.open("notes", saved.path, record, base.reference)


if __name__ == "__main__":
    main()
