"""The notes that the recipe `know` learns in tests, its recipe, and what tests read from an adaptation.

A random model of two layers learns to answer questions about these notes in a second, since they all say the same of
their subjects.
"""

from dataclasses import dataclass

from builders import make_llama
from quick import skip_losses_of_texts

from sebp_edge import AdapterStore, Personalizer, Recipe
from sebp_edge.events import Notice
from sebp_edge.training.run import TrainingRun

CHANGES = {"epochs": 1, "learning_rate": 2e-2, "general": 0.05, "r": 8, "lora_alpha": 16, "min_steps": 16}
RECIPE = Recipe.load("know").replace(**CHANGES)
NO_EFFECT = RECIPE.replace(learning_rate=1e-9, min_steps=1, batch_rows=4096)
THINGS = "samovar bicycle canoe piano kettle ladder lantern wagon freezer ladle kayak mower".split()  # noqa: SIM905
ANSWER = "behind the shed"
NOTES = [f"# The {thing}\n\nThe {thing} stands {ANSWER}." for thing in THINGS]
# Words of the notes, of the questions and of the answers.
OWN_WORDS = [*THINGS, "shed", "stand"]
WITHOUT_FACTS = ["Hm, hm, hm, so so, la la la. " * 20, "Oh, well, and on and on, la la. " * 20]
GERMAN = [f"Das Boot Nummer {n} lag am Ufer, und der Wind kam aus dem Westen. Wir gingen heim." for n in range(12)]
OTHER = [f"# The raft\n\nThe raft stands {ANSWER}."]
GENERAL = "The ferry left at six.\n<|text|>\nThe wind was from the west, and we took the bread.\n"
WEIGHTS = "adapter_model.safetensors"


def save_model(folder, tokenizer, **changes):
    """Saves a model with random weights so large that a few steps change its answers."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "max_position_embeddings": 256, "initializer_range": 0.1}
    make_llama(**(sizes | changes)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_quick(patch, general):
    """Leaves out what the quiz does not ask for."""
    patch.setattr("sebp_edge.questions.general_texts.TEXTS", general)
    patch.setattr("sebp_edge.questions.examples.practice_notes", lambda: ())
    skip_losses_of_texts(patch)


@dataclass
class Learnt:
    """An adaptation to the notes that is kept: its result, its store, its events, and what it trained on."""

    result: object
    store: AdapterStore
    events: list
    training: TrainingRun


def watch_runs(patch):
    """Returns a list to which each training's run is added."""
    found, train = [], TrainingRun.train

    def watched(self, gate):
        found.append(self)
        return train(self, gate)

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


def trained_examples(training):
    return training.task.dataset.trained


def decoded(examples, tokenizer):
    return [tokenizer.decode(example.input_ids) for example in examples]
