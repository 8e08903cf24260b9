"""The README's commands work in the order in which they stand, in one home, with a small model for the large one."""

import json
import re
import shlex
import zipfile
from pathlib import Path

import pytest
from builders import make_sentences
from command import run

from sebp_edge import AdapterStore

ROOT = Path(__file__).parents[2]
LONG = "the old map and the bread and the soup, so we left at six and it was late"
# What nothing was done for yet.
REFUSALS = {
    "adapt --resume": "No training is paused or interrupted.",
    "adapters rollback": "was active before version 1",
}
# These train on bundled notes for minutes, and wait for requests; tests/reader and tests/serve have them.
ELSEWHERE = ("adapt --recipe ask", "serve")


def commands():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    first = re.search(r"^pip install .*\n((?:sebp-edge .*\n)+)", text, re.MULTILINE).group(1).splitlines()
    block = re.search(r"```sh\n(sebp-edge generate .*?)```", text, re.DOTALL).group(1)
    return [shlex.split(line, comments=True)[1:] for line in [*first, *block.splitlines()]]


def test_the_first_command_quotes_the_note_that_says_it():
    first, *_ = commands()
    said, notes = "The matches are in the blue tin.", ROOT / first[-1]
    told = f'"{said}"\nabout-these-notes.md, About these notes, line 16\n'
    assert run(*first[:-1], notes).stdout == told
    assert said in (notes / "about-these-notes.md").read_text(encoding="utf-8").splitlines()[16 - 1]


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A folder with what the commands name; so few texts for "tiny", which takes its time, that it is not judged."""
    monkeypatch.chdir(tmp_path)
    for folder, number in (("examples/notes", 5), ("notes", 20)):
        (tmp_path / folder).mkdir(parents=True)
        for place, text in enumerate(make_sentences(number, seed=number, words=75)):
            (tmp_path / folder / f"{place}.md").write_text(text)
    lines = ("Bob: So?", f"Anna: {LONG}")
    said = (f"13/03/24, {hour:02}:0{n} - {lines[n % 2]}" for hour in range(5) for n in range(8))
    with zipfile.ZipFile(tmp_path / "export.zip", "w") as archive:
        archive.writestr("WhatsApp Chat with Bob.txt", "\n".join(said))
    return tmp_path


@pytest.mark.slow
@pytest.mark.usefixtures("unassessed", "own_data_folder")
def test_the_readmes_commands_work_in_their_order(home, model):
    store = AdapterStore()
    for words in commands():
        line = " ".join(words)
        if line.startswith(ELSEWHERE):
            continue
        words = [str(model) if word in ("smollm2-1.7b", "NAME") else word for word in words]
        result = run(*words, *["--max-tokens", "4"] * (words[0] == "generate"))
        refusal = next((said for begin, said in REFUSALS.items() if line.startswith(begin)), None)
        assert result.exit_code in ({1} if refusal else {0, 3}), (line, result.output)
        assert refusal is None or refusal in result.output
        if result.exit_code == 3:  # the texts are few, or the model random: the screen says how to activate it anyway
            (activation,) = re.findall("sebp-edge (adapters activate .*)", result.output)
            assert run(*shlex.split(activation)).exit_code == 0
        assert "is activated only with" not in result.output, (line, result.output)
    recipes = {name: store.adapter(name).open(1).record.recipe["name"] for name in store.names()}
    assert recipes == {"default": "tiny", "mine": "notes", "chats": "chat"}
    assert store.adapter("mine").active() == 1


@pytest.mark.slow
@pytest.mark.usefixtures("unassessed", "own_data_folder")
def test_under_a_name_of_another_model_or_of_other_texts_the_recipe_is_chosen_anew(home, model, model_folder):
    """And a plan, an inspection and an adaptation choose the same."""

    def chosen(path, own):
        options = ["--model", own, "--name", "one", "--device", "cpu", "--json"]
        results = [json.loads(run(call, path, *options).stdout.splitlines()[-1]) for call in ("plan", "inspect")]
        assert len({each["recipe"] for each in results}) == 1
        return results[0]["recipe"]

    learnt = run("adapt", "notes", "--model", model_folder, "--name", "one", "--recipe", "long", "--activate-anyway")
    assert learnt.exit_code == 0, learnt.output
    assert [chosen(path, model_folder) for path in ("notes", "examples/notes")] == ["long", "notes"]
    assert [chosen(path, model) for path in ("notes", "examples/notes")] == ["notes", "notes"]
    learnt = run("adapt", "notes", "--model", model, "--name", "one")
    assert learnt.exit_code == 3, learnt.output
    assert AdapterStore().adapter("one").open(2).record.recipe["name"] == "notes"


@pytest.mark.slow
@pytest.mark.usefixtures("unassessed", "own_data_folder")
def test_a_plan_is_for_what_the_next_adaptation_does(home, model):
    options = ["--model", model, "--name", "one", "--device", "cpu"]
    assert run("adapt", "notes", *options, "--activate-anyway").exit_code == 0
    again = run("plan", "notes", *options)
    assert "Nothing is new in 20 documents" in again.output and "learning all of them again" in again.output
    (home / "notes" / "new.md").write_text(make_sentences(1, seed=99, words=60)[0])
    later = run("plan", "notes", *options, "--json").stdout.splitlines()
    events = [json.loads(line) for line in later]
    assert [event["new"] for event in events if event["event"] == "learning_on"] == [1]
