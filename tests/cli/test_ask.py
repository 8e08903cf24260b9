"""`sebp-edge ask` and `Personalizer.ask`."""

import json

import pytest
from command import process

from sebp_edge import Personalizer
from sebp_edge.errors import TextsError

NOTES = {"trip.md": "# Norway\n\nThe cabin is number 12 and the key is in the meter box.\n", "boat.md": "The boat is teal.\n"}


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "notes"
    folder.mkdir()
    for name, text in NOTES.items():
        (folder / name).write_text(text)
    return folder


def test_an_answer_stands_in_a_source_that_it_names(folder, tmp_path):
    personalizer = Personalizer(device="cpu", store=tmp_path / "store")
    answer = personalizer.ask("Where is the key of the cabin?", folder)
    assert answer.found
    assert answer.sources[0].document == "trip.md"
    assert "meter box" in answer.text or not answer.quoted
    assert personalizer.ask("and the boat?", folder, before=[("Where is the key?", answer.text)]).found


def test_without_an_answer_no_model_is_loaded(folder, tmp_path):
    personalizer = Personalizer(device="cpu", store=tmp_path / "store")
    answer = personalizer.ask("What horsepower has my tractor?", folder)
    assert (answer.text, answer.found, answer.sources) == ("Not in your notes.", False, ())
    assert personalizer.in_use.base is None


def test_a_question_that_is_too_long_gets_a_sentence(folder, tmp_path):
    personalizer = Personalizer(device="cpu", store=tmp_path / "store")
    with pytest.raises(TextsError, match="too long for the model's context"):
        personalizer.ask("cabin key number " * 2000, folder)
    with pytest.raises(TextsError, match="empty"):
        personalizer.ask("", folder)
