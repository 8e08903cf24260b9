"""Damaged or hostile adapters, models and records: each is refused with one sentence of the right error class."""

import json
import os
import random
import shutil
import signal
import sys
from contextlib import contextmanager

import pytest
from builders import attach, load_adapter, load_base, make_llama, make_tokenizer, save_model, shape_of, unchanged
from command import python, run, start
from pace import at_most
from safetensors.torch import load_file, save_file
from stored_adapter import RECORD, FakeAdaptation
from transformers import AutoModelForCausalLM, GPT2Config

from formats.damage import damage
from sebp_edge import AdapterRecord, AdapterStore, Recipe
from sebp_edge.errors import AdapterError, ModelError, SebpEdgeError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs pipes, devices and signals of Linux")

RECIPE = Recipe.load("notes").replace(r=4)
SECONDS = 20


class Hangs(BaseException): ...


@pytest.fixture(autouse=True)
def no_hanging():
    """Ends a test that hangs."""

    def end(*_):
        raise Hangs

    before = signal.signal(signal.SIGALRM, end)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@contextmanager
def one_sentence(kinds, *case):
    """Context that succeeds, or raises one sentence of these error classes."""
    signal.alarm(SECONDS)
    try:
        yield
    except SebpEdgeError as error:
        assert isinstance(error, kinds), (case, error)
        assert "\n" not in str(error), case
        assert len(str(error)) < 500, case
    except BaseException as error:
        pytest.fail(f"{case}: {error!r}")
    finally:
        signal.alarm(0)


@pytest.fixture(scope="module")
def saved(tmp_path_factory, two_layer_folder):
    """A base model, and the folder of an adapter of each method."""
    base, folders = load_base(two_layer_folder, RECIPE), {}
    for method in ("lora", "full"):
        folders[method] = tmp_path_factory.mktemp("saved") / method
        folders[method].mkdir()
        adaptation = attach(base, RECIPE.replace(method=method), seed=0)
        adaptation.save(folders[method])
        adaptation.detach()
    return base, folders


@pytest.fixture
def adapter(saved, tmp_path):
    """The base model, and the folder of a LoRA adapter that may be damaged."""
    return saved[0], shutil.copytree(saved[1]["lora"], tmp_path / "adapter")


FILES = {"lora": ["adapter_config.json", "adapter_model.safetensors"], "full": ["model.safetensors"]}


@pytest.mark.slow
@pytest.mark.parametrize("method", FILES)
def test_a_damaged_adapter_is_refused_and_leaves_the_base_model_unchanged(saved, method, tmp_path):
    base, folders = saved
    draw, loaded = random.Random(0), 0
    for number in range(20):
        folder = shutil.copytree(folders[method], tmp_path / str(number))
        file = draw.choice(FILES[method])
        how = damage(folder / file, draw)
        with unchanged(base.model), one_sentence(AdapterError, number, file, how):
            load_adapter(base, folder).detach()
            loaded += 1
    assert 0 < loaded < 10


@pytest.mark.slow
def test_a_damaged_model_is_refused_with_one_sentence(two_layer_folder, tmp_path):
    gpt2 = tmp_path / "gpt2"
    AutoModelForCausalLM.from_config(
        GPT2Config(vocab_size=320, n_embd=32, n_layer=2, n_head=4, n_positions=128)
    ).save_pretrained(gpt2)
    make_tokenizer().save_pretrained(gpt2)
    draw, loaded = random.Random(0), 0
    for number in range(12):
        folder = shutil.copytree(draw.choice([two_layer_folder, gpt2]), tmp_path / str(number))
        file = draw.choice(["config.json", "model.safetensors", *(path.name for path in sorted(folder.iterdir()))])
        how = damage(folder / file, draw)
        with one_sentence(ModelError, number, file, how):
            shape_of(folder)
        with one_sentence(SebpEdgeError, number, file, how):
            load_base(folder, RECIPE).tokenizer("the ferry")
            loaded += 1
    assert 0 < loaded < 8


@pytest.mark.slow
def test_a_damaged_record_is_refused_and_other_adapters_stay_listed():
    draw, store = random.Random(0), AdapterStore()
    for number in range(8):
        shutil.rmtree(store.folder, ignore_errors=True)
        for name in ("one", "other"):
            store.adapter(name).save(FakeAdaptation(), AdapterRecord(**RECORD), activate=True)
        file = draw.choice(["1/sebp_edge.json", "1/sebp_edge.json", "active"])
        how = damage(store.folder / "one" / file, draw)
        for command in (["list"], ["show", "one"], ["remove", "one", "--yes"]):
            signal.alarm(SECONDS)
            result = run("adapters", *command)
            signal.alarm(0)
            case = (number, file, how, command, result.output, result.exception)
            assert result.exception is None or isinstance(result.exception, SystemExit), case
            assert not result.exit_code or result.stderr.startswith("sebp-edge: "), case
            assert not result.exit_code or result.stderr.count("\n") == 1, case
            assert "other" in result.stdout or command != ["list"], case
            assert "\x1b" not in result.output, case
        assert store.names() == ["other"]


# -------------------------------------------------------------------------------------------------- single cases


def test_nan_in_an_adapter_is_reported_with_its_file_and_tensor(adapter):
    base, folder = adapter
    path = folder / "adapter_model.safetensors"
    weights = load_file(path)
    name = sorted(weights)[5]
    weights[name][1, 1] = float("nan")
    save_file(weights, path)
    with pytest.raises(
        AdapterError, match=f"'adapter' contains NaN or infinity, in the tensor '{name}' of adapter_model.safetensors"
    ):
        load_adapter(base, folder)


