"""A large text is prepared in bounded memory, with progress and stops; its examples are those of the whole text."""

import json
import os
import random
import signal
import sys
from itertools import pairwise

import psutil
import pytest
from builders import make_tokenizer
from command import process, python
from random_texts import ALPHABET

from memory.large_text import make_text
from sebp_edge import Recipe
from sebp_edge.engine.models.catalog import resolve
from sebp_edge.engine.models.loading import local_tokenizer
from sebp_edge.events import PreparationProgress
from sebp_edge.lessons import tokens
from sebp_edge.lessons.examples import encode
from sebp_edge.lessons.make_dataset import Drawing, make_dataset
from sebp_edge.reading.readers import read_texts
from sebp_edge.values import preparation_progress as progress
from sebp_edge.values.documents import Document, PromptCompletion
from sebp_edge.values.preparation_progress import Progress

PREPARE = """
import sys, warnings
warnings.simplefilter("ignore")
from pathlib import Path
import torch
from sebp_edge.machine.devices import release_memory
from sebp_edge.machine.process import peak_resident, resident
from sebp_edge.engine.models.catalog import resolve
from sebp_edge.engine.models.loading import local_tokenizer
from sebp_edge.recipe import Recipe
from sebp_edge.lessons.make_dataset import Drawing, make_dataset
from sebp_edge.reading.readers import read_texts
recipe, tokenizer = Recipe.load("notes"), local_tokenizer(resolve("tiny"))
def prepare(path):
    return make_dataset(read_texts(Path(path)), tokenizer, recipe, None, Drawing(seed=0))
prepare(sys.argv[1])
release_memory(torch.device("cpu"))
before = resident()
kept = prepare(sys.argv[2])
print(peak_resident() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="measures the peak memory as Linux does")
def test_a_text_takes_eight_times_its_size_and_a_fixed_amount_at_most(tmp_path):
    # The short one fills the caches, and has the windows that a long one has. Each character takes four bytes.
    (tmp_path / "short.txt").write_text(make_text(250_000, " 🙂", seed=1), encoding="utf-8")
    # What it leaves free is given back, since how much of it the long one uses varies by megabytes.
    (tmp_path / "long.txt").write_text(make_text(2_000_000, " 🙂"), encoding="utf-8")
    assert int(python(PREPARE, tmp_path / "short.txt", tmp_path / "long.txt")) < 8 * 2_000_000 + 26_000_000


@pytest.mark.slow
@pytest.mark.parametrize("make", [make_tokenizer, lambda: local_tokenizer(resolve("tiny"))], ids=["small", "tiny"])
def test_windows_give_the_examples_of_the_whole_text(make, set_windows):
    tokenizer, draw = make(), random.Random(0)
    texts = ["".join(draw.choices(ALPHABET, k=draw.randrange(1, 3000))) for _ in range(3)]
    texts += ["1234567890" * 120, "\n\n" * 600 + "a", "日記。" * 400]
    contents = [*texts, *(PromptCompletion(text[: len(text) // 3], text[len(text) // 3 :] + "x") for text in texts)]
    documents = [Document(str(number), content) for number, content in enumerate(contents)]
    lines = frozenset({"a", "the", ""})
    for context_length, window, overlap in ((8, 1001, 333), (200, 300, 120)):
        set_windows(100_000, 2_000)
        whole = encode(documents, tokenizer, context_length, common_lines=lines)
        set_windows(window, overlap)
        assert encode(documents, tokenizer, context_length, common_lines=lines) == whole


def test_a_text_whose_windows_agree_nowhere_is_left_out_and_the_reason_is_told(set_windows, monkeypatch):
    set_windows(100, 10)
    monkeypatch.setattr(tokens, "MAX_WINDOW", 400)
    documents = [Document("long", make_text(3000, "")), Document("short", make_text(200, "")[:100])]
    examples, left_out = encode(documents, make_tokenizer(), 64)
    assert {example.document for example in examples} == {1}
    assert [(item.source, item.reason) for item in left_out] == [
        ("long", "the tokenizer finds no boundary within 400 characters; break it into lines to use it")
    ]


@pytest.mark.slow
def test_each_piece_of_a_text_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(progress, "SECONDS", 0)
    path, events = tmp_path / "a.txt", []
    path.write_text(make_text(520_000, ""))
    report, tokenizer = Progress(events.append), local_tokenizer(resolve("tiny"))
    make_dataset(read_texts(path, progress=report), tokenizer, Recipe.load("notes"), None, Drawing(0), report)
    assert all(isinstance(event, PreparationProgress) for event in events)
    for stage, most in (("reading", 1), ("comparing", 0.5), ("tokenising", 0.2)):
        found = [event for event in events if event.stage == stage]
        assert found[0].done == 0 and found[-1].done == found[-1].total > 0
        steps = [after.done - before.done for before, after in pairwise(found)]
        assert min(steps) >= 0 and max(steps) <= most * found[-1].total


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["comparing", "tokenising"])
def test_a_signal_stops_the_preparation_within_two_seconds(stage, tmp_path):
    path = tmp_path / "a.txt"
    path.write_text(make_text(1_000_000, ""))
    before = os.times()
    with process("adapt", path, "--device", "cpu", "--json") as one:
        for line in one.stdout:
            event = json.loads(line)
            if event["event"] == "preparing" and event["stage"] == stage and event["done"]:
                break
        # Its own seconds, since others run beside it.
        begun = sum(psutil.Process(one.pid).cpu_times()[:2])
        one.send_signal(signal.SIGINT)
        assert one.wait(timeout=60) == 130
        last = json.loads(one.stdout.read().splitlines()[-1])
    assert last["error"] == "Interrupted"
    after = os.times()
    assert sum(after[2:4]) - sum(before[2:4]) - begun < 2
