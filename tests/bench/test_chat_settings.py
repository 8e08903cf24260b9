"""The benchmark of the recipes chat and instruct: its records, and one run."""

import json
import lzma
import random

import pytest

import chat_settings

ENGLISH = "### Human: What is the best way to keep the bread that I have made? ### Assistant:"


@pytest.fixture
def data(tmp_path):
    """A folder like --data, with a few records of each kind that have to be left out."""
    said = [{"input": ENGLISH, "output": f"In a box that is {number} feet long."} for number in range(8)]
    said += [
        {
            "input": "### Human: Wie halte ich Brot frisch? ### Assistant:",
            "output": "In einem Kasten aus Holz, der nicht ganz dicht ist und im Keller steht, wo es kühl ist.",
        },
        {"input": f"### Human: And then? ### Assistant: Yes. {ENGLISH}", "output": "It is what I have said."},
        {"input": ENGLISH, "output": "It is so. " * 1000},
    ]
    asked = [{"query": f"Question: What is {n}?", "choices": ["a", "b"], "gold": n % 2} for n in range(9)]
    for name, lines in (("oasst1/oa_questions", said), ("arc/arc_easy", asked)):
        file = tmp_path / f"{name}.jsonl.xz"
        file.parent.mkdir()
        with lzma.open(file, "wt") as written:
            written.writelines(json.dumps(line) + "\n" for line in lines)
    return tmp_path


@pytest.fixture(autouse=True)
def few(monkeypatch):
    monkeypatch.setattr(chat_settings, "NUM_RECORDS", 8)


def test_conversations_are_english_short_and_one_turn(data):
    drawn = chat_settings.conversations(data, random.Random(0))
    assert {each["prompt"] for each in drawn} == {"What is the best way to keep the bread that I have made?"}
    assert {each["completion"] for each in drawn} == {f"In a box that is {number} feet long." for number in range(8)}


def test_choices_are_in_the_prompt_and_answered_by_the_right_one(data):
    for each in chat_settings.choices(data, random.Random(0)):
        number = int(each["prompt"].split()[2].rstrip("?"))
        assert each == {"prompt": f"What is {number}?\n- a\n- b", "completion": "ab"[number % 2]}


def test_the_seed_draws_the_records(data):
    for draw in (texts for kinds in chat_settings.TEXTS.values() for texts in kinds.values()):
        assert draw(data, random.Random(0)) == draw(data, random.Random(0)) != draw(data, random.Random(1))


def test_the_benchmark_runs(data, capsys, monkeypatch):
    monkeypatch.setattr(chat_settings, "NUM_RECORDS", 48)
    monkeypatch.setitem(chat_settings.TEXTS, "instruct", {"short answers": chat_settings.short_answers})
    options = ["--model", "tiny", "--data", data, "--recipes", "instruct", "--seeds", "0", "--only", "2 epochs"]
    chat_settings.main([*map(str, options), "--device", "cpu"])
    assert capsys.readouterr().out.startswith("instruct short answers 2 epochs 0 ")
