"""`Personalizer.inspect` shows what `adapt` would do, refuses nothing that it can show, and changes nothing."""

import json
from dataclasses import FrozenInstanceError

import pytest
from builders import make_sentences
from command import run
from random_texts import edit, words

from sebp_edge import Personalizer
from sebp_edge.errors import Interrupted
from sebp_edge.events import TrainingStarted

SECRET = "the ferry left at six"


@pytest.fixture
def texts(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for number, text in enumerate(make_sentences(24, words=60)):
        (folder / f"{number:02}.md").write_text(f"{text}\n\nSent from my desk.")
    (folder / "copy.md").write_text((folder / "03.md").read_text())
    (folder / "near.txt").write_text(edit(words(200, 1), 0.03))
    (folder / "near2.txt").write_text(words(200, 1))
    (folder / "template.md").write_text("# {{title}}\n\n" + make_sentences(1, seed=7)[0])
    (folder / "drawing.md").write_text("excalidraw-plugin: parsed\n" + make_sentences(1, seed=8)[0])
    (folder / "odd.txt").write_text("日記を書いた。" * 60)
    (folder / "bad.bin").write_bytes(b"\0")
    return folder


def test_an_inspection_shows_what_is_read_and_what_is_not(texts, own_data_folder):
    found = Personalizer("tiny", device="cpu").inspect(texts)
    reasons = {group.reason: group.sources for group in found.left_out}
    assert reasons == {"binary file": ("bad.bin",), "the same as another one": ("copy.md",)}
    assert found.copies == 1
    assert ("near.txt", "near2.txt") in found.near_duplicates
    assert (found.templates, found.drawings) == (("template.md",), ("drawing.md",))
    assert found.badly_read[0].document == "odd.txt"
    assert found.boilerplate_share > 0
    assert [part.name for part in found.split] == ["train", "validation", "test"]
    assert sum(part.documents for part in found.split) == found.documents == 29
    assert sum(part.tokens for part in found.split) == found.tokens
    assert found.plan.chosen.peak > 0 and not found.refusal
    assert "does not answer" in " ".join(found.expectations) or "will not answer" in " ".join(found.expectations)
    assert not own_data_folder.exists()
    with pytest.raises(FrozenInstanceError):
        found.model = "other"


@pytest.mark.parametrize("count", [1, 4])
def test_too_few_documents_to_judge_are_said_before_the_training(count):
    found = Personalizer("tiny", device="cpu").inspect(make_sentences(count, words=400 // count))
    assert found.plan is not None and not found.refusal
    assert found.concerns[0].startswith("The gate needs at least 6 documents that are not copies of each other")
    assert f" on {count} document{'s' * (count > 1)}, " in found.summary
    assert "The adapter would be saved, but not judged, and so not activated." in found.summary


@pytest.mark.slow
def test_boilerplate_below_a_percent_is_not_worth_a_line(tmp_path):
    for number, text in enumerate(make_sentences(8, words=300)):
        (tmp_path / f"{number}.md").write_text(f"{text}\n{'the end' if number < 4 else ''}")
    found = json.loads(run("inspect", tmp_path, "--device", "cpu", "--json").stdout.splitlines()[-1])
    assert found["boilerplate_share"] < 0.01
    assert "boilerplate" not in run("inspect", tmp_path, "--device", "cpu").stdout


def test_the_text_of_the_user_is_in_the_examples_only(texts):
    found = Personalizer("tiny", device="cpu").inspect(texts)
    first = (texts / "00.md").read_text()[:30]
    assert first in found.rendered[0].pieces[1].text
    assert first not in repr(found)
    assert first not in json.dumps({**found.to_dict(), "rendered": None})


def test_the_split_is_the_one_that_adapt_draws(make, texts):
    def stop(event):
        if isinstance(event, TrainingStarted):
            begun.append(event)
            raise KeyboardInterrupt

    personalizer, begun = make(on_event=stop), []
    found = personalizer.inspect(texts)
    with pytest.raises(Interrupted):
        personalizer.adapt(texts)
    drawn = begun[0].train_documents, begun[0].validation_documents, begun[0].test_documents
    assert tuple(part.documents for part in found.split) == drawn


def test_texts_that_adapt_refuses_are_inspected(tmp_path):
    found = Personalizer("tiny", device="cpu").inspect([SECRET])
    assert found.plan is None
    assert found.refusal.startswith("Too little text")
    assert found.summary.startswith("adapt would refuse these texts: Too little text")


@pytest.mark.slow
def test_the_recipe_that_fits_is_named(tmp_path):
    path = tmp_path / "a.jsonl"
    lines = [json.dumps({"prompt": text, "completion": text[::-1]}) for text in make_sentences(30)]
    path.write_text("\n".join(lines))
    found = Personalizer("tiny", device="cpu").inspect(path)
    assert found.fitting_recipe == "instruct"
    assert "'instruct' fits these texts better than 'tiny'" in found.summary


@pytest.mark.slow
def test_the_command_marks_the_trained_part_in_words(texts):
    done = run("inspect", texts, "--device", "cpu")
    assert done.exit_code == 0, done.output
    assert "  trained  " in done.stdout and "<|" not in done.stdout
    assert "left out, binary file: 1" in done.stdout


@pytest.mark.slow
def test_the_command_says_how_notes_are_read_and_what_of_them_is_not(tmp_path):
    (tmp_path / ".obsidian").mkdir()
    for number, text in enumerate(make_sentences(8, words=60)):
        front, lost = "---\ntags: [a]\n---\n" * (number < 2), "%%a%%" * (number == 3) + "%%a%% %%b%%" * (number == 4)
        (tmp_path / f"{number}.md").write_text(f"{front}See [[Soup]]. {text} {lost}")
    (tmp_path / "0.md").write_text("---\ntags: [a]\n---\n[[Soup]]\tbread\n\t- and butter")
    done = run("inspect", tmp_path, "--device", "cpu")
    assert done.exit_code == 0, done.output
    notes = " ".join(done.stderr.split())
    assert "Read as Obsidian's: 8 notes." in notes
    assert "The properties of 2 notes are not learnt; only `ask` reads them." in notes
    lines = done.stdout.splitlines()
    at = lines.index("left out in 2 files, comments")
    assert lines[at + 1 : at + 3] == ["  4.md: 2", "  3.md: 1"]
    assert "  trained  Soup    bread ⏎     - and butter" in lines


def test_the_command_prints_one_line_of_json_after_the_progress(texts):
    done = run("inspect", texts, "--device", "cpu", "--json")
    *events, last = map(json.loads, done.stdout.splitlines())
    assert {event["event"] for event in events} == {"started", "progress", "preparing"}
    stages = {event["stage"] for event in events if event["event"] == "preparing"}
    assert stages == {"reading", "comparing", "tokenising", "planning"}
    assert last["event"] == "inspection" and last["rendered"][0]["pieces"][1]["trained"]
