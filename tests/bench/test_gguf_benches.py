"""The benchmarks of GGUF files and of exports, on small shapes."""

import sys

import pytest
import torch

from formats import export, gguf_loading


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="there is no /proc elsewhere")
def test_a_file_of_a_shape_is_written_and_loaded(tmp_path, warm):
    file = gguf_loading.write_shape(tmp_path, "tiny", "q4_0")
    row = next(gguf_loading.loading(file, 1, "bfloat16"))
    assert row["to"] == "bfloat16" and row["weight_bytes"] > 0
    assert row["seconds"] > 0 and row["peak_bytes"] > 0


@pytest.mark.slow
def test_types_are_timed():
    threads = torch.get_num_threads()
    try:
        assert gguf_loading.dequantising(gguf_loading.TYPES[2], 1)["seconds_per_billion"] > 0
    finally:
        torch.set_num_threads(threads)


@pytest.mark.slow
def test_an_export_is_measured(tmp_path):
    export.prepare(tmp_path, "tiny")
    row = export.measure(tmp_path, "q4_0", read_back=False)
    assert row["file_bytes"] > 0 and row["peak_bytes"] > 0
