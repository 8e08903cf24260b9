"""Measures learning rates and epochs of the recipes chat and instruct: test loss, general loss, steps, time.

    python kernels/bench/chat_settings.py --model FOLDER --data FOLDER [--recipes chat instruct] [--seeds 0 1 2]
                                          [--only NAME ...] [--device cuda] [--processes 14] [--minutes 8]
                                          [--record [FILE]]

--data has oasst1/oa_questions.jsonl.xz, conversations of which the English ones are drawn for chat, and
arc/arc_easy.jsonl.xz, questions with choices for instruct. "Short answers" are questions with answers of a few words
that rules make of an invented person's notes, each in one wording. The seed draws the records, and sets the split, the
shuffling and the initial weights. Times count only with one process.
"""

import argparse
import json
import lzma
import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import evidence
import know_people
import side_by_side
from sebp_edge import AdapterStore, Personalizer, Recipe
from sebp_edge.events import StepDone
from sebp_edge.machine.devices import pick_device
from sebp_edge.questions.rules import ask
from sebp_edge.questions.subjects import is_english

SOURCES = (
    *evidence.STEP,
    "sebp_edge",
    "recipes/chat.toml",
    "recipes/instruct.toml",
    know_people.TUNING,
    know_people.__file__,
    __file__,
)
SETTINGS = {
    "as in the recipe": {},
    **{f"learning rate {rate:g}": {"learning_rate": rate} for rate in (1e-4, 2e-4, 1e-3)},
    **{f"{epochs} epochs": {"epochs": epochs, "patience": epochs} for epochs in (2, 5)},
    "without bounds": {"batch_rows": 2**20, "min_steps": 1},
}
# Records of each kind, and the characters of the longest.
NUM_RECORDS, MAX_CHARACTERS = 160, 4000

Records = list[dict]


@dataclass(frozen=True)
class Job:
    """One adaptation of a recipe with a setting to texts of a kind, which are drawn from `data` or from notes."""

    model: str
    data: Path
    recipe: str
    texts: str
    setting: str
    seed: int
    device: str | None


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--recipes", nargs="+", choices=["chat", "instruct"], default=["chat", "instruct"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--device")
    side_by_side.add_options(parser)
    evidence.add_record_option(parser)
    options = parser.parse_args(arguments)
    jobs = [
        Job(options.model, options.data, recipe, texts, setting, seed, options.device)
        for recipe in options.recipes
        for texts in TEXTS[recipe]
        for setting in options.only
        for seed in options.seeds
    ]
    rows, on_cpu = [], pick_device(options.device).type == "cpu"
    for row in side_by_side.run(measure, jobs, options.processes, options.minutes):
        print(*(f"{each:.4g}" if isinstance(each, float) else each for each in row.values()), flush=True)
        rows.append(row | {"at_once": options.processes})
        rows.sort(key=lambda row: (row["recipe"], row["texts"], list(SETTINGS).index(row["setting"]), row["seed"]))
        if options.record:
            evidence.record("chat-settings", SOURCES, rows, options.record, on_cpu)


def measure(job: Job) -> dict:
    """The losses and the cost of one adaptation."""
    records = TEXTS[job.recipe][job.texts](job.data, random.Random(job.seed))
    recipe, events = Recipe.load(job.recipe).replace(**SETTINGS[job.setting]), []
    with tempfile.TemporaryDirectory() as store:
        personalizer = Personalizer(
            job.model,
            recipe=recipe,
            device=job.device,
            seed=job.seed,
            store=AdapterStore(Path(store)),
            on_event=events.append,
        )
        result = personalizer.adapt(records)
    return {
        "recipe": job.recipe,
        "texts": job.texts,
        "setting": job.setting,
        "seed": job.seed,
        "before": result.heldout_loss_before,
        "after": result.heldout_loss_after,
        "general_rise": result.general_loss_after / result.general_loss_before - 1,
        "steps": sum(isinstance(event, StepDone) and event.phase == "train" for event in events),
        "verdict": result.verdict,
        "seconds": round(result.seconds, 1),
    }


def conversations(data: Path, draw: random.Random) -> Records:
    """English conversations of OASST1, in its turns."""
    found = []
    for line in _lines(data / "oasst1" / "oa_questions.jsonl.xz"):
        text = line["input"] + line["output"]
        if len(text) > MAX_CHARACTERS or not is_english(text):
            continue
        prompt = line["input"].removesuffix("### Assistant:").removeprefix("### Human:").strip()
        if "### " not in prompt:
            found.append({"prompt": prompt, "completion": line["output"].strip()})
    return draw.sample(found, NUM_RECORDS)


def choices(data: Path, draw: random.Random) -> Records:
    """Questions of ARC-Easy with their choices, answered by the right one."""
    lines = draw.sample(_lines(data / "arc" / "arc_easy.jsonl.xz"), NUM_RECORDS)
    return [
        {
            "prompt": "\n".join([line["query"].removeprefix("Question: "), *(f"- {each}" for each in line["choices"])]),
            "completion": line["choices"][line["gold"]],
        }
        for line in lines
    ]


def short_answers(data: Path, draw: random.Random) -> Records:
    """Questions about an invented person's notes, in one wording each."""
    notes = know_people.person(draw.randrange(3), 60).notes
    asked = [question for note in notes for question in ask(note.text, note.file)]
    return [
        {"prompt": draw.choice(each.wordings), "completion": each.answer} for each in draw.sample(asked, NUM_RECORDS)
    ]


TEXTS: dict[str, dict[str, Callable[[Path, random.Random], Records]]] = {
    "chat": {"conversations": conversations},
    "instruct": {"choices": choices, "short answers": short_answers},
}


def _lines(file: Path) -> list[dict]:
    with lzma.open(file, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


if __name__ == "__main__":
    main()
