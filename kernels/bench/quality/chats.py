"""Measures what an adaptation to somebody's chats or mails gains on the last days, which it has not seen.

    python kernels/bench/quality/chats.py FOLDER [--model tiny ...] [--texts NAME ...] [--only SETTING ...]
                                          [--seeds 0 1 2] [--days 60] [--device cuda] [--processes 12] [--minutes 5]
                                          [--record [FILE]]

FOLDER has the files of `TEXTS`: a public chat and a public mailing list, as they are exported. The owner is one who
wrote much. Of the last --days days of the chat, and of four times as many mails, the last fifth is held out; the
adaptation splits the others itself. Losses are in nats per character of what the owner wrote then, since a model's chat
template and plain text have other tokens; the tokens that end replies count too. The seed sets the splits, the
shuffling and the initial weights. "Plain text" takes the chat template away from the model.

Before any training, the held-out examples are checked: they teach the owner's words and nobody else's, on later days
than all others, and a plain forward of the first one gives the loss that is computed here.
"""

import argparse
import json
import shutil
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[1]))

import evidence
import side_by_side
from sebp_edge import AdapterStore, Personalizer, Recipe
from sebp_edge.events import StepDone, silent
from sebp_edge.machine.devices import pick_device
from sebp_edge.models.catalog import resolve
from sebp_edge.texts.batches import Collator
from sebp_edge.texts.documents import Document
from sebp_edge.texts.examples import Example, encode
from sebp_edge.texts.readers import Reading, read_texts
from sebp_edge.training.scoring import score

SOURCES = (*evidence.STEP, "sebp_edge", "recipes/chat.toml", "recipes/notes.toml", __file__)
# The owner of each text: the file's name without its ending, and the name in it.
TEXTS = {"fluid-work": "Bosmon", "twisted-python": "exarkun@divmod.com"}
SETTINGS = {
    "as in the recipe": {},
    "plain text": {},
    "recipe notes": {},
    "learning rate 0.0001": {"learning_rate": 1e-4},
    "learning rate 0.001": {"learning_rate": 1e-3},
    "6 epochs": {"epochs": 6},
}
CONTEXT = 2048


