"""The benchmark of memory budgets: texts of exact lengths, known shapes, and a row for a failed run."""

import json
import threading

import pytest
from transformers import AutoTokenizer

from memory import budgets
from speed.end_to_end import TINY_MODEL


@pytest.mark.parametrize("data", [budgets.NOTES, budgets.CHATS])
def test_texts_have_the_lengths_drawn_from_a_data_set(data, tmp_path):
    lengths = budgets.draw_lengths(data, 3000, 300)
    assert 3000 <= sum(lengths) < 3300
    assert max(lengths) <= 300
    tokenizer, file = AutoTokenizer.from_pretrained(TINY_MODEL), tmp_path / "texts.jsonl"
    budgets.write_texts(file, lengths, tokenizer)
    texts = [json.loads(line)["text"] for line in file.read_text().splitlines()]
    # BOS and EOS are added to them.
    found = [len(tokenizer(text, add_special_tokens=False)["input_ids"]) + 2 for text in texts]
    assert found == [max(3, length) for length in lengths]


def test_several_gpus_take_one_run_each_and_rows_keep_their_order(monkeypatch, tmp_path):
    both, gpus = threading.Barrier(2, timeout=60), []

    def measure(run, work, *, on_cpu, environment):
        both.wait()
        gpus.append(environment["CUDA_VISIBLE_DEVICES"])
        both.wait()
        return {"name": run.name}

    monkeypatch.setattr(budgets, "measure", measure)
    runs = budgets.RUNS[:4]
    rows = list(budgets.measure_all(runs, tmp_path, 2, on_cpu=True))
    assert [row["name"] for row in rows] == [run.name for run in runs]
    assert set(gpus[:2]) == set(gpus[2:]) == {"0", "1"}


@pytest.mark.slow
def test_a_run_that_cannot_fit_fails_before_anything_is_loaded(tmp_path, warm):
    row = budgets.measure(budgets.TINY[1], tmp_path, on_cpu=True)
    assert "but the memory budget is 0.1 GB" in row["failed"]
    assert "predicted_gb" not in row


def test_runs_on_a_cpu_are_not_recorded(capsys):
    with pytest.raises(SystemExit):
        budgets.main(["--tiny", "--record"])
    assert "--record is for runs on a GPU" in capsys.readouterr().err
