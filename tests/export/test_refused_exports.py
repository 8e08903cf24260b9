"""Files that were written otherwise than meant are found and not exported, and what they lose is measured."""

import json
from dataclasses import replace
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
from export_sources import long_texts
from safetensors.torch import load_file, save_file

from sebp_edge import AdapterRecord, Personalizer
from sebp_edge.engine.models.catalog import resolve
from sebp_edge.engine.models.gguf import families
from sebp_edge.errors import ExportError
from sebp_edge.export import exporter as main_path
from sebp_edge.export import formats, llama_cpp
from sebp_edge.export.export_result import ExportProgress, GainKept
from sebp_edge.export.source import Source


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lost", "has_memory"), [("rope_theta", True), ("rope_parameters", False), ("rms_norm_eps", False)]
)
def test_a_merged_config_from_which_a_program_reads_something_else_is_refused(
    llama, tmp_path, monkeypatch, request, has_memory, lost
):
    write = formats.write_settings

    def lose(folder, source):
        write(folder, source)
        values = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({name: value for name, value in values.items() if name != lost}))

    monkeypatch.setattr(formats, "write_settings", lose)
    if not has_memory:
        request.getfixturevalue("no_memory")
    with pytest.raises(ExportError, match=r"config\.json says something else than the base model's"):
        Personalizer(llama[0], device="cpu").export(llama[1], tmp_path / "out", format="merged")
    assert not (tmp_path / "out").exists()


def test_other_tensors_than_meant_are_found(llama_for_mlx, tmp_path, no_memory, monkeypatch):
    write = formats.Mlx.write

    def spoil(self, folder, progress):
        write(self, folder, progress)
        path = folder / "adapters.safetensors"
        save_file({name: tensor * 2 for name, tensor in load_file(path).items()}, path)

    monkeypatch.setattr(formats.Mlx, "write", spoil)
    with pytest.raises(ExportError, match="other weights than were written"):
        Personalizer(llama_for_mlx[0], device="cpu").export(llama_for_mlx[1], tmp_path / "out", format="mlx")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.skipif(find_spec("xllamacpp") is None, reason="llama.cpp is not installed")
def test_a_file_with_which_llama_cpp_computes_something_else_is_not_exported(llama, tmp_path, monkeypatch):
    monkeypatch.setitem(families.FAMILIES, "llama", replace(families.FAMILIES["llama"], rotates_pairs=False))
    with pytest.raises(ExportError, match=r"llama\.cpp computes something else"):
        Personalizer(llama[0], device="cpu").export(llama[1], tmp_path / "out", quant="f16")
    assert {path.name for path in tmp_path.iterdir()} <= {"model", "adapter", "notes"}


@pytest.mark.skipif(find_spec("xllamacpp") is None, reason="llama.cpp is not installed")
def test_a_file_that_llama_cpp_cannot_load_is_not_exported(tmp_path):
    (tmp_path / "damaged.gguf").write_bytes(b"GGUF" + b"\xff" * 100)
    with pytest.raises(ExportError, match=r"llama\.cpp cannot read"):
        llama_cpp.predict(tmp_path / "damaged.gguf", [[0]], [], ExportProgress())


@pytest.mark.slow
def test_the_smallest_quantisation_that_keeps_the_gain_is_chosen(llama, tmp_path, monkeypatch):
    shares = {"q4_0": 0.5, "q4_1": 0.8, "q5_0": 0.91}
    tried = []

    def measured(source, comparison, formats):
        for each in formats:
            tried.append(GainKept(each.quant, 2.0, 1.0, shares[each.quant]))
            if shares[each.quant] >= main_path.ENOUGH:
                return tried

    monkeypatch.setattr(main_path, "measure", measured)
    result = Personalizer(llama[0], device="cpu").export(
        llama[1], tmp_path / "out", quant="smallest", texts=long_texts()
    )
    assert (result.quant, result.files) == ("q5_0", ("adapter-q5_0.gguf",))
    assert [one.quant for one in result.gain_kept] == ["q4_0", "q4_1", "q5_0"]


@pytest.mark.parametrize(
    ("base", "adapter", "file", "is_worse"),
    [
        (2.522, 2.487, 2.721, True),
        (2.522, 2.487, 2.500, False),
        (2.522, 2.487, 2.522001, True),
        (2.522, 2.600, 2.6001, False),  # the adapter itself costs that much
        (2.522, 2.600, 2.721, True),
    ],
)
def test_a_file_is_compared_with_the_model_that_is_not_rounded(llama, base, adapter, file, is_worse):
    model, folder = llama
    source = Source.open("adapter", folder, AdapterRecord.read(folder), resolve(model))
    losses = SimpleNamespace(loss_base=base, loss_adapter=adapter)
    found = list(main_path._losses(formats.Gguf(source, "q4_0"), [], losses, file, None))
    assert len(found) == is_worse
    assert not is_worse or f"{file:.3f} instead of {base:.3f}" in found[0]
    assert list(main_path._losses(formats.Merged(source), [], losses, file, None)) == []
