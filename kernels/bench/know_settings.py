"""Measures what each value of the recipe know gains and costs: right answers, general loss, time.

    python kernels/bench/know_settings.py --model FOLDER [--only NAME ...] [--people 0 1 2 3] [--device cuda]
                                          [--processes 14] [--minutes 8] [--record [FILE]]

Each setting differs from the recipe in one value or two. The notes and the quiz are those of invented people with whom
the rules were made; know_quality.py tests the recipe with others. "Own" is the adaptation's own quiz.
"""

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import evidence
import know_people
import know_quality
import side_by_side
from know_quality import Notes
from sebp_edge import AdapterStore, Personalizer, Recipe
from sebp_edge.machine.devices import pick_device
from sebp_edge.questions import cue_wordings, examples

SOURCES = (*know_quality.SOURCES, know_quality.__file__, side_by_side.__file__, __file__)
# The number of notes, the wordings of a question, and whether questions are asked in keywords.
DEFAULT = {"notes": 20, "wordings": examples.MAX_WORDINGS, "keywords": True}
SETTINGS: dict[str, dict] = {
    "as in the recipe": {},
    "60 notes": {"notes": 60},
    "60 notes, general text 0.5": {"notes": 60, "general": 0.5},
    "r = 16": {"r": 16, "lora_alpha": 32},
    "r = 64": {"r": 64, "lora_alpha": 128},
    "learning rate 2.5e-4": {"learning_rate": 2.5e-4},
    "learning rate 1e-3": {"learning_rate": 1e-3},
    "2 epochs": {"epochs": 2, "patience": 2},
    "4 epochs": {"epochs": 4, "patience": 4},
    "64 rows a step": {"batch_rows": 64},
    "256 rows a step": {"batch_rows": 256},
    "512 rows a step, learning rate 1e-3": {"batch_rows": 512, "learning_rate": 1e-3},
    "general text 0": {"general": 0.0},
    "general text 0.5": {"general": 0.5},
    "2 wordings": {"wordings": 2},
    "4 wordings": {"wordings": 4},
    "12 wordings": {"wordings": 12},
    "sentences only": {"keywords": False},
}
COLUMNS = {"closed": ".1%", "with_note": ".1%", "general_rise": ".1%", "seconds": ".1f"}


@dataclass(frozen=True)
class Job:
    """One adaptation with a setting."""

    model: str
    setting: str
    person: int
    device: str | None


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--only", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--people", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--device")
    side_by_side.add_options(parser)
    evidence.add_record_option(parser)
    options = parser.parse_args(arguments)
    jobs = [Job(options.model, setting, each, options.device) for each in options.people for setting in options.only]
    rows, on_cpu = [], pick_device(options.device).type == "cpu"
    for row in side_by_side.run(measure, jobs, options.processes, options.minutes):
        print(f"{row['setting']:<30}", *(f"{name} {row[name]:{form}}" for name, form in COLUMNS.items()), flush=True)
        rows.append(row | {"at_once": options.processes})
        rows.sort(key=lambda row: (list(SETTINGS).index(row["setting"]), row["person"]))
        if options.record:
            evidence.record("know-settings", SOURCES, rows, options.record, on_cpu)


def measure(job: Job) -> dict:
    """The quiz and the cost of one adaptation."""
    values = DEFAULT | SETTINGS[job.setting]
    notes = Notes(job.person, values["notes"], know_people.TUNING)
    recipe = Recipe.load("know").replace(**{name: value for name, value in values.items() if name not in DEFAULT})
    base_closed, base_with_note = know_quality.ask_base(job.model, notes, job.device)
    with notes.written() as case, tempfile.TemporaryDirectory() as store, questions_like(values):
        personalizer = Personalizer(job.model, recipe=recipe, device=job.device, store=AdapterStore(Path(store)))
        result = personalizer.adapt(case.folder, keep_anyway=True)
        closed, with_note = case.ask(personalizer)
    cost = know_quality.cost(result)
    return {
        "setting": job.setting,
        "person": job.person,
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
    """Context in which questions have so many wordings, and are asked in keywords or not."""
    by_cues = examples.ask_by_cues if values["keywords"] else lambda text, name: []
    with (
        patch.object(cue_wordings, "NUM_WORDINGS", values["wordings"]),
        patch.object(examples, "MAX_WORDINGS", values["wordings"]),
        patch.object(examples, "ask_by_cues", by_cues),
    ):
        yield


if __name__ == "__main__":
    main()
