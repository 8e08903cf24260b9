"""Trainings that pause themselves at an event, and what they leave."""

import hashlib
import json

from failing_memory import RECIPE as SMALL

from sebp_edge import Personalizer
from sebp_edge.events import StepDone

RECIPE = SMALL.replace(learning_rate=2e-2, epochs=2, batch_tokens=200)


def personalizer(model, store, at=None, **options):
    """Makes a Personalizer that pauses itself at the event for which `at(event, number of its kind)` is true."""
    made = None

    def sink(event):
        made.events.append(event)
        number = sum(type(each) is type(event) for each in made.events)
        if at is not None and at(event, number):
            assert made.pause()

    options = {"recipe": RECIPE, "device": "cpu", "on_event": sink} | options
    made = Personalizer(model, store=store, **options)
    made.events = []
    return made


def bits(store, version=1, name="default"):
    """The bits of a version's weights, by their files; the order of a header's metadata is random."""
    folder = store.adapter(name).version_folder(version)
    return {str(path.relative_to(folder)): _tensors(path.read_bytes()) for path in folder.rglob("*.safetensors")}


def _tensors(content):
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    header.pop("__metadata__", None)
    return header, hashlib.sha256(content[end:]).hexdigest()


def verdict(result):
    return result.verdict, result.heldout_loss_before, result.heldout_loss_after, result.gain_at_least


def at_step(phase, step):
    return lambda event, _: isinstance(event, StepDone) and (event.phase, event.step) == (phase, step)


THIRD_STEP = at_step("train", 3)


def resume(store, job=None, **options):
    made = personalizer(**store.jobs.get(job).arguments(), store=store)
    return made, made.resume(job, **options)


def checkpoint_of(job):
    return json.loads((job.folder / "checkpoint.json").read_text())
