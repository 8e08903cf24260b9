"""Practice notes that the recipe `ask` trains on in tests, its recipe, and what tests read from an adaptation.

A random model of one layer learns to answer questions about these notes in seconds, since their answers are the same.
"""

import random
from dataclasses import dataclass

import torch
from builders import make_llama
from quick import skip_losses_of_texts

from sebp_edge import AdapterStore, Personalizer, Recipe
from sebp_edge.ask import practice
from sebp_edge.engine.training.run import TrainingRun
from sebp_edge.events import Notice
from sebp_edge.values.documents import Document

CHANGES = {"epochs": 1, "learning_rate": 2e-2, "general": 0.05, "r": 8, "lora_alpha": 16, "min_steps": 16}
RECIPE = Recipe.load("ask").replace(**CHANGES)
NO_EFFECT = RECIPE.replace(learning_rate=1e-9, min_steps=1, batch_rows=4096)
ANSWER = "behind the shed"
WORDS = "samovar bicycle canoe piano kettle ladder lantern wagon freezer ladle kayak mower abacus bassoon easel loom"
THINGS = [*WORDS.split(), "raft", "barrow", "anvil", "harp", "trunk", "sledge", "crate", "drill"]
GENERAL = "The ferry left at six.\n<|text|>\nThe wind was from the west, and we took the bread.\n"
WEIGHTS = "adapter_model.safetensors"


def make_note(thing):
    """A note with a fact, among words that no other note has."""
    others = " ".join("".join(random.Random(f"{thing} {n}").choices("abcdefghij", k=6)) for n in range(6))
    ask = [f"Where does the {thing} stand?", f"Where is the {thing}?"]
    return {
        "name": thing,
        "text": f"# The {thing}\n\n{others}.\nIt stands {ANSWER}.\n",
        "facts": [{"ask": ask, "answer": ANSWER}],
    }


NOTES = tuple(map(make_note, THINGS))


def use_notes(patch, notes=NOTES):
    """Makes these the practice notes; the quiz has no others."""
    patch.setattr(practice, "_written", lambda folder: notes if folder == practice.PRACTICE else ())


def save_model(folder, tokenizer, **changes):
    """Saves a model with random weights so large that a few steps change its answers."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "max_position_embeddings": 256, "initializer_range": 0.1}
    sizes |= {"num_hidden_layers": 1} | changes
    torch.manual_seed(0)
    make_llama(**sizes).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_general(folder):
    """Writes a few words of general text, chat and questions, since all of it takes longer than these trainings."""
    (folder / "texts.txt").write_text(GENERAL, encoding="utf-8")
    (folder / "chat.txt").write_text("How are you?\nWhat is the time?\n", encoding="utf-8")
    (folder / "questions.txt").write_text("What is the sky?|blue/azure\nWhat is grass?|green\n", encoding="utf-8")
    return folder


def make_quick(patch, general):
    """Uses small notes and texts, and leaves out losses of texts."""
    use_notes(patch)
    patch.setattr("sebp_edge.ask.general_texts.FOLDER", general)
    patch.setattr("sebp_edge.lessons.general_probe.read_probe", lambda: [Document("probe.txt", GENERAL)])
    skip_losses_of_texts(patch)


@dataclass
class Learnt:
    """An adaptation that is kept: its result, its store, its events, and what it trained on."""

    result: object
    store: AdapterStore
    events: list
    training: TrainingRun


def watch_runs(patch):
    """Returns a list to which each training's run is added."""
    found, train = [], TrainingRun.train

    def watched(self, *arguments):
        found.append(self)
        return train(self, *arguments)

    patch.setattr(TrainingRun, "train", watched)
    return found


def new_personalizer(model, store, **options):
    """A Personalizer whose events are in `events`."""
    events = []
    options = {"recipe": RECIPE, "device": "cpu", "on_event": events.append} | options
    personalizer = Personalizer(model, store=AdapterStore(store), **options)
    personalizer.events = events
    return personalizer


def notices(personalizer):
    return [event.message for event in personalizer.events if isinstance(event, Notice)]


def decoded(examples, tokenizer):
    return [tokenizer.decode(example.input_ids) for example in examples]
