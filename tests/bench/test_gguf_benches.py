"""The benchmarks of GGUF files and of exports, on small shapes."""

import sys
from importlib.util import find_spec

import pytest
import torch

from formats import export, export_differences, gguf_loading


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="there is no /proc elsewhere")
def test_a_file_of_a_shape_is_written_and_loaded(tmp_path):
    file = gguf_loading.write_shape(tmp_path, "tiny", "q4_0")
    row = next(gguf_loading.loading(file, 1, "bfloat16"))
    assert row["to"] == "bfloat16" and row["weight_bytes"] > 0
    assert row["seconds"] > 0 and row["peak_bytes"] > 0


def test_types_are_timed():
    threads = torch.get_num_threads()
    try:
        assert gguf_loading.dequantising(gguf_loading.TYPES[2], 1)["seconds_per_billion"] > 0
    finally:
        torch.set_num_threads(threads)


def test_an_export_is_measured(tmp_path):
    export.prepare(tmp_path, "tiny")
    row = export.measure(tmp_path, "q4_0", read_back=False)
    assert row["file_bytes"] > 0 and row["peak_bytes"] > 0


@pytest.mark.slow
@pytest.mark.skipif(find_spec("xllamacpp") is None, reason="llama.cpp is not installed")
def test_rounding_activations_as_llama_cpp_does_explains_its_difference(monkeypatch, tmp_path):
    # One layer: a value on the edge between two roundings changes everything after it, and the order of sums, which
    # differs between processors, decides it.
    monkeypatch.setitem(export_differences.SIZES, "num_hidden_layers", 1)
    model = export_differences.make_model(tmp_path / "llama", "llama")
    theirs, rounded = export_differences.differences(model, 0.05, ["q8_0"])
    assert theirs["first_token"] > 100 * theirs["first_token_rounded"]
    assert rounded["mean_difference"] == pytest.approx(theirs["mean_difference"], rel=0.5)
