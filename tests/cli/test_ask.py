"""`sebp-edge ask` and `Personalizer.ask`."""

import pytest
from command import assert_one_sentence, records, run

from sebp_edge import Personalizer
from sebp_edge.errors import TextsError

NOTES = {
    "trip.md": "# Norway\n\nThe cabin is number 12 and the key is in the meter box.\n",
    "boat.md": "The boat is teal.\n",
}


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


def test_the_command_answers_names_its_sources_and_refuses(folder):
    *_, last = records(run("ask", "Where is the key of the cabin?", folder, "--model", "tiny", "--json").stdout)
    assert last["event"] == "result" and last["found"] and last["sources"][0]["document"] == "trip.md"
    assert "trip.md" in run("ask", "Where is the key of the cabin?", folder, "--model", "tiny").output
    assert "Not in your notes." in run("ask", "Is there a helicopter?", folder, "--model", "tiny").output


def test_without_a_question_or_a_path_there_is_a_sentence(folder):
    assert_one_sentence(run("ask", folder), "No question was given", 2)
    assert_one_sentence(run("ask", "Where is the key?"), "which is no path", 2)
