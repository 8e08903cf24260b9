"""Measures what each value of the recipe know gains and costs: right answers, general loss, time.

    python kernels/bench/know_settings.py --model FOLDER [--only NAME ...] [--seeds 0 1 2] [--device cuda]
                                          [--record [FILE]]

Each setting differs from the recipe in one value or two. The notes and the quiz are those of an invented person, as in
know_quality.py; "own" is the adaptation's own quiz. The seed is the adaptation's, and is added to the person's.
"""

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import evidence
import know_quality
from sebp_edge import AdapterStore, Personalizer, Recipe
from sebp_edge.machine.devices import pick_device
from sebp_edge.questions import examples
from sebp_edge.questions.question import Question

SOURCES = (*know_quality.SOURCES, know_quality.__file__, __file__)
# The recipe's values, the number of notes, the person, the most wordings of a question, the most of those in sentences,
# and whether questions are asked in keywords.
DEFAULT = {"notes": 20, "person": 0, "wordings": 6, "sentences": 6, "keywords": True}
SETTINGS: dict[str, dict] = {
    "as in the recipe": {},
    "another person": {"person": 1},
    "60 notes": {"notes": 60},
    "60 notes, general text 1.0": {"notes": 60, "general": 1.0},
    "r = 16": {"r": 16, "lora_alpha": 32},
    "r = 32": {"r": 32, "lora_alpha": 64},
    "r = 128": {"r": 128, "lora_alpha": 256},
    "learning rate 2e-3": {"learning_rate": 2e-3},
    "learning rate 5e-4, 4 epochs": {"learning_rate": 5e-4, "epochs": 4, "patience": 4},
    "3 epochs": {"epochs": 3, "patience": 3},
    "4 epochs": {"epochs": 4, "patience": 4},
    "256 rows a step": {"batch_rows": 256},
    "general text 1.0": {"general": 1.0},
    "four wordings": {"wordings": 4},
    "three wordings": {"wordings": 3},
    "two of them in sentences": {"sentences": 2},
    "one wording": {"wordings": 1},
    "sentences only": {"keywords": False},
}
COLUMNS = {"closed": ".1%", "with_note": ".1%", "general_rise": ".1%", "seconds": ".1f"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--only", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--device")
    evidence.add_record_option(parser)
    options = parser.parse_args()
    rows = []
    for setting in options.only:
        for seed in options.seeds:
            measured = measure(options.model, DEFAULT | SETTINGS[setting], seed, options.device)
            rows.append({"setting": setting, "seed": seed, **measured})
            print(f"{setting:<30}", *(f"{name} {measured[name]:{form}}" for name, form in COLUMNS.items()), flush=True)
    if options.record:
        on_cpu = pick_device(options.device).type == "cpu"
        evidence.record("know-settings", SOURCES, rows, options.record, on_cpu)


def measure(model: str, values: dict, seed: int, device: str | None) -> dict:
    """The quiz and the cost of one adaptation."""
    changes = {name: value for name, value in values.items() if name not in DEFAULT}
    recipe = Recipe.load("know").replace(**changes)
    with (
        know_quality.cases([values["person"] + seed], values["notes"], examples=False) as (case,),
        tempfile.TemporaryDirectory() as store,
        questions_like(values),
    ):
        base_closed, base_with_note = case.ask(Personalizer(model, device=device))
        personalizer = Personalizer(model, recipe=recipe, device=device, seed=seed, store=AdapterStore(Path(store)))
        result = personalizer.adapt(case.folder, keep_anyway=True)
        closed, with_note = case.ask(personalizer)
    cost = know_quality.cost(result)
    return {
        "notes": values["notes"],
        "facts": len(case.questions),
        "base_closed": base_closed,
        "closed": closed,
        "base_with_note": base_with_note,
        "with_note": with_note,
        **{name: cost[name] for name in ("general_rise", "seconds", "own_questions", "own_right")},
    }


@contextmanager
def questions_like(values: dict) -> Iterator[None]:
    """Context in which questions have at most so many wordings, and are asked in keywords or not."""
    ask, by_cues = examples.ask, examples.ask_by_cues if values["keywords"] else lambda text, name: []

    def ask_in_few(text: str, name: str | None) -> list[Question]:
        asked = ask(text, name)
        return [replace(question, wordings=question.wordings[: values["sentences"]]) for question in asked]

    with (
        patch.object(examples, "MAX_WORDINGS", values["wordings"]),
        patch.object(examples, "ask", ask_in_few),
        patch.object(examples, "ask_by_cues", by_cues),
    ):
        yield


if __name__ == "__main__":
    main()
