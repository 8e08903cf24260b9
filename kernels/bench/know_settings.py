"""Measures what each value of the recipe know gains and costs: right answers, general loss, time.

    python kernels/bench/know_settings.py --model FOLDER [--only NAME ...] [--people "tuning 0" "varied 1" ...]
                                          [--seeds 0] [--device cuda] [--processes 14] [--minutes 8] [--record [FILE]]

Each setting differs from the recipe in one value or two. The notes and the quiz are those of invented people with whom
the rules were made; know_quality.py tests the recipe with others. "Answer loss" is the loss of the quiz's answers after
its questions, in nats per token, which differs less by chance than the count of right replies. "Own" is the quiz of the
adaptation itself, whose seed sets the quiz, the shuffling and the initial weights.
"""

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from unittest.mock import patch

import torch
from torch.nn import functional as F

import evidence
import know_people
import know_quality
import side_by_side
from know_quality import Case, Notes
from sebp_edge import AdapterStore, Personalizer, Recipe
from sebp_edge.machine.devices import pick_device
from sebp_edge.models.loading import BaseModel
from sebp_edge.questions import cue_wordings, examples
from sebp_edge.texts.examples import TURNS
from sebp_edge.texts.prompts import encode_prompt

SOURCES = (*know_quality.SOURCES, know_people.VARIED, know_quality.__file__, side_by_side.__file__, __file__)
# Two of each kind, of whom the varied ones write in many layouts.
PEOPLE = {
    f"{kinds} {seed}": Notes(seed, 20, know_people.KINDS[kinds])
    for kinds, seed in (("tuning", 0), ("tuning", 1), ("varied", 1), ("varied", 2))
}
# The number of notes, the wordings of a question in an epoch, and whether questions are asked in keywords.
DEFAULT = {"notes": 20, "wordings": examples.MAX_WORDINGS, "keywords": True}
SETTINGS: dict[str, dict] = {
    "as in the recipe": {},
    "10 notes": {"notes": 10},
    "60 notes": {"notes": 60},
    "1 wording": {"wordings": 1},
    "2 wordings": {"wordings": 2},
    "4 wordings": {"wordings": 4},
    "12 wordings": {"wordings": 12},
    "sentences only": {"keywords": False},
    "2 epochs": {"epochs": 2, "patience": 2},
    "4 epochs": {"epochs": 4, "patience": 4},
    "r = 16": {"r": 16, "lora_alpha": 32},
    "r = 64": {"r": 64, "lora_alpha": 128},
    "learning rate 7e-4": {"learning_rate": 7e-4},
    "learning rate 2e-3": {"learning_rate": 2e-3},
    "128 rows a step": {"batch_rows": 128},
    "512 rows a step, learning rate 1.4e-3": {"batch_rows": 512, "learning_rate": 1.4e-3},
    "general text 0": {"general": 0.0},
    "general text 0.1": {"general": 0.1},
    "general text 0.5": {"general": 0.5},
}
COLUMNS = {"closed": ".1%", "answer_loss": ".2f", "with_note": ".1%", "general_rise": ".1%", "seconds": ".1f"}


@dataclass(frozen=True)
class Job:
    """One adaptation with a setting."""

    model: str
    setting: str
    person: str
    seed: int
    device: str | None


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--only", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--people", nargs="+", choices=PEOPLE, default=list(PEOPLE))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--device")
    side_by_side.add_options(parser)
    evidence.add_record_option(parser)
    options = parser.parse_args(arguments)
    jobs = [
        Job(options.model, setting, person, seed, options.device)
        for seed in options.seeds
        for person in options.people
        for setting in options.only
    ]
    rows, on_cpu = [], pick_device(options.device).type == "cpu"
    result = "know-settings" + "-seeds" * (len(options.seeds) > 1)
    for row in side_by_side.run(measure, jobs, options.processes, options.minutes):
        print(f"{row['setting']:<30}", *(f"{name} {row[name]:{form}}" for name, form in COLUMNS.items()), flush=True)
        rows.append(row | {"at_once": options.processes})
        rows.sort(key=lambda row: (list(SETTINGS).index(row["setting"]), row["person"], row["seed"]))
        if options.record:
            evidence.record(result, SOURCES, rows, options.record, on_cpu)


def measure(job: Job) -> dict:
    """The quiz and the cost of one adaptation."""
    values = DEFAULT | SETTINGS[job.setting]
    notes = replace(PEOPLE[job.person], number=values["notes"])
    recipe = Recipe.load("know").replace(**{name: value for name, value in values.items() if name not in DEFAULT})
    base_closed, base_with_note = know_quality.ask_base(job.model, notes, job.device)
    with notes.written() as case, tempfile.TemporaryDirectory() as store, questions_like(values):
        personalizer = Personalizer(
            job.model, recipe=recipe, device=job.device, seed=job.seed, store=AdapterStore(Path(store))
        )
        result = personalizer.adapt(case.folder, keep_anyway=True)
        closed, with_note = case.ask(personalizer)
        loss = answer_loss(case, personalizer)
    cost = know_quality.cost(result)
    return {
        "setting": job.setting,
        "person": job.person,
        "seed": job.seed,
        "notes": values["notes"],
        "facts": len(case.questions),
        "base_closed": base_closed,
        "closed": closed,
        "answer_loss": loss,
        "base_with_note": base_with_note,
        "with_note": with_note,
        **{name: cost[name] for name in ("general_rise", "seconds", "own_questions", "own_right")},
    }


def answer_loss(case: Case, personalizer: Personalizer) -> float:
    """The mean loss of the answers after their questions, of each the accepted one that is most likely."""
    base = personalizer.in_use.load(personalizer.on_event)
    with personalizer.in_use.generating(with_adapter=True), torch.no_grad():
        return mean(min(_loss(base, asked.question, answer) for answer in asked.answers) for asked in case.questions)


def _loss(base: BaseModel, question: str, answer: str) -> float:
    prompt = encode_prompt([{"role": "user", "content": question}], base.tokenizer, chat=True).input_ids
    reply = torch.tensor(base.tokenizer(answer, add_special_tokens=False).input_ids, device=base.device)
    input_ids = torch.cat([torch.tensor(prompt, device=base.device), reply])
    logits = base.model(input_ids=input_ids[None]).logits[0, len(prompt) - 1 : -1]
    return F.cross_entropy(logits.float(), reply).item()


@contextmanager
def questions_like(values: dict) -> Iterator[None]:
    """Context in which questions have so many wordings, and are asked in keywords or not."""
    by_cues = examples.ask_by_cues if values["keywords"] else lambda text, name: []
    with (
        patch.object(cue_wordings, "NUM_WORDINGS", TURNS * values["wordings"]),
        patch.object(examples, "MAX_WORDINGS", values["wordings"]),
        patch.object(examples, "ask_by_cues", by_cues),
    ):
        yield


if __name__ == "__main__":
    main()
