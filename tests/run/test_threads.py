"""How many threads a call computes with: those that were asked for, or those that a job began with."""

import pytest
import torch
from command import run

from sebp_edge import Politeness
from sebp_edge.errors import Paused
from sebp_edge.events import StepDone, TrainingStarted

pytestmark = pytest.mark.usefixtures("unassessed")


@pytest.mark.slow
@pytest.mark.parametrize("fails", [False, True])
def test_the_threads_are_limited_during_a_training_and_restored(polite, notes_folder, fails):
    before, seen = torch.get_num_threads(), set()

    def react(made, event):
        if isinstance(event, TrainingStarted | StepDone):
            seen.add(torch.get_num_threads())
        if fails and isinstance(event, TrainingStarted):
            raise ZeroDivisionError

    made = polite(react, politeness=Politeness(threads=before + 2))
    if fails:
        with pytest.raises(ZeroDivisionError):
            made.adapt(notes_folder)
    else:
        made.adapt(notes_folder)
    assert seen == {before + 2}
    assert torch.get_num_threads() == before


def test_the_threads_are_those_of_other_calls_too(make):
    seen = set()
    made = make(politeness=Politeness(threads=3))
    made.generate("a boat", max_new_tokens=2, on_text=lambda text: seen.add(torch.get_num_threads()))
    assert seen == {3} and torch.get_num_threads() != 3


@pytest.mark.slow
def test_a_training_goes_on_with_as_many_threads_as_it_began_with_and_its_version_names_them(polite, notes_folder):
    """However many there are later, and whatever is asked for then."""
    before, seen = torch.get_num_threads(), []

    def react(made, event):
        if isinstance(event, StepDone):
            seen.append(torch.get_num_threads())
            assert len(seen) > 2 or made.pause()

    torch.set_num_threads(3)
    try:
        made = polite(react)
        with pytest.raises(Paused):
            made.adapt(notes_folder)
        torch.set_num_threads(2)
        with pytest.raises(Paused):
            made.resume()
        made.politeness = Politeness(threads=1)
        made.resume()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert set(seen) == {3}
    assert made.store.find("default", 1).record.threads == 3


def test_a_job_keeps_its_number_of_threads():
    refused = run("adapt", "--resume", "0123ab", "--threads", "1")
    assert (refused.exit_code, "--threads does not go with --resume" in refused.stderr) == (2, True)


@pytest.mark.parametrize("command", ["generate", "ask", "inspect"])
def test_other_commands_refuse_an_absurd_number_of_threads(command, notes_folder):
    words = {"generate": ["a boat"], "ask": ["Where is the boat?", notes_folder], "inspect": [notes_folder]}[command]
    found = run(command, *words, "--threads", "0")
    assert (found.exit_code, "threads is 0; choose a whole number from 1" in found.stderr) == (2, True)
