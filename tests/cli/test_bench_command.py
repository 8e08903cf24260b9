"""`sebp-edge bench`: a table for pipes and narrow windows, JSON, files, and one-sentence errors."""

import csv
import json
import re

import pytest
from builders import make_llama
from shared_fixtures import write_notes
from terminals import draw_on_terminal
from typer.testing import CliRunner

from sebp_edge.cli import bench as command
from sebp_edge.cli import console
from sebp_edge.cli.commands import app
from sebp_edge.errors import ModelError
from sebp_edge.models.catalog import CATALOG, bundled_config, resolve, resolve_config
from sebp_edge.models.loading import model_from_config
from sebp_edge.research.bench.variants import VARIANTS, Variant

SMALLEST = ("--batch", 1, "--context", 8)
NAMES = [variant.name for variant in VARIANTS]


@pytest.fixture
def bench(model_folder):
    """Runs the command with a model that takes a second."""

    def run(*arguments, model=model_folder):
        given = ("bench", "--device", "cpu", "--context", "64", "--model", model, *arguments)
        return CliRunner().invoke(app, [str(argument) for argument in given])

    return run


def refusal(*arguments, exit_code=1):
    result = CliRunner().invoke(app, ["bench", "--device", "cpu", *map(str, arguments)])
    assert result.exit_code == exit_code, result.output
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    return result.stderr


