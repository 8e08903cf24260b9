"""What bad input gets: one sentence, a non-zero exit code, nothing overwritten and nothing left behind."""

import errno
import json
import math
import random
import shutil
import signal
import threading

import pytest
from command import assert_one_sentence, halted, records, run
from export_sources import make_source
from safetensors.torch import load_file, save_file

from sebp_edge import AdapterStore, Personalizer
from sebp_edge.errors import BusyError, Interrupted, StorageError
from sebp_edge.events import ExamplesEvaluated, TensorWritten
from sebp_edge.export import model_weights

# The path of a file in a temporary folder.
WRITING = r"/\.making-\w+/"


@pytest.fixture
def model(made, tmp_path):
    return shutil.copytree(made / "model", tmp_path / "model")


@pytest.fixture
def stored(made, own_data_folder):
    """The adapter "mine" in the store."""
    shutil.copytree(made / "adapter", own_data_folder / "mine" / "1")
    (own_data_folder / "mine" / "active").write_text("1")
    return AdapterStore()


@pytest.fixture
def place(tmp_path):
    """An empty folder to export into."""
    folder = tmp_path / "place"
    folder.mkdir()
    return folder


def export(model, *arguments):
    return run("export", "mine", "--model", model, *arguments)


@pytest.mark.slow
def test_the_command_exports_into_missing_folders_of_strange_names(stored, model, place):
    target = place / "new" / "er" / "ø – “a b” $HOME"
    result = export(model, "--to", target, "--format", "ollama", "--quant", "q4_0")
    assert result.exit_code == 0, result.output
    assert {path.name for path in target.iterdir()} == {"mine-q4_0.gguf", "Modelfile"}
    assert "ollama create NAME -f Modelfile" in result.stdout
    assert [path.name for path in (place / "new" / "er").iterdir()] == [target.name]


@pytest.mark.slow
def test_json_ends_with_the_result(stored, model, place, no_memory):
    result = export(model, "--to", place / "out", "--format", "peft", "--json")
    events = records(result.stdout)
    assert events[-1]["event"] == "result" and events[-1]["path"] == str(place / "out")
    assert "tensor_written" in {event["event"] for event in events}


@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_an_existing_target_is_refused(stored, model, place, kind):
    target = place / "out"
    {"folder": target.mkdir, "file": target.touch, "link": lambda: target.symlink_to(place / "nowhere")}[kind]()
    assert_one_sentence(export(model, "--to", target), "already exists", 2)
    assert [path.name for path in place.iterdir()] == ["out"]
    assert not target.is_dir() or not list(target.iterdir())


@pytest.mark.parametrize(
    ("arguments", "words", "exit_code"),
    [
        (["--format", "gg"], "no format 'gg'; did you mean", 2),
        (["--quant", "q4"], "no quantisation 'q4'; did you mean", 2),
        (["--format", "peft", "--quant", "q4_0"], "'peft' is not quantised", 2),
        (["--quant", "smallest"], "give the texts", 2),
        (["--version", "7"], "has no version 7", 1),
        (["--texts", "/nowhere"], "nowhere", 1),
    ],
)
def test_invalid_options_are_refused(stored, model, place, arguments, words, exit_code):
    assert_one_sentence(export(model, "--to", place / "out", *arguments), words, exit_code)
    assert not list(place.iterdir())


@pytest.mark.parametrize("name", ["nobody", "../mine", "con", "a" * 200, "./mine"])
def test_strange_names_are_refused(stored, model, place, name):
    assert_one_sentence(run("export", name, "--model", model, "--to", place / "out"), "adapter")
    assert not list(place.iterdir())


@pytest.mark.parametrize(
    "to", ["x" * 300, "missing/" + "x" * 300, "~nobody-of-that-name/out", "file/out", "link/a/out"]
)
def test_targets_that_cannot_be_made_are_refused_before_the_model_is_loaded(stored, model, place, to):
    (model / "model.safetensors").unlink()  # so that loading it would be another sentence
    (place / "file").touch()
    (place / "link").symlink_to(place / "nowhere")
    result = export(model, "--to", to if to.startswith("~") else place / to)
    assert_one_sentence(result, "is not a folder|Cannot export|unknown user", result.exit_code)
    assert result.exit_code in (1, 2)
    assert {path.name for path in place.iterdir()} == {"file", "link"}