@dataclass(frozen=True)
class Job:
    """One adaptation."""

    folder: Path
    model: str
    texts: str
    setting: str
    seed: int
    days: int
    device: str | None


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", nargs="+", default=["tiny"])
    parser.add_argument("--texts", nargs="+", choices=TEXTS, default=list(TEXTS))
    parser.add_argument("--only", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--days", type=int, default=60)
    parser.add_argument("--device")
    side_by_side.add_options(parser)
    evidence.add_record_option(parser)
    options = parser.parse_args(arguments)
    jobs = [
        Job(options.folder, model, texts, setting, seed, options.days, options.device)
        for seed in options.seeds
        for model in options.model
        for texts in options.texts
        for setting in options.only
    ]
    for model in options.model:
        for texts in options.texts:
            check(Job(options.folder, model, texts, "as in the recipe", 0, options.days, options.device))
    rows, on_cpu = [], pick_device(options.device).type == "cpu"
    for row in side_by_side.run(measure, jobs, options.processes, options.minutes):
        print(*(f"{each:.4g}" if isinstance(each, float) else each for each in row.values()), flush=True)
        rows.append(row | {"at_once": options.processes})
        rows.sort(key=lambda row: (row["model"], row["texts"], list(SETTINGS).index(row["setting"]), row["seed"]))
        if options.record:
            evidence.record("chats-quality-cpu" if on_cpu else "chats-quality", SOURCES, rows, options.record, on_cpu)


def measure(job: Job) -> dict:
    """The losses and the cost of one adaptation."""
    earlier, last = read(job)
    recipe, events = Recipe.load("notes" if job.setting == "recipe notes" else "chat"), []
    with tempfile.TemporaryDirectory() as folder:
        personalizer = Personalizer(
            without_template(job.model, Path(folder)) if job.setting == "plain text" else job.model,
            recipe=recipe.replace(**SETTINGS[job.setting]),
            device=job.device,
            seed=job.seed,
            store=AdapterStore(Path(folder) / "store"),
            on_event=events.append,
        )
        result = personalizer.adapt(earlier, activate_anyway=True)
        in_use = personalizer.in_use
        after = nats(in_use.base, in_use.adaptation.model, last)
        with in_use.adaptation.disabled():
            before = nats(in_use.base, in_use.adaptation.model, last)
    characters = own_characters(last)
    return {
        "model": Path(job.model).name,
        "texts": job.texts,
        "setting": job.setting,
        "seed": job.seed,
        "documents": result.documents,
        "held_out": len(last),
        "characters": characters,
        "before": before / characters,
        "after": after / characters,
        "gain": 1 - after / before,
        "own_gain": result.gain,
        "verdict": result.verdict,
        "general_rise": result.general_loss_after / result.general_loss_before - 1,
        "copied_tokens": max((copy.run for copy in result.copies), default=0),
        "steps": sum(isinstance(event, StepDone) for event in events),
        "seconds": round(result.seconds, 1),
    }


def read(job: Job) -> tuple[Reading, list[Document]]:
    """What is adapted to, and the documents of the last days."""
    [path] = job.folder.glob(f"{job.texts}.*")
    reading = read_texts(path, me=TEXTS[job.texts])
    documents = sorted(reading.documents, key=day)[-job.days if path.suffix == ".txt" else -4 * job.days :]
    first = len(documents) * 4 // 5
    # No day is on both sides.
    while day(documents[first]) == day(documents[first - 1]):
        first += 1
    return replace(reading, documents=documents[:first], left_out=[]), documents[first:]


def day(document: Document) -> str:
    return document.source[-len("2008-12-31") :]


def own_characters(documents: list[Document]) -> int:
    return sum(len(content.messages[turn]["content"]) for content in contents(documents) for turn in content.turns)


def contents(documents: list[Document]) -> list:
    return [document.content for document in documents]


def examples_of(base, documents: list[Document]) -> list[Example]:
    limit = getattr(base.model.config, "max_position_embeddings", CONTEXT)
    examples, left_out = encode(documents, base.tokenizer, min(CONTEXT, limit))
    if left_out:
        raise ValueError(f"{len(left_out)} held-out documents cannot be encoded.")
    return examples


def nats(base, model, documents: list[Document]) -> float:
    """The loss of a model on the owner's words in some documents, with the tokens that end replies."""
    examples = examples_of(base, documents)
    losses = score(model, examples, Collator(CONTEXT, base.pad_token_id), base.device, silent)
    return sum(losses.nats.values())


def without_template(model: str, folder: Path) -> Path:
    """A copy of a model's folder without its chat template, of the same name."""
    copy = folder / Path(model).name
    shutil.copytree(resolve(model).location, copy)
    (copy / "chat_template.jinja").unlink(missing_ok=True)
    settings = json.loads((copy / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (copy / "tokenizer_config.json").write_text(json.dumps(settings))
    return copy


@torch.no_grad()
def check(job: Job) -> None:
    """Checks what is measured.

    Raises:
        ValueError: it is not what it should be.
    """
    earlier, last = read(job)
    if max(map(day, earlier.documents)) >= min(map(day, last)):
        raise ValueError("Held-out days are not later than all others.")
    with tempfile.TemporaryDirectory() as folder:
        for model in (job.model, without_template(job.model, Path(folder))):
            personalizer = Personalizer(model, device=job.device, store=AdapterStore(Path(folder) / "store"))
            base = personalizer.in_use.load(silent)
            check_words(base, last)
            check_loss(base, last[:1])


def check_words(base, documents: list[Document]) -> None:
    examples = examples_of(base, documents)
    for number, content in enumerate(contents(documents)):
        labels = [label for each in examples if each.document == number for label in each.labels if label >= 0]
        learnt = "".join(base.tokenizer.decode(labels, skip_special_tokens=True).split())
        own = "".join("".join(content.messages[turn]["content"] for turn in content.turns).split())
        # Templates may end a reply with more than a control token, such as a newline, which is gone here.
        if learnt != own:
            raise ValueError(f"Of held-out document {number}, other words than the owner's have loss.")


def check_loss(base, documents: list[Document]) -> None:
    expected = 0.0
    for example in examples_of(base, documents):
        ids = torch.tensor([list(example.input_ids)], device=base.device)
        labels = torch.tensor(list(example.labels)[1:], device=base.device)
        logits = base.model(ids).logits[0, :-1].double()
        expected += torch.nn.functional.cross_entropy(logits, labels, reduction="sum").item()
    found = nats(base, base.model, documents)
    if abs(found / expected - 1) > 5e-3:  # bf16
        raise ValueError(f"A plain forward has a loss of {expected:.1f} nats, but {found:.1f} were computed.")


if __name__ == "__main__":
    main()
