"""Measures how much of an adapter's gain each quantisation keeps: adapts a model to notes, and rounds both models.

    python kernels/bench/export_gain.py [FOLDER] [--model tiny] [--epochs N] [--record [FILE]]

The losses are on the notes themselves. Base models that come from a quantised file are on its grid already: the same
quantisation may then round the adapter's small changes away.
"""

import argparse
import tempfile
from dataclasses import asdict
from pathlib import Path

import evidence
from sebp_edge import AdapterStore, Personalizer, Recipe
from sebp_edge.events import silent
from sebp_edge.export.export import measure
from sebp_edge.export.formats import Gguf
from sebp_edge.export.gguf_file import QUANTISATIONS
from sebp_edge.export.read_back import Comparison
from sebp_edge.export.source import Source
from sebp_edge.texts.readers import read_texts

SOURCES = (*evidence.STEP, "sebp_edge/export", "sebp_edge/models", __file__)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", default=evidence.ROOT / "examples" / "notes")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--epochs", type=int)
    evidence.add_record_option(parser)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as store:
        rows = gains(options, AdapterStore(store))
    if options.record:
        evidence.record("export-gain", SOURCES, rows, options.record, on_cpu=True)


def gains(options: argparse.Namespace, store: AdapterStore) -> list[dict]:
    """One row per quantisation."""
    recipe = Recipe.load("notes").replace(epochs=options.epochs)
    personalizer = Personalizer(options.model, recipe=recipe, device="cpu", store=store)
    personalizer.adapt(options.folder, keep_anyway=True)
    source = Source.open("notes", *store.find("default"), personalizer.reference)
    comparison = Comparison(source, read_texts(options.folder), silent, lambda: None)
    print(f"base model {comparison.loss_base:.4f}, adapter {comparison.loss_adapter:.4f}", flush=True)
    rows = []
    for quant in QUANTISATIONS:
        kept = measure(source, comparison, [Gguf(source, quant)])[0]
        rows.append({"model": options.model, "base": comparison.loss_base, "adapter": comparison.loss_adapter})
        rows[-1] |= asdict(kept)
        print(f"{quant:6}{kept.loss_base:>9.4f}{kept.loss:>9.4f}{kept.share:>9.1%}", flush=True)
    return rows


if __name__ == "__main__":
    main()
