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
from export_sources import add_reader, make_adapter
from terminals import draw_on_terminal

from sebp_edge import AdapterStore, Personalizer
from sebp_edge.cli import console
from sebp_edge.engine.models.generation import Generation
from sebp_edge.errors import BaseModelMismatch, TextsError
from sebp_edge.recipe import READER

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


QUESTION = "Where is the key of the cabin?"
SENTENCE = "The cabin is number 12 and the key is in the meter box."


@pytest.fixture
def reader(micro, tmp_path):
    """A store with a reader of the small model."""
    store = AdapterStore(tmp_path / "store")
    add_reader(store, micro)
    return store


@pytest.fixture
def replies(monkeypatch):
    """What the model replies with which probability, and which prompts it has had."""
    says, prompts = ["in the meter box", 0.9], []

    def reply(model, tokenizer, input_ids, *_, **options):
        assert options.get("on_text") is None
        prompts.append(tokenizer.decode(input_ids))
        return Generation(says[0], len(input_ids), new_tokens=4, finish="stop", probability=says[1])

    monkeypatch.setattr("sebp_edge.run.generating.generate_text", reply)
    return says, prompts


def test_without_a_reader_a_sentence_is_the_answer_and_no_model_is_loaded(folder, micro, tmp_path):
    store, told = AdapterStore(tmp_path / "store"), []
    personalizer = Personalizer(micro, device="cpu", store=store)
    add_reader(store, micro, base_model="of another model")
    answer = personalizer.ask(QUESTION, folder, on_text=told.append)
    assert (answer.text, answer.sentence, answer.quoted, answer.line) == (SENTENCE, SENTENCE, True, 3)
    assert answer.sources[0].document == "trip.md" and answer.sources[0].line == 1
    assert personalizer.in_use.base is None and not told


def test_the_reader_of_the_model_reads_by_default_and_its_reply_is_told_once_it_stands(folder, micro, reader, replies):
    says, prompts = replies
    personalizer, told = Personalizer(micro, device="cpu", store=reader), []
    answer = personalizer.ask(QUESTION, folder, on_text=told.append)
    assert (answer.text, answer.quoted, answer.sentence, answer.line) == (says[0], False, SENTENCE, 3)
    assert told == says[:1] and SENTENCE in prompts[0]
    used = personalizer.in_use.adaptation
    assert personalizer.in_use.adapter_folder == reader.adapter(READER).open().path
    for says[:] in (["in the letter box", 0.9], ["in the meter box", 0.4]):
        answer = personalizer.ask(QUESTION, folder, on_text=told.append)
        assert (answer.text, answer.quoted) == (SENTENCE, True)
    assert len(told) == 1 and personalizer.in_use.adaptation is used
    assert not personalizer.ask("What horsepower has my tractor?", folder).found and len(prompts) == 3


def test_the_reader_is_in_use_for_questions_only(folder, micro, reader, replies, tmp_path):
    own = make_adapter(tmp_path / "own", micro)
    personalizer = Personalizer(micro, device="cpu", store=reader)
    for adapter in (None, own):
        if adapter is not None:
            personalizer.load_adapter(adapter)
        assert personalizer.ask(QUESTION, folder).text == personalizer.ask(QUESTION, folder).text
        assert personalizer.in_use.adapter_folder.parent.name == READER
        personalizer.generate("the boat")
        assert personalizer.in_use.adapter_folder == adapter
    personalizer.ask(QUESTION, folder)
    personalizer.ask(QUESTION, folder, adapter=READER)  # which is in use for later calls, too
    personalizer.generate("the boat")
    assert personalizer.in_use.adapter_folder.parent.name == READER


def test_a_reader_of_other_weights_with_the_same_name_is_none(folder, micro, tmp_path, replies):
    store = AdapterStore(tmp_path / "store")
    add_reader(store, micro, fingerprint="of other weights")
    personalizer = Personalizer(micro, device="cpu", store=store)
    assert personalizer.ask(QUESTION, folder).text == SENTENCE
    with pytest.raises(BaseModelMismatch):
        personalizer.ask(QUESTION, folder, adapter=READER)
    assert not personalizer.ask(QUESTION, folder, adapter=None).quoted and len(replies[1]) == 1


def test_another_model_has_the_reader_that_was_active_for_it(micro, reader):
    first = reader.adapter(READER).open()
    second = add_reader(reader, micro, base_model="other")
    assert reader.adapter(READER).active_for(first.record.base_model).version == first.version
    assert reader.adapter(READER).active_for(None).version == second.version
    (first.path / "sebp_edge.json").write_text("damaged")
    assert reader.adapter(READER).active_for(first.record.base_model) is None


@pytest.mark.slow
def test_a_quotation_and_a_refusal_import_no_torch(folder):
    code = """import sys
from sebp_edge.cli import main
try: main()
finally: print(sorted({"torch", "transformers", "numpy"} & {*sys.modules}))"""
    command, asked = [sys.executable, "-c", code, "ask"], "What horsepower has my tractor?"
    found = subprocess.run([*command, QUESTION, folder], capture_output=True, text=True)
    assert found.stdout.splitlines() == [f'"{SENTENCE}"', "trip.md, line 3", "[]"]
    found = subprocess.run([*command, folder], input=f"{asked}\n\n{QUESTION}\n", capture_output=True, text=True)
    assert found.stdout.splitlines() == ["Not in your notes.", f'"{SENTENCE}"\ttrip.md, line 3', "[]"]


