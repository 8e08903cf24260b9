"""Measures how much of an adapter's gain each quantisation of an export keeps.

    python kernels/bench/formats/export_gain.py MODEL FOLDER... [--notes 80] [--learning-rates 5e-5 5e-4]
                                                [--quants q8_0 q4_0] [--record [FILE]]

Trains on every other note of a sample of each folder with the recipe `notes`, whatever the gate decides, and measures
the losses on the other half, which the adaptation does not see: of the base model, with the adapter, and of the merged
model in the file.
"""

import random
import sys
import tempfile
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

import evidence
from sebp_edge import Personalizer, Recipe
from sebp_edge.engine.models.catalog import resolve
from sebp_edge.export.export_result import ExportProgress
from sebp_edge.export.exporter import measure
from sebp_edge.export.formats import Gguf
from sebp_edge.export.gguf_file import QUANTISATIONS
from sebp_edge.export.read_back import BaseComparison
from sebp_edge.export.source import Source
from sebp_edge.reading.readers import read_texts
from sebp_edge.store.record import AdapterRecord
from sebp_edge.values.reading import Reading

SOURCES = (*evidence.STEP, "sebp_edge/export", "sebp_edge/engine/models", "recipes/notes.toml", __file__)


def main() -> None:
    parser = evidence.parser(__doc__)
    parser.add_argument("model")
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--notes", type=int, default=80)
    parser.add_argument("--learning-rates", type=float, nargs="+", default=[5e-5, 5e-4])
    parser.add_argument("--quants", nargs="+", default=["q8_0", "q4_0"], choices=QUANTISATIONS)
    options = parser.parse_args()
    rows = []
    for folder in options.folders:
        documents = read_texts(folder).documents
        sample = random.Random(0).sample(documents, min(options.notes, len(documents)))
        for rate in options.learning_rates:
            about = {"model": Path(options.model).stem, "author": folder.name, "learning_rate": rate}
            rows += [about | row for row in kept(options.model, rate, sample, options.quants)]
    evidence.record("export-gain", SOURCES, rows, options.record)


def kept(model: str, rate: float, documents: list, quants: list[str]) -> list[dict]:
    """Returns a row for each quantisation, of an adapter trained on half the documents."""
    with tempfile.TemporaryDirectory() as folder:
        recipe = Recipe.load("notes").replace(learning_rate=rate)
        adapter = Path(folder, "adapter")
        with Personalizer(model, recipe=recipe, store=Path(folder, "store")) as personalizer:
            result = personalizer.adapt(Reading(documents[::2]), out=adapter, activate_anyway=True)
        source = Source.open("adapter", adapter, AdapterRecord.read(adapter), resolve(model))
        comparison = BaseComparison(source, Reading(documents[1::2]), ExportProgress())
        rows = []
        for quant in quants:
            found = measure(source, comparison, [Gguf(source, quant)])[0]
            losses = {"base": comparison.loss_base, "adapter": comparison.loss_adapter}
            rounded = {"rounded_base": found.loss_base, "rounded": found.loss, "kept": found.share}
            rows.append(evidence.show({"verdict": result.verdict, "quant": quant} | losses | rounded))
        return rows


if __name__ == "__main__":
    main()
