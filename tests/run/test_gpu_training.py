"""A training on a GPU pauses, goes on, and makes room for what others compute there; skipped without one."""

import subprocess
import sys
import time

import pytest
import torch
from builders import make_sentences

from sebp_edge import Personalizer, Politeness, Recipe
from sebp_edge.errors import MachineError, Paused
from sebp_edge.events import GraphCaptured, StepDone, Waiting
from sebp_edge.machine.politeness import TAKEN, GpuUse
from sebp_edge.run import giving_way

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU, and there is none here"),
]


def _allocated():
    """Bytes of tensors, without cuBLAS's workspaces: each stream has one, and keeps it."""
    torch._C._cuda_clearCublasWorkspaces()
    return torch.cuda.memory_allocated()


def test_a_paused_training_with_graphs_goes_on_and_frees_its_memory(tmp_path, two_layer_folder):
    recipe = Recipe.load("notes").replace(r=4, learning_rate=5e-4, context_length=64, epochs=3, batch_tokens=200)
    texts = make_sentences(30)

    def personalizer(store, paused_at=None):
        def sink(event):
            made.events.append(event)
            if isinstance(event, StepDone) and (event.phase, event.step) == paused_at:
                assert made.pause()

        made = Personalizer(two_layer_folder, recipe=recipe, device="cuda", store=store, on_event=sink)
        made.events = []
        return made

    def losses(*parts):
        steps = [event for part in parts for event in part.events if isinstance(event, StepDone)]
        return {(event.phase, event.step): event.loss for event in steps}

    whole, first, second = (
        personalizer(tmp_path / name, at) for name, at in (("a", None), ("b", ("train", 5)), ("b", 0))
    )
    whole.adapt(texts, activate_anyway=True)
    whole.close()
    allocated = _allocated()
    with pytest.raises(Paused):
        first.adapt(texts, activate_anyway=True)
    assert any(isinstance(event, GraphCaptured) for event in first.events)
    assert _allocated() - allocated < 2**20
    second.resume(texts=texts)
    expected, found = losses(whole), losses(first, second)
    assert expected.keys() == found.keys()
    for place, loss in expected.items():
        assert found[place] == pytest.approx(loss, rel=2e-2), place


BUSY = """
import torch
x = torch.ones(4096, 4096, device="cuda")
print(flush=True)
while True:
    x @ x
    torch.cuda.synchronize()
"""


def test_what_another_process_computes_is_told_and_what_this_one_does_is_not():
    uuid, x = str(torch.cuda.get_device_properties(0).uuid), torch.ones(4096, 4096, device="cuda")
    try:
        use = GpuUse(uuid)
    except MachineError as error:
        pytest.skip(str(error))

    def highest(wanted):
        """The highest use by others, until it is as high as wanted, or this process has computed for long enough."""
        found, end = 0.0, time.monotonic() + (60 if wanted else 5)
        while time.monotonic() < end and not (wanted and found >= wanted):
            x @ x
            torch.cuda.synchronize()
            found = max(found, use.by_others())
        return found

    use.by_others()
    before = highest(0)
    if before > 100 - TAKEN:
        pytest.skip("other programs compute on this GPU, so that one more would not be seen")
    with subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE) as other:
        try:
            other.stdout.readline()
            assert highest(before + TAKEN) >= before + TAKEN
        finally:
            other.kill()


def test_a_share_of_the_gpu_and_a_wait_leave_the_losses_as_they_are(tmp_path, two_layer_folder, mains, monkeypatch):
    recipe = Recipe.load("notes").replace(r=4, learning_rate=5e-4, context_length=64, epochs=2, batch_tokens=200)
    waits, rests = [], []
    rest = giving_way.GivingWay.rest
    monkeypatch.setattr(giving_way.GivingWay, "rest", lambda way: rests.append(rest(way)))

    def losses(name, politeness=None):
        found = {}

        def sink(event):
            if isinstance(event, StepDone):
                found[event.phase, event.step] = event.loss
                if politeness is not None and (event.phase, event.step) == ("train", 3):
                    mains.power_plugged = False
            if isinstance(event, Waiting):
                waits.append(event.holds_memory)
                mains.power_plugged = True

        options = {"recipe": recipe, "device": "cuda", "store": tmp_path / name, "on_event": sink}
        with Personalizer(two_layer_folder, politeness=politeness, **options) as made:
            made.adapt(make_sentences(30), activate_anyway=True)
        return found

    expected, found = losses("whole"), losses("polite", Politeness(gpu_share=50, waits=True))
    assert waits == [True] and rests
    assert expected.keys() == found.keys()
    for place, loss in expected.items():
        assert found[place] == pytest.approx(loss, rel=2e-2), place
