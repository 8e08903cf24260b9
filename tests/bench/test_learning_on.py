"""The benchmarks of learning on: both arms learn the same notes, and each larger model has a result of its own."""

import csv
import json

import pytest
import torch
from transformers import LlamaConfig

import adapter_tables
import end_to_end
import evidence
import learning_on
import learning_on_larger
import tables
from models import TINY
from sebp_edge.models.catalog import resolve
from sebp_edge.models.loading import load_base_model
from sebp_edge.recipe import Recipe


def row(arm, seconds, test_loss, seed):
    found = {"notes": 60, "seed": seed, "arm": arm, "seconds": seconds, "test_loss": test_loss}
    return found | {"over_active": 0.01, "loss_of_new": 2.0, "verdict": "kept"}


@pytest.fixture
def results(tmp_path, monkeypatch):
    """The file of results; there are none yet."""
    file = tmp_path / "results.json"
    file.write_text("{}")
    monkeypatch.setattr(evidence, "RESULTS", file)
    monkeypatch.setenv("SEBP_EDGE_COMMIT", "0123456789")
    return file


def test_a_model_is_measured_and_recorded_by_its_name(model_folder, results, monkeypatch):
    monkeypatch.setattr(learning_on, "CHANGES", {24: (1, 2)})
    run(results, "--model", model_folder, "--notes", 24)
    entry = json.loads(results.read_text())["learning-on-micro-llama"]
    assert entry["gpu"] is None and "kernels/bench/learning_on.py" in entry["sources"]
    with (results.parent / entry["table"]).open(newline="") as file:
        on, again = csv.DictReader(file)
    assert (on["arm"], again["arm"]) == ("learning on", "all again")
    assert on["test_loss"] != again["test_loss"]
    for found in (on, again):
        assert found["model"] == "micro-llama"
        assert all(float(found[column]) > 0 for column in ("seconds", "test_loss", "loss_of_new"))
    assert "| micro-llama | 24 | " in adapter_tables.learning_on_larger()


def test_every_shape_is_measured_with_random_weights_in_a_folder_of_its_name(results, tmp_path, monkeypatch):
    def measure(notes, seed, model, device):
        base = load_base_model(resolve(model), Recipe.load("notes"), torch.device(device))
        # The number of weights in the place of the test loss.
        return [row(arm, 1.0, base.num_parameters, seed) for arm in learning_on.ARMS]

    monkeypatch.setattr(learning_on, "measure", measure)
    monkeypatch.setattr(learning_on_larger, "known_config", lambda name: LlamaConfig(vocab_size=9000, **TINY))
    # In this process, which takes less time than one of its own.
    monkeypatch.setattr(learning_on_larger, "ensure_model_folder", make_folder)
    run(results, "--shape", "one", "other", "--work", tmp_path, "--seeds", 0, 3)
    for shape in ("one", "other"):
        found = tables.rows(f"learning-on-{shape}")
        assert [(row["model"], row["seed"]) for row in found] == [(shape, seed) for seed in (0, 0, 3, 3)]
        assert all(row["test_loss"] > 9000 * 32 for row in found)


def run(results, *arguments):
    learning_on_larger.main([*map(str, arguments), "--device", "cpu", "--record", str(results)])


def make_folder(folder, config):
    end_to_end.make_folder(folder, config)
    return folder


def test_every_recorded_model_has_a_line_for_each_number_of_notes(results):
    for model, seeds in (("b", [0]), ("a", [0, 1])):
        found = [
            {"model": model} | each
            for seed in seeds
            for each in (row("learning on", 2.0, 1.01, seed), row("all again", 8.0, 1.0, seed))
        ]
        evidence.record(f"learning-on-{model}", ["recipes"], found, results, on_cpu=True)
    lines = adapter_tables.learning_on_larger().splitlines()
    assert lines[2] == (
        "| a | 60 | 2.0 / 8.0, 2.0 / 8.0 | 1/4.0, 1/4.0 | +1.00, +1.00 | 2.00 / 2.00, 2.00 / 2.00 | kept, kept |"
    )
    assert lines[3] == "| b | 60 | 2.0 / 8.0 | 1/4.0 | +1.00 | 2.00 / 2.00 | kept |"
    assert lines[-1].endswith("`results/learning-on-a.csv`, `results/learning-on-b.csv`.")


def test_nothing_is_shown_before_a_larger_model_is_recorded(results):
    assert adapter_tables.TABLES["learning-on-larger"]() == tables.NOT_RECORDED


@pytest.mark.parametrize("arguments", [[], ["--model", "a", "--shape", "b"], ["--model", "a", "--notes", "61"]])
def test_no_model_both_kinds_and_other_numbers_of_notes_are_refused(arguments, capsys):
    with pytest.raises(SystemExit):
        learning_on_larger.main(arguments)
    assert "error: " in capsys.readouterr().err