@pytest.mark.parametrize("shards", [1, 4])
@pytest.mark.parametrize("recipe", [RECIPE, RECIPE.replace(load_in_4bit=True)], ids=["16 bits", "4 bits"])
def test_nan_in_a_base_model_is_reported_with_its_file_and_tensor(tmp_path, shards, recipe):
    if recipe.load_in_4bit:
        pytest.importorskip("bitsandbytes")
    model = make_llama(hidden_size=64, intermediate_size=128)
    model.model.layers[1].mlp.up_proj.weight.data[3, 5] = float("inf")
    save_model(model, tmp_path / "m", max_shard_size="1GB" if shards == 1 else "100KB")
    assert len(list((tmp_path / "m").glob("*.safetensors"))) >= shards // 2
    with pytest.raises(
        ModelError,
        match=r"'m' contains NaN or infinity, in the tensor 'model\.layers\.1\.mlp\.up_proj\.weight' of "
        r"model.*\.safetensors; download it again",
    ):
        load_base(tmp_path / "m", recipe)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora_alpha": 1e300}, r"has lora_alpha 1e\+300; it must be above 0 and at most 1048576"),
        ({"lora_alpha": 0}, "has lora_alpha 0; it must be above 0"),
        ({"use_rslora": True}, "sets use_rslora; sebp-edge loads only plain LoRA adapters without it"),
        ({"init_lora_weights": "olora"}, "sets init_lora_weights"),  # which changes the base model's weights
        ({"target_modules": "(a+)+$"}, "is damaged"),
        ({"target_modules": ["norm", "q_proj"]}, "was made for another base model"),
        ({"r": True}, "is damaged"),
    ],
)
def test_settings_other_than_plain_lora_are_refused_and_leave_no_layer(adapter, changes, message):
    base, folder = adapter
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with unchanged(base.model), pytest.raises(AdapterError, match=message):
        load_adapter(base, folder)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"r": 10**6}, {"r": 2**31}, {"target_modules": [f"q{n}" for n in range(10**6)]}])
def test_absurd_numbers_allocate_no_memory(saved, two_layer_folder, tmp_path, changes):
    folder = shutil.copytree(saved[1]["lora"], tmp_path / "adapter")
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    code = """
import resource, sys, torch
from sebp_edge.engine.models.adaptation import load
from sebp_edge.engine.models.catalog import resolve
from sebp_edge.engine.models.loading import load_base_model
from sebp_edge.recipe import Recipe
from pathlib import Path
base = load_base_model(resolve(sys.argv[1]), Recipe.load("notes"), torch.device("cpu"))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    load(base, Path(sys.argv[2]))
except Exception as error:
    print(type(error).__name__, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""
    words = python(code, two_layer_folder, folder).split()
    assert words[0] == "BaseModelMismatch"
    assert int(words[1]) < (50 if "r" in changes else 500)  # MB


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 10**6}, r"config of 'model' has num_hidden_layers 1e\+06; expected at most 2000"),
        ({"num_labels": 3 * 10**6}, r"has num_labels 3e\+06; expected at most 2000\."),
        ({"hidden_size": 2**15}, "has 26.4 million weights, but its safetensors files have only 0 MB"),
    ],
)
def test_a_config_that_would_take_too_much_time_or_memory_is_refused_at_once(
    two_layer_folder, tmp_path, changes, message
):
    folder = shutil.copytree(two_layer_folder, tmp_path / "model")
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with at_most(5), pytest.raises(ModelError, match=message):
        load_base(folder)


@pytest.mark.parametrize("file", ["tokenizer.json", "model.safetensors", "generation_config.json"])
def test_a_pipe_in_a_models_folder_is_refused_without_waiting(two_layer_folder, tmp_path, file):
    folder = shutil.copytree(two_layer_folder, tmp_path / "model")
    (folder / file).unlink()
    os.mkfifo(folder / file)
    signal.alarm(SECONDS)
    with pytest.raises(ModelError, match=f"The folder of the model 'model' contains a pipe or a device: '{file}'"):
        load_base(folder)


@pytest.mark.slow
def test_an_unreadable_adapter_is_reported_and_the_others_are_listed():
    """Runs in processes without root's permission to read every file."""
    store = AdapterStore()
    for name in ("closed", "open"):
        store.adapter(name).save(FakeAdaptation(), AdapterRecord(**RECORD), activate=True)
    closed = store.folder / "closed"
    closed.chmod(0)
    # The third version of capset; no capability is effective, permitted or inheritable.
    code = """
import ctypes
assert ctypes.CDLL(None).capset((ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()) == 0
from sebp_edge.cli import main
main()
"""
    results = []
    for arguments in (["adapters", "list"], ["adapters", "show", "closed"], ["generate", "x", "--name", "closed"]):
        with start([code, *arguments]) as one:
            output, errors = one.communicate(timeout=60)
            results.append((one.returncode, output, errors))
    closed.chmod(0o700)
    (returned, output, errors), *others = results
    assert returned == 0
    assert "open" in output
    assert "note: Cannot read the adapter in" in errors
    for returned, _, errors in others:
        assert returned == 1
        assert "Permission denied" in errors
        assert "Traceback" not in errors
