"""The benchmark of learning on: both arms learn the same notes, and each larger model has a result of its own."""

import csv
import json

import pytest

from speed import learning_on


@pytest.mark.slow
def test_a_model_is_measured_and_recorded_by_its_name(model_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(learning_on, "CHANGES", {24: (1, 2)})
    monkeypatch.setenv("SEBP_EDGE_COMMIT", "0123456789")
    results = tmp_path / "results.json"
    arguments = ["--model", model_folder, "--sizes", 24, "--seeds", 0, "--device", "cpu", "--record", results]
    learning_on.main([*map(str, arguments)])
    entry = json.loads(results.read_text())["learning-on-micro-llama"]
    assert entry["gpu"] is None and "kernels/bench/speed/learning_on.py" in entry["sources"]
    with (tmp_path / entry["table"]).open(newline="") as file:
        on, again = csv.DictReader(file)
    assert (on["arm"], again["arm"]) == ("learning on", "all again")
    assert on["test_loss"] != again["test_loss"]
    for found in (on, again):
        assert found["model"] == "micro-llama"
        assert all(float(found[column]) > 0 for column in ("seconds", "test_loss", "loss_of_new"))