@pytest.mark.slow
def test_on_a_pipe_the_table_has_tabs_and_ends_with_the_recommendation(bench):
    result = bench("--batch", 3)
    assert result.exit_code == 0, result.output
    head, *rows = result.stdout.splitlines()
    assert re.search(
        r"micro-llama \(lora, float32, own weights\) on \d threads? of the CPU: 3 texts of 13 to 64 ", head
    )
    cells = [row.split("\t") for row in rows[: len(NAMES)]]
    assert [row[0] for row in cells] == NAMES
    assert all(re.fullmatch(r"[\d,.]+ ms", cell) for row in cells[:-1] for cell in row[1:4])
    assert all(re.fullmatch(r"\d\.\de-\d\d", row[-1]) for row in cells[:-1])
    assert cells[-1][3] == "not available"
    assert rows[len(NAMES) :][0] == "graph, not available: CUDA graphs need an NVIDIA GPU."
    assert rows[-1].startswith("On this machine, ")
    assert len(rows) == len(NAMES) + 2


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The result of a benchmark of notes with a config alone, and its table and plot with what was written there."""
    folder = tmp_path_factory.mktemp("bench")
    make_llama(num_hidden_layers=1).config.save_pretrained(folder / "only")
    targets = (folder / "b.csv", folder / "b.svg")
    options = ["--device", "cpu", "--csv", str(targets[0]), "--plot", str(targets[1])]
    given = ["bench", str(write_notes(folder / "notes")), "--context", "64", "--model", str(folder / "only"), "--json"]
    result = CliRunner().invoke(app, [*given, *options])
    return result, {target: target.read_text(encoding="utf-8") for target in targets}


@pytest.mark.slow
def test_json_csv_and_plot_have_the_same_times_and_nothing_else_is_overwritten(files, tmp_path):
    """A config alone is enough, and its random weights are announced."""
    result, written = files
    table, plot = written.values()
    assert result.stderr.startswith("note: The weights of 'only' are not on this machine, so random weights ")
    record = json.loads(result.stdout.splitlines()[-1])
    assert (record["event"], record["model"], record["weights"]) == ("bench", "only", "random")
    assert len(record["lengths"]) == 4
    assert record["tokens"] == sum(record["lengths"]) < 4 * record["context_length"]
    steps = [row["step_ms"] for row in csv.DictReader(table.splitlines())]
    assert steps == ["" if row["step_ms"] is None else str(row["step_ms"]) for row in record["variants"]]
    assert plot.startswith("<svg")
    for option, name in (("--csv", "own.csv"), ("--plot", "own.svg")):
        target = tmp_path / name
        target.write_text("my own")
        assert f"{name}' already exists and is not an earlier benchmark;" in refusal(option, target, exit_code=2)
        assert target.read_text() == "my own"


@pytest.mark.slow
def test_padding_is_as_requested_all_weights_are_trained_and_an_earlier_benchmark_is_overwritten(files, model_folder):
    _, written = files
    table, plot = written
    given = ["bench", "--device", "cpu", "--model", str(model_folder), "--padding", "60%", "--recipe", "full", "--json"]
    done = CliRunner().invoke(app, [*given, "--csv", str(table), "--plot", str(plot)])
    record = json.loads(done.stdout.splitlines()[-1])
    assert 0.6 <= record["padding_share"] < 0.61
    assert record["context_length"] == 96
    assert record["method"] == "full"
    assert [row["status"] for row in record["variants"]] == ["ok"] * 5 + ["not available"]
    assert not [content for file, content in written.items() if file.read_text(encoding="utf-8") == content]


@pytest.mark.slow
def test_no_line_is_wider_than_a_narrow_window(bench, monkeypatch):
    drawn = draw_on_terminal(monkeypatch, console, command, width=40)
    bench(*SMALLEST)
    lines = drawn.getvalue().splitlines()
    assert max(map(len, lines)) <= 40
    assert all(any(name in line for line in lines) for name in NAMES)


@pytest.mark.slow
def test_an_incorrect_variant_has_a_reason_and_no_time(bench, monkeypatch):
    dense = VARIANTS[0]
    broken = Variant("broken", dense.attach, lambda model, batch: dense.loss(model, batch) / 2)
    monkeypatch.setattr("sebp_edge.research.bench.compare.compare.__defaults__", ((dense, broken),))
    result = bench(*SMALLEST)
    rows = result.stdout.splitlines()
    assert re.fullmatch(r"broken\t-\t-\trefused\t-\t-\t\d\.\de-\d\d", rows[2])
    assert rows[3] == "broken, refused: its loss is off by 5.0e-01, above 1.0e-04."


@pytest.mark.slow
def test_every_invalid_input_is_one_sentence(model_folder, tmp_path, notes_folder):
    micro = ("--model", model_folder)
    assert "leave out --context or --padding" in refusal("--padding", "90%", "--context", 64, exit_code=2)
    assert "must be a share of the batch" in refusal(*micro, "--padding", "lots", exit_code=2)
    assert "takes at most 128; ask for less padding" in refusal(*micro, "--padding", "99%", exit_code=2)
    assert "would be padded to 129 tokens" in refusal(*micro, "--context", 129, exit_code=2)
    assert "context_length must be a whole number of at least 8" in refusal(*micro, "--context", 7, exit_code=2)
    assert "Unknown model 'tinny'; did you mean 'tiny'?" in refusal("--model", "tinny")
    assert "did you mean 'notes'?" in refusal("--recipe", "note")
    assert "There is no file or folder" in refusal(tmp_path / "missing", *micro)
    assert "Nothing readable was found" in refusal(model_folder / "model.safetensors", *micro)
    assert "must end in .svg" in refusal("--plot", tmp_path / "b.png", exit_code=2)
    assert "does not exist; create it or choose another" in refusal("--csv", tmp_path / "missing" / "b.csv")
    assert "already exists and is not an earlier benchmark; choose another file" in refusal(
        "--csv", tmp_path, exit_code=2
    )
    four_bit = tmp_path / "four.toml"
    four_bit.write_text("load_in_4bit = true\n")
    assert "loads models in 4 bits, which cannot be benchmarked" in refusal(*micro, "--recipe", four_bit)
    (tmp_path / "config.json").write_text("{}")
    assert "damaged" in refusal("--model", tmp_path / "config.json")
    assert CliRunner().invoke(app, ["bench", "--batch", "0"]).exit_code == 2
    assert "'mps' is not usable" in CliRunner().invoke(app, ["bench", "--device", "mps"]).stderr


def test_a_model_too_big_for_memory_is_refused_before_it_is_built(machine):
    machine.has_memory(1e9)
    assert "'llama-3.2-3b' has 3.21 billion parameters" in refusal("--model", "llama-3.2-3b")


# ---------------------------------------------------------------------------------------------------- models by name


@pytest.mark.parametrize("name", [name for name in CATALOG if name != "tiny"])
def test_the_config_of_every_known_model_is_bundled_and_needs_no_network(name):
    model = model_from_config(resolve(name))
    assert round(model.num_parameters() / 1e9, 3) == CATALOG[name].parameters


def test_other_models_have_no_bundled_config(model_folder):
    assert all(bundled_config(resolve(name)) is None for name in ("tiny", "someone/some-model", model_folder))


def test_a_config_file_stands_for_a_model(tmp_path, model_folder):
    (tmp_path / "my-shape.json").write_text("{}")
    assert resolve_config(tmp_path / "my-shape.json").name == "my-shape"
    assert resolve_config(model_folder / "config.json").name == model_folder.name
    assert resolve_config(str(model_folder)) == resolve(model_folder)
    assert resolve_config("tiny") == resolve("tiny")


def test_an_invalid_path_is_a_model_error():
    for name in ("~nobody-of-that-name/config.json", "x" * 5000 + ".json"):
        with pytest.raises(ModelError):
            resolve_config(name)