def test_another_bases_adapter_is_refused(stored, tmp_path, place):
    other = make_source(tmp_path / "other", "llama")
    weights = {name: weight + 1 for name, weight in load_file(other / "model.safetensors").items()}
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    assert_one_sentence(export(other, "--to", place / "out"), "was made for model, not for these weights of other")
    assert not list(place.iterdir())


@pytest.mark.parametrize(
    ("file", "format"),
    [("adapter_model.safetensors", "peft"), ("adapter_config.json", "peft"), ("sebp_edge.json", "gguf")],
)
def test_a_damaged_adapter_is_refused_and_leaves_no_new_folder(stored, model, place, file, format):
    path = stored.folder / "mine" / "1" / file
    path.write_bytes(path.read_bytes()[:-40])
    assert_one_sentence(export(model, "--to", place / "new" / "out", "--format", format), "damaged|cannot be read")
    assert not list(place.iterdir())


def test_a_damaged_base_model_is_refused(stored, model, place):
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-40])
    assert_one_sentence(export(model, "--to", place / "out"), "no weights that can be read")
    assert not list(place.iterdir())


def test_an_adapter_with_other_layers_is_refused(stored, model, place):
    path = stored.folder / "mine" / "1" / "adapter_model.safetensors"
    weights = {name.replace("q_proj", "query"): weight for name, weight in load_file(path).items()}
    save_file(weights, path)
    assert_one_sentence(export(model, "--to", place / "out"), "made for other layers")


