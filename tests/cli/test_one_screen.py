"""What an owner of notes reads fits one screen: 24 lines of 80 columns, this machine's models first."""

import json
import re

import pytest
from builders import make_sentences, write_notes
from command import RECIPE, run
from terminals import draw_on_terminal

from sebp_edge.cli import analyze, console, inspect, listings, progress
from sebp_edge.cli.progress import ProgressPrinter
from sebp_edge.engine.models.catalog import CATALOG
from sebp_edge.events import JobProgress, LearningOn, StepDone, TextsRead, TrainingStarted

LINES, COLUMNS = 24, 80


@pytest.fixture
def screen(monkeypatch):
    """What these commands draw on a terminal; their progress goes to the standard output."""
    return draw_on_terminal(monkeypatch, analyze, console, listings, width=COLUMNS)


def lines_of(screen, result=None) -> list[str]:
    assert result is None or result.exit_code == 0, result.output
    lines = [*(result.stdout.splitlines() if result else ()), *screen.getvalue().splitlines()]
    assert max(map(len, lines)) <= COLUMNS
    return lines


@pytest.mark.parametrize("number", [0, 3, 60])
def test_models_fit_with_those_of_this_machine_first(screen, tmp_path, number):
    folder = tmp_path / ("long/" * 14)
    folder.mkdir(parents=True)
    for index in range(number):
        (folder / f"model-{index:02}.gguf").write_bytes(b"GGUF")
    lines = lines_of(screen, run("models", tmp_path))
    assert len(lines) < LINES  # the prompt needs a line
    assert lines[1].split() == ["tiny", "8", "M", "bundled"]
    text = " ".join(" ".join(lines).split())
    text = re.sub(r"(\S+)\[-instruct\] (\S+)", r"\1 \2 \1-instruct \2", text)
    assert all(f"{name} (" in text for name in CATALOG if name != "tiny")
    assert text.index("Downloaded once you name them:") > max(text.find("not usable"), text.find("more (--json"))
    assert ("and 49 more (--json lists them all)" in text) == (number == 60)
    assert len(json.loads(f"[{run('models', tmp_path, '--json').stdout.strip().replace(chr(10), ',')}]")) == (
        len(CATALOG) + number
    )


@pytest.mark.parametrize("name", ["notes", "ask", "full", "lm"])
def test_a_recipe_fits(screen, name):
    assert len(lines_of(screen, run("recipes", name))) < LINES


def test_an_analysis_of_two_losses_fits(screen, tmp_path, model_folder, monkeypatch):
    texts = tmp_path / "texts"
    texts.mkdir()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quick.toml").write_text(RECIPE)
    pairs = [{"prompt": f"the map number {number}", "completion": " is old"} for number in range(9)]
    (texts / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    for number in range(30):
        (texts / f"{number}.md").touch()
    options = {"--model": model_folder, "--recipe": tmp_path / "quick.toml", "--examples": 4}
    result = run("analyze", texts, *(part for pair in options.items() for part in pair))
    lines = lines_of(screen, result)
    assert len(lines) < LINES, "\n".join(lines)
    assert "30 left out; sebp-edge inspect says why" in lines


@pytest.mark.slow
def test_an_inspection_is_in_plain_words(tmp_path):
    write_notes(tmp_path, make_sentences(8, words=60))
    shown = run("inspect", tmp_path, "--device", "cpu").stdout
    for word in ("<|bos|>", "<|eos|>", "LoRA", "float32", "nats", "AdamW"):
        assert word not in shown
    assert "with the recipe 'tiny': at most " in shown and " GB of memory, about " in shown


def test_second_lines_of_what_is_left_out_are_no_new_entries(monkeypatch):
    drawn = draw_on_terminal(monkeypatch, progress, inspect, width=48)
    reason = "a picture; only texts are read " * 3
    ProgressPrinter(None)(TextsRead(1, 1, 9, 0.0, ({"source": "a/very/long/name.png", "reason": reason},)))
    inspect._show_list(f"left out, {reason}", [f"{reason}.png"])
    lines = drawn.getvalue().splitlines()
    assert [line[:4] for line in lines] == [
        "1 do",
        "1 le",
        "  a/",
        *["    "] * 2,
        "left",
        *["    "] * 2,
        "  a ",
        *["    "] * 2,
    ]
    assert max(map(len, lines)) <= 48


# ------------------------------------------------------------------------------------------------------- the progress


STEP = {"loss": 4.0, "learning_rate": 1e-4, "grad_norm": 1.0, "tokens": 9, "tokens_per_second": 9.0}


def step(number, seconds_left=8.0):
    return StepDone("all documents", number, 9, 1, seconds_left=seconds_left, **STEP)


def test_a_training_that_learns_on_is_said_to_be_on_few_of_the_documents(capsys):
    printer = ProgressPrinter(None)
    printer(TextsRead(84, 90, 1000, 0.92, ()))
    printer(LearningOn(1, 1, 3, 80, 4, 0))
    printer(TrainingStarted("train", 2, 7, 9, 13))
    printer(TrainingStarted("all documents", 1, 8, 0, 0))
    out = capsys.readouterr().out
    assert "84 documents, 1,000 tokens\n" in out and "padding" not in out
    assert "Learning on from version 1: " in out
    assert "training: 7 of 84 documents, 9 for validation, 13 for test; at most 2 epochs\n" in out
    assert "last training: 8 of 84 documents; 1 epoch\n" in out


def test_the_time_left_is_that_of_the_whole_job_and_said_only_if_it_is_known(capsys):
    printer = ProgressPrinter(None)
    known, unknown = JobProgress("training", 0.5, 8.0), JobProgress("training", 0.9, None)
    for event in (TrainingStarted("all documents", 1, 93, 0, 0), known, step(1), unknown, step(9, 0.0)):
        printer(event)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "training: 93 documents; 1 epoch"
    assert lines[1].endswith(" tokens/s  50 %, 8 s left")
    assert lines[2].endswith(" tokens/s  90 %")
