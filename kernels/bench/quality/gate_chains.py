"""Adapts in chains, and counts how often the gate replaces a version by one that is truly worse.

    python kernels/bench/quality/gate_chains.py FOLDER FOLDER [--chains 20] [--steps 10] [--device cpu] [--processes 1]
                                                              [--outcomes FILE] [--minutes 8] [--record [FILE]]

Each folder has the notes of one author; a chain begins with 24 to 48 of them and learns a few more in each step, on
from the active version or afresh, at several rates. The true loss of a version is that of its judged states on 60 notes
that no chain has. It is an error if a version becomes active whose true loss is more than the tolerance above the
lowest one of a version that was active before. Goes on from the outcomes that a file has.
"""

import random
import sys
import tempfile
from functools import cache
from pathlib import Path
from statistics import mean
from typing import NamedTuple

sys.path.append(str(Path(__file__).parents[1]))

import evidence
import side_by_side
from quality.learning_rates import adapt_and_judge, loaded
from sebp_edge import AdapterStore, Personalizer, Recipe
from sebp_edge.events import silent
from sebp_edge.machine.devices import pick_device
from sebp_edge.memory.options import MemoryOptions
from sebp_edge.models.adaptation import load
from sebp_edge.models.catalog import DEFAULT_MODEL
from sebp_edge.texts.batches import Collator
from sebp_edge.texts.examples import encode
from sebp_edge.texts.readers import read_texts
from sebp_edge.training.gate import TOLERANCE
from sebp_edge.training.scoring import score

SOURCES = (*evidence.OPS, "sebp_edge", "sebp_edge/models/tiny/model.safetensors", "recipes/notes.toml", __file__)
POPULATION, CHARACTERS = 60, (200, 3000)
# What a step does: multiples of the rate, epochs, and whether it starts afresh.
KINDS = ((1, 2, False), (1, 2, False), (1, 2, False), (6, 2, False), (1, 2, True), (0.4, 2, True), (1, 1, True))


class Chain(NamedTuple):
    number: int
    folder: Path
    steps: int
    device: str | None


def main(arguments: list[str] | None = None) -> None:
    parser = evidence.parser(__doc__)
    parser.add_argument("folders", type=Path, nargs=2)
    parser.add_argument("--chains", type=int, default=20)
    parser.add_argument("--steps", type=int, default=10)
    side_by_side.add_options(parser)
    options = parser.parse_args(arguments)
    numbers = range(options.chains)
    chains = [Chain(number, options.folders[number % 2], options.steps, options.device) for number in numbers]
    found = side_by_side.run_missing(run, chains, options)
    rows = [row for chain in chains if chain in found for row in found[chain]]
    print(f"{sum(row['wrong'] for row in rows)} errors in {len(found)} chains")
    evidence.record("gate-chains", SOURCES, rows, options.record, on_cpu=pick_device(options.device).type == "cpu")


@cache
def read_notes(folder: Path) -> list:
    found = read_texts(folder).documents
    notes = [each for each in found if isinstance(each.content, str) and len(each.content) in range(*CHARACTERS)]
    random.Random(0).shuffle(notes)
    return notes


def run(chain: Chain) -> list[dict]:
    """Runs one chain; returns a row for each step."""
    draw, rows, lowest, notes = random.Random(chain.number), [], None, read_notes(chain.folder)
    own, size = draw.sample(notes[POPULATION:], 120), draw.choice((24, 36, 48))
    with tempfile.TemporaryDirectory() as folder:
        store = AdapterStore(folder)
        for step in range(chain.steps):
            rate, epochs, fresh = draw.choice(KINDS) if step else KINDS[-3]
            recipe = Recipe.load("notes").replace(learning_rate=2e-3 * rate, epochs=epochs, batch_tokens=512)
            seed = draw.randrange(100)
            personalizer = Personalizer(recipe=recipe, device=chain.device, store=store, seed=seed)
            personalizer.in_use = loaded(DEFAULT_MODEL, chain.device)
            saved = adapt_and_judge(personalizer, [each.content for each in own[:size]], fresh=fresh)
            loss = true_loss(personalizer, saved, notes[:POPULATION])
            wrong = saved.active and lowest is not None and loss > lowest * (1 + TOLERANCE)
            gains = saved.report().training.tested.gains
            row = {"chain": chain.number, "texts": chain.folder.name, "step": step, "rate": rate, "fresh": fresh}
            row |= {"documents": size, "verdict": saved.record.verdict, "active": saved.active}
            row |= {"refused": saved.record.refused, "gain over best": gains.over_best}
            rows.append(row | {"at least": gains.over_best_at_least, "true loss": loss, "wrong": wrong})
            if saved.active:
                lowest = loss if lowest is None else min(lowest, loss)
            size += draw.choice((2, 4, 8))
    evidence.show(rows[-1] | {"wrong": sum(row["wrong"] for row in rows)})
    return rows


def true_loss(personalizer: Personalizer, saved, population: list) -> float:
    """Returns the mean loss of a version's judged states on the population, in nats per token."""
    personalizer.in_use.detach_adapter()
    base, found = personalizer.in_use.base, []
    examples = encode(population, base.tokenizer, 512)[0]
    for folder in saved.judged_states():
        adaptation = load(base, folder)
        collator = Collator(512, base.pad_token_id)
        found.append(score(adaptation.model, examples, collator, base.device, silent, MemoryOptions()).mean)
        adaptation.detach()
    return mean(found)


if __name__ == "__main__":
    main()
