"""`sebp-edge ask` and `Personalizer.ask`."""

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path
from select import select

import pytest
from builders import make_llama, make_tokenizer
from command import assert_one_sentence, process, records, run, without_controls

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


@pytest.fixture(scope="module")
def micro(tmp_path_factory):
    """A small random model. Its replies stand in no passage, so that a sentence of the passage is the answer."""
    model = tmp_path_factory.mktemp("models") / "micro"
    make_llama(max_position_embeddings=1024).save_pretrained(model)
    make_tokenizer().save_pretrained(model)
    return model


@pytest.mark.slow
def test_an_answer_stands_in_a_source_that_it_names(folder, tmp_path):
    personalizer = Personalizer(device="cpu", store=tmp_path / "store")
    answer = personalizer.ask("Where is the key of the cabin?", folder)
    assert answer.found
    assert answer.sources[0].document == "trip.md"
    assert "meter box" in answer.text or not answer.quoted


def test_without_an_answer_no_model_is_loaded(folder, tmp_path):
    personalizer = Personalizer(device="cpu", store=tmp_path / "store")
    answer = personalizer.ask("What horsepower has my tractor?", folder)
    assert (answer.text, answer.found, answer.sources) == ("Not in your notes.", False, ())
    assert personalizer.in_use.base is None


@pytest.mark.slow
def test_a_refusal_imports_no_torch(folder):
    code = "import sys; from sebp_edge.cli import main\ntry: main()\nfinally: print('torch' in sys.modules)"
    question = "What horsepower has my tractor?"
    found = subprocess.run([sys.executable, "-c", code, "ask", question, folder], capture_output=True, text=True)
    *_, answer, has_torch = found.stdout.splitlines()
    assert (answer, has_torch) == ("Not in your notes.", "False")


def test_a_question_that_is_too_long_gets_a_sentence(folder, tmp_path):
    personalizer = Personalizer(device="cpu", store=tmp_path / "store")
    with pytest.raises(TextsError, match="too long for the model's context"):
        personalizer.ask("cabin key number " * 2000, folder)
    with pytest.raises(TextsError, match="empty"):
        personalizer.ask("", folder)


@pytest.mark.slow
def test_the_command_answers_names_its_sources_and_refuses(folder, micro):
    *_, last = records(run("ask", "Where is the key of the cabin?", folder, "--model", micro, "--json").stdout)
    assert last["event"] == "result" and last["found"] and last["sources"][0]["document"] == "trip.md"
    assert "trip.md" in run("ask", "Where is the key of the cabin?", folder, "--model", micro).output
    assert "Not in your notes." in run("ask", "Is there a helicopter?", folder, "--model", micro).output


def test_without_a_question_or_a_path_there_is_a_sentence(folder):
    assert_one_sentence(run("ask", folder), "No question was given", 2)
    assert_one_sentence(run("ask", "Where is the key?"), "which is no path", 2)


@pytest.mark.slow
def test_a_model_without_a_chat_template_answers(folder, tmp_path):
    model = tmp_path / "plain"
    make_llama(max_position_embeddings=1024).save_pretrained(model)
    make_tokenizer(chat_template=None).save_pretrained(model)
    personalizer = Personalizer(model, device="cpu", store=tmp_path / "store")
    assert personalizer.ask("and the key?", folder, before=[("Where is the cabin?", "In Norway.")]).found


class Conversation:
    """`sebp-edge ask` on a terminal."""

    def __init__(self, *arguments):
        self._ours, theirs = pty.openpty()
        environment = {**os.environ, "TERM": "dumb", "COLUMNS": "60"}
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), theirs)
        self.process = process("ask", *arguments, env=environment, **streams)
        os.close(theirs)

    def until(self, end):
        """Returns the lines until these characters, or until the process ends."""
        shown = b""
        while not shown.endswith(end.encode()) or not end:
            assert select([self._ours], [], [], 200)[0], shown
            try:
                shown += os.read(self._ours, 1)
            except OSError:  # the other side is closed
                break
        return without_controls(shown.decode())

    def type(self, text):
        os.write(self._ours, text.encode())

    def wait_for_reading(self):
        """Returns once the process waits for input: readline notices a signal that comes before at the next key."""
        waits_in = Path(f"/proc/{self.process.pid}/wchan")
        for _ in range(100):
            if waits_in.exists() and "poll" in waits_in.read_text():
                return
            time.sleep(0.05)

    def end(self):
        os.close(self._ours)
        self.process.kill()
        self.process.wait()


@pytest.fixture
def converse():
    """A function that starts a conversation, which ends with the test."""
    started = []

    def start(*arguments):
        started.append(Conversation(*arguments))
        return started[-1]

    yield start
    for conversation in started:
        conversation.end()


@pytest.mark.slow
@pytest.mark.parametrize("end", ["\n", "\x04"])
def test_a_conversation_goes_on_after_a_bad_question_and_ends_on_a_line_of_its_own(converse, folder, micro, end):
    conversation = converse(folder, "--model", micro)
    assert conversation.until("> ")[-2:] == ["Ask about your texts; an empty line ends.", "> "]
    if end == "\n":  # answers take seconds
        conversation.type("Where is the key of the cabin?\n")
        *_, source, begin = conversation.until("\n> ")
        assert (source, begin) == ("trip.md, line 1", "> ")
        conversation.type("cabin " * 600 + "\n")
        assert "sebp-edge: The question is too long for the model's" in " ".join(conversation.until("\n> "))
    conversation.type(end)
    lines = conversation.until("")
    assert len(lines) > 1 and not "".join(lines)
    assert conversation.process.wait(timeout=200) == 0


@pytest.mark.slow
def test_ctrl_c_at_a_question_ends_the_conversation_on_a_line_of_its_own(converse, folder, micro):
    conversation = converse(folder, "--model", micro)
    conversation.until("> ")
    conversation.wait_for_reading()
    conversation.process.send_signal(signal.SIGINT)
    assert conversation.until("") == ["", "sebp-edge: Interrupted; nothing was changed.", ""]
    assert conversation.process.wait(timeout=200) == 130


@pytest.mark.slow
def test_a_conversation_prints_no_json(converse, folder):
    conversation = converse(folder, "--json")
    assert any("A conversation prints no JSON" in line for line in conversation.until(""))
    assert conversation.process.wait(timeout=200) == 2
