"""The benchmark of batched decoding: the methods agree before they are timed, and a result names its device."""

import json

import pytest
import torch

import batched_decoding
from batched_decoding import METHODS, make_prompts
from sebp_edge import Recipe
from sebp_edge.models.catalog import resolve
from sebp_edge.models.loading import load_base_model

SMALL = ["--device", "cpu", "--notes", "2", "--questions", "3", "--max-new-tokens", "4", "--rounds", "1"]


@pytest.fixture(scope="module")
def base():
    return load_base_model(resolve("tiny"), Recipe.load("notes"), torch.device("cpu"))


def test_every_note_is_asked_every_question(base):
    prompts = make_prompts(base, 3, 8)
    assert len(prompts) == len({tuple(prompt) for prompt in prompts}) == 24
    notes = [prompts[8 * number : 8 * number + 8] for number in range(3)]
    for about_one in notes:
        first, last = min(about_one), max(about_one)
        shared = next(at for at, (one, other) in enumerate(zip(first, last, strict=False)) if one != other)
        assert shared > max(map(len, about_one)) / 2


def test_the_methods_give_the_same_tokens(base):
    prompts = make_prompts(base, 2, 4)
    expected, *others = (method(base, prompts, 6) for method in METHODS.values())
    assert all(found == expected for found in others)


def test_methods_that_differ_are_not_measured(base, monkeypatch):
    def wrong(base, prompts, max_new_tokens):
        found = batched_decoding.together(base, prompts, max_new_tokens)
        return [[*found[0], 1], *found[1:]]

    monkeypatch.setitem(METHODS, "together", wrong)
    with pytest.raises(SystemExit, match=r"In fp32, together gives other tokens for 25\.0% of the prompts"):
        batched_decoding.check(base, make_prompts(base, 2, 2), 4)
    assert base.model.dtype == base.dtype


def test_a_model_in_bf16_is_checked_in_fp32_and_unchanged_after():
    base = load_base_model(resolve("tiny"), Recipe.load("notes"), torch.device("cpu"))
    for parameter in base.model.parameters():
        parameter.data = parameter.data.bfloat16()
    before = {name: tensor.clone() for name, tensor in (*base.model.named_parameters(), *base.model.named_buffers())}
    object.__setattr__(base, "dtype", torch.bfloat16)
    batched_decoding.check(base, make_prompts(base, 1, 2), 3)
    for name, tensor in (*base.model.named_parameters(), *base.model.named_buffers()):
        assert tensor.dtype == before[name].dtype and torch.equal(tensor, before[name])
    rows = batched_decoding.measure(base, make_prompts(base, 1, 2), 3, 1)
    assert {row["dtype"] for row in rows} == {"bfloat16"}
    assert all(0 <= row["equal"] <= 1 for row in rows)


def test_a_result_is_recorded_by_its_device(tmp_path, capsys):
    batched_decoding.main([*SMALL, "--record", str(tmp_path / "results.json")])
    output = capsys.readouterr().out
    assert "6 prompts" in output and all(name in output for name in METHODS)
    (entry,) = json.loads((tmp_path / "results.json").read_text()).items()
    assert entry[0] == "batched-decoding-cpu"
    lines = (tmp_path / "results" / "batched-decoding-cpu.csv").read_text().splitlines()
    assert len(lines) == 1 + len(METHODS)


@pytest.mark.parametrize("questions", ["0", "9"])
def test_a_number_of_questions_that_are_not_there_is_refused(questions, capsys):
    with pytest.raises(SystemExit):
        batched_decoding.main([*SMALL, "--questions", questions])
    assert "invalid choice" in capsys.readouterr().err