def test_a_question_that_is_too_long_gets_a_sentence(folder, tmp_path):
    personalizer = Personalizer(device="cpu", store=tmp_path / "store")
    with pytest.raises(TextsError, match="too long for the model's context"):
        personalizer.ask("cabin key number " * 2000, folder, adapter=None)
    with pytest.raises(TextsError, match="empty"):
        personalizer.ask("", folder)


def test_the_command_answers_names_its_sources_and_refuses(folder, micro):
    *_, last = records(run("ask", QUESTION, folder, "--model", micro, "--json").stdout)
    assert last["event"] == "result" and last["found"] and last["sources"][0]["document"] == "trip.md"
    assert (last["text"], last["sentence"], last["line"]) == (SENTENCE, SENTENCE, 3)
    assert run("ask", QUESTION, folder, "--model", micro).stdout == f'"{SENTENCE}"\ntrip.md, line 3\n'
    assert "Not in your notes." in run("ask", "Is there a helicopter?", folder, "--model", micro).output


def test_a_terminal_shows_the_passage_around_a_quotation(folder, monkeypatch):
    (folder / "trip.md").write_text("# Norway\n\nThe key of the cabin is where it was.\nLook in the meter box.\n")
    drawn = draw_on_terminal(monkeypatch, console, width=60)
    assert run("ask", QUESTION, folder).exit_code == 0
    said, place, *around = map(str.rstrip, drawn.getvalue().splitlines())
    assert (said, place) == ('"Look in the meter box."', "trip.md, line 4")
    assert around == ["", "    # Norway", "", "    The key of the cabin is where it was.", "    Look in the meter box."]
    drawn.truncate(drawn.seek(0))
    run("ask", "Which colour has the boat?", folder)
    assert drawn.getvalue() == '"The boat is teal."\nboat.md, line 1\n'


def test_what_could_control_a_terminal_is_not_shown(folder, monkeypatch):
    evil = "The key\x1b[2J of the cabin\x9b31m is\u202e in\x07 the \x1b]0;box\x07 by the door."
    (folder / "trip.md").write_text(f"{evil}\nIts label\r is \x1b[8mgreen, and hangs on a nail.\n")
    drawn = draw_on_terminal(monkeypatch, console, width=200)
    run("ask", QUESTION, folder)
    monkeypatch.undo()
    for shown in (drawn.getvalue(), run("ask", QUESTION, folder).stdout, run("ask", folder, input=QUESTION).stdout):
        assert "The key?[2J of the cabin" in shown
        assert not set(shown) & set("\x1b\x9b\u202e\x07\r")


def test_the_command_uses_the_reader_of_the_model_and_prints_its_reply(folder, micro, replies):
    add_reader(AdapterStore(), micro)
    for chosen in (["--model", micro], ["--name", READER, "--model", micro]):
        assert run("ask", QUESTION, folder, *chosen).stdout == "in the meter box\ntrip.md, line 3\n"
    text, last = records(run("ask", QUESTION, folder, "--model", micro, "--json").stdout)[-2:]
    assert text["text"] == last["text"] == "in the meter box" and not last["quoted"]


def test_each_line_of_the_input_is_answered_with_a_line(folder, micro):
    asked = f"{QUESTION}\n\nIs there a helicopter?\n".encode() + b"\xff cabin?\nWhich colour has the boat?"
    result = run("ask", folder, "--model", micro, input=asked)
    answers = [f'"{SENTENCE}"\ttrip.md, line 3', "Not in your notes.", "", '"The boat is teal."\tboat.md, line 1']
    assert result.stdout.splitlines() == answers and result.exit_code == 0
    assert "The question is not valid Unicode" in result.stderr
    lines = records(run("ask", folder, "--model", micro, "--json", input=asked).stdout)
    assert [each["event"] for each in lines] == ["started", "result", "result", "error", "result"]


def test_without_a_question_or_a_path_there_is_a_sentence(folder):
    assert_one_sentence(run("ask", folder), "No question was given", 2)
    assert_one_sentence(run("ask", "Where is the key?"), "which is no path", 2)


@pytest.mark.slow
def test_a_model_without_a_chat_template_answers(folder, tmp_path):
    model = tmp_path / "plain"
    make_llama(max_position_embeddings=1024).save_pretrained(model)
    make_tokenizer(chat_template=None).save_pretrained(model)
    personalizer = Personalizer(model, device="cpu", store=tmp_path / "store")
    before = [("Where is the cabin?", "In Norway.")]
    assert personalizer.ask("and the key?", folder, adapter=None, before=before).found


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
    add_reader(AdapterStore(), micro)
    conversation = converse(folder, "--model", micro)
    assert conversation.until("> ")[-2:] == ["Ask about your texts; an empty line ends.", "> "]
    if end == "\n":  # answers take seconds
        conversation.type("Where is the key of the cabin?\n")
        lines = [line.rstrip() for line in conversation.until("\n> ")]
        assert "trip.md, line 3" in lines and "    # Norway" in lines and lines[-1] == ">"
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