def test_a_disk_without_space_is_refused_before_anything_is_written(stored, model, mount_disk):
    place = mount_disk("16k")
    assert_one_sentence(export(model, "--to", place / "out"), "The export needs .* but only")
    assert not list(place.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("format", ["gguf", "merged", "peft"])
def test_a_disk_that_fills_up_leaves_nothing(stored, model, mount_disk, monkeypatch, format):
    disk = mount_disk("64k")
    monkeypatch.setattr("sebp_edge.export.exporter.check_space", lambda *_: None)
    assert_one_sentence(export(model, "--to", disk / "out", "--format", format), "Cannot export to")
    assert not list(disk.iterdir())


@pytest.mark.slow
def test_ctrl_c_leaves_nothing(stored, model, place):
    arguments = ("export", "mine", "--model", model, "--to", place / "out", "--json")
    with halted("open", WRITING, *arguments) as one:
        assert list(place.iterdir())
        one.send_signal(signal.SIGINT)
        one.send_signal(signal.SIGCONT)
        output, errors = one.communicate(timeout=60)
    assert one.returncode == 130
    assert errors == "sebp-edge: Interrupted; nothing was changed.\n"
    assert records(output)[-1]["error"] == "Interrupted"
    assert not list(place.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("at", [("os.rmdir", r"/\.making-\w+$"), ("open", WRITING)], ids=["checks", "writes"])
def test_the_next_export_deletes_what_a_killed_one_has_left_but_not_what_one_in_progress_has(stored, model, place, at):
    def start(name, at=("open", WRITING)):
        return halted(*at, "export", "mine", "--model", model, "--to", place / name)

    def temporary():
        return sorted(path.name for path in place.iterdir() if path.is_dir() and path.name.startswith("."))

    with start("killed", at) as killed:
        (left,) = temporary()
        with start("in progress") as running:
            try:
                assert left in temporary() and len(temporary()) == 2
                killed.kill()
                killed.wait()
                assert export(model, "--to", place / "next", "--format", "peft").exit_code == 0
                assert len(temporary()) == 1 and left not in temporary()
            finally:
                running.send_signal(signal.SIGCONT)
            running.communicate(timeout=60)
        assert running.returncode == 0
    assert sorted(path.name for path in place.iterdir()) == ["in progress", "next"]


@pytest.mark.slow
def test_a_disk_without_locks_is_exported_to(stored, model, place, monkeypatch, no_memory):
    def refuse(descriptor, blocking):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("sebp_edge.store.new_folder.lock_descriptor", refuse)
    assert export(model, "--to", place / "out", "--format", "peft").exit_code == 0
    assert [path.name for path in place.iterdir()] == ["out"]


@pytest.mark.parametrize("when", [1, "read back"])
def test_a_stop_leaves_nothing_and_the_next_call_works(stored, model, place, when):
    event = threading.Event()

    def sink(each):
        if isinstance(each, TensorWritten) and each.tensor == (each.tensors if when == "read back" else when):
            event.set()

    personalizer = Personalizer(model, device="cpu", store=stored, on_event=sink)
    with pytest.raises(Interrupted):
        personalizer.export("mine", place / "out", stop_when=event)
    assert not list(place.iterdir())
    assert personalizer.generate("the ferry", max_new_tokens=2) is not None


class Looks(threading.Event):
    """A stop that is set from a look at it on."""

    def __init__(self, at):
        super().__init__()
        self.at, self.number = at, 0

    def is_set(self):
        self.number += 1
        return self.number >= self.at


@pytest.mark.slow
def test_an_export_is_stopped_within_each_pass_of_its_comparison(stored, model, place):
    """Within a large model's pass, and not only after it: before each linear layer of each block."""
    looks, passes = Looks(math.inf), []

    def sink(event):
        if isinstance(event, ExamplesEvaluated):
            passes.append(looks.number)

    personalizer = Personalizer(model, device="cpu", store=stored, on_event=sink)
    personalizer.export("mine", place / "out", format="merged", stop_when=looks)
    layers = 7 * json.loads((model / "config.json").read_text())["num_hidden_layers"]
    between = [second - first for first, second in zip([0, *passes], passes, strict=False)]
    assert len(passes) >= 3 and min(between) >= layers
    at = random.randrange(1, layers * len(passes))  # there are more, some of them by the clock
    with pytest.raises(Interrupted):
        personalizer.export("mine", place / "again", format="merged", stop_when=Looks(at))
    assert [path.name for path in place.iterdir()] == ["out"], at


@pytest.mark.slow
def test_the_adapter_in_use_stays_in_use(stored, model, place):
    personalizer = Personalizer(model, device="cpu", store=stored)
    options = {"max_new_tokens": 8, "temperature": 0}
    text = personalizer.generate("the ferry left", adapter="mine", **options)
    personalizer.export("mine", place / "out", format="merged")
    assert personalizer.generate("the ferry left", **options) == text


@pytest.mark.slow
def test_meanwhile_another_call_is_refused_and_a_target_that_appears_is_not_overwritten(stored, model, place):
    def sink(event):
        if isinstance(event, TensorWritten) and event.tensor == 1:
            with pytest.raises(BusyError):
                personalizer.generate("x")
            (place / "out").mkdir()
            (place / "out" / "theirs").write_text("theirs")

    personalizer = Personalizer(model, device="cpu", store=stored, on_event=sink)
    with pytest.raises(StorageError, match="already exists; nothing was overwritten"):
        personalizer.export("mine", place / "out", format="peft")
    assert [path.name for path in place.iterdir()] == ["out"]
    assert (place / "out" / "theirs").read_text() == "theirs"


@pytest.mark.parametrize(("format", "is_written"), [("merged", False), ("peft", True)])
def test_an_adapter_of_files_that_name_weights_otherwise_is_exported_by_itself(
    stored, model, place, no_memory, monkeypatch, format, is_written
):
    monkeypatch.setattr(model_weights, "_of_text", lambda name: f"packed.{name}")
    result = run("export", "mine", "--model", model, "--to", place / "out", "--format", format)
    assert (place / "out").exists() == is_written
    if not is_written:
        assert_one_sentence(result, "name or shape weights otherwise than transformers does; only --format peft")
