"""What is known of models and of this machine without torch is what torch finds: shapes, tokens of any text, plans."""

import json
import os
import random
import subprocess
import sys
from dataclasses import asdict, replace

import pytest
import torch
from command import records, run
from known_shapes import references
from model_families import MODELS, WITH_STATES

from sebp_edge import Personalizer
from sebp_edge.basics.files import parse_dataclass
from sebp_edge.basics.stopping import StopSignal
from sebp_edge.engine.memory.known_machine import recall_machine, remember_machine
from sebp_edge.engine.memory.shape_reader import read_shape
from sebp_edge.engine.memory.target import Target
from sebp_edge.engine.memory.this_machine import keep_device, target_of
from sebp_edge.engine.models.catalog import CATALOG, resolve
from sebp_edge.engine.models.four_bits import has_bitsandbytes
from sebp_edge.engine.models.hub_cache import cache_of_the_hub
from sebp_edge.engine.models.known_models import BUNDLED, recall_model, remember_model
from sebp_edge.engine.models.loading import local_tokenizer
from sebp_edge.engine.models.shape import DecoderShape
from sebp_edge.errors import AdapterError
from sebp_edge.events import silent
from sebp_edge.machine.process import memory_of
from sebp_edge.recipe import Recipe
from sebp_edge.run.call import Call
from sebp_edge.run.conditions import Conditions, NotKnown
from sebp_edge.run.job import JobSink
from sebp_edge.run.preparation import Preparation
from sebp_edge.store.adapter_store import AdapterStore
from sebp_edge.store.saved import refuse_truncated

CPU = torch.device("cpu")


def call_for(model, folder, budget=None):
    recipe, store, job = Recipe.load(None), AdapterStore(folder), JobSink(silent)
    return Call(resolve(model), False, recipe, 0, store, (), budget, job, StopSignal())


def random_text(number):
    """Returns words of several scripts, emoji, blanks, and tokens that are spelled out."""
    draw = random.Random(number)
    pieces = ["note", "Ärger", " ", "\n\n", "\t", "山", "🙂🏽", "é", "1234567", "a\u0301", "\u200b", "x" * 40]
    return "".join(draw.choices([*pieces, "<|eos|>", "<|user|>"], k=draw.randrange(1, 200)))


@pytest.mark.slow
@pytest.mark.parametrize("name", references())
def test_the_shapes_that_ship_are_those_that_torch_reads(name):
    """`python tests/helpers/known_shapes.py` writes them."""
    known = json.loads(BUNDLED.read_text())["shapes"]
    assert set(known) == set(references())
    shape = read_shape(references()[name])
    assert replace(parse_dataclass(known[name], DecoderShape), name=shape.name) == shape


def test_the_models_with_short_names_are_known():
    for name in CATALOG:
        known = recall_model(resolve(name))
        assert known.shape.name == name
        assert abs(known.shape.parameters / 1e9 - CATALOG[name].parameters) < 0.001


@pytest.mark.parametrize("family", MODELS | WITH_STATES)
def test_a_shape_survives_json(family, tmp_path):
    (MODELS | WITH_STATES)[family]().config.save_pretrained(tmp_path)
    shape = read_shape(resolve(tmp_path))
    assert parse_dataclass(json.loads(json.dumps(asdict(shape))), DecoderShape) == shape


@pytest.mark.slow
def test_a_tokenizer_gives_the_tokens_of_transformers(model_folder):
    folder = resolve(model_folder)
    assert recall_model(folder) is None
    remember_model(folder, read_shape(folder), local_tokenizer(folder))
    for reference in (folder, resolve("tiny")):
        known, own = recall_model(reference).tokenizer, local_tokenizer(reference)
        assert recall_model(reference).shape == read_shape(reference)
        for name in ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "special_tokens_map", "is_fast"):
            assert getattr(known, name) == getattr(own, name)
        added = [
            {number: (str(token), token.special) for number, token in one.added_tokens_decoder.items()}
            for one in (known, own)
        ]
        assert added[0] == added[1]
        assert bool(known.chat_template) == bool(own.chat_template)
        for number in range(60):
            text, options = (
                random_text(number),
                {"split_special_tokens": number % 2 == 0, "add_special_tokens": number % 3 == 0},
            )
            left, right = (one(text, return_offsets_mapping=True, **options) for one in (known, own))
            assert left["input_ids"] == right["input_ids"]
            assert left["offset_mapping"] == right["offset_mapping"]
            assert left.word_ids() == right.word_ids()
            ids = left["input_ids"]
            assert known.decode(ids, skip_special_tokens=False) == own.decode(ids, skip_special_tokens=False)
        texts = [random_text(number) for number in range(5)]
        assert known(texts)["input_ids"] == own(texts)["input_ids"]


def test_a_plan_without_torch_is_the_plan_with_it(model_folder, notes_folder, tmp_path):
    """But for the memory that is free just then."""
    one = Personalizer(model_folder, device="cpu", store=tmp_path / "store", memory_budget="4GB")
    plan = one.plan(notes_folder)
    with pytest.raises(NotKnown):
        Conditions.known(one.reference, "cpu", 0, one.memory_budget)
    remember_model(one.reference, read_shape(one.reference), local_tokenizer(one.reference))
    target = target_of(CPU, plan.chosen.footprint.context)
    remember_machine({"cpu": target})
    call = call_for(model_folder, tmp_path / "store", budget=one.memory_budget)
    conditions = Conditions.known(one.reference, "cpu", 0, one.memory_budget)
    known = Preparation(*call.with_texts(notes_folder)).plan(conditions).plan
    assert known.chosen.footprint == plan.chosen.footprint
    assert replace(known.chosen, seconds=None) == replace(plan.chosen, seconds=None)
    assert known.chosen.seconds == pytest.approx(plan.chosen.seconds)  # a process measures once


@pytest.mark.slow
@pytest.mark.parametrize("command", ["inspect", "plan"])
def test_an_inspection_and_a_plan_on_a_known_machine_need_no_torch(own_home, notes_folder, command):
    remember_machine({"cpu": target_of(CPU, 10**8)})
    code = (
        "import sys; from contextlib import suppress; from sebp_edge.cli import main\n"
        "with suppress(SystemExit): main()\n"
        "print([name for name in ('torch', 'transformers', 'huggingface_hub', 'peft') if name in sys.modules])"
    )
    options = [command, notes_folder, "--device", "cpu"]
    done = subprocess.run([sys.executable, "-c", code, *options], capture_output=True, text=True)
    assert (done.stdout.splitlines()[-1], done.stderr) == ("[]", "")
    assert ", about " in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("command", ["inspect", "plan"])
def test_an_inspection_and_a_plan_keep_what_the_next_one_needs(own_home, notes_folder, model_folder, command):
    """And both times the same is printed, but for times and the memory that this process uses already."""
    printed = []
    for _ in range(2):
        known = recall_model(resolve(model_folder)) is not None, recall_machine("cpu")[0].rate is not None
        assert known == (bool(printed),) * 2
        result = run(command, notes_folder, "--model", model_folder, "--device", "cpu", "--memory", "4GB", "--json")
        assert result.exit_code == 0, result.output
        events = records(result.stdout)
        found = events[-1]
        plan = found.pop("plan") if command == "inspect" else found
        chosen = [plan[name] for name in ("model", "device", "budget", "r", "dtype", "max_rows", "checkpoints")]
        of_this_process = {"job", "time", "summary"}
        if command == "inspect":
            chosen.append({name: value for name, value in found.items() if name not in of_this_process})
        printed.append([chosen, [each["event"] for each in events]])
    assert printed[0] == printed[1]


def test_what_was_remembered_of_other_versions_or_files_is_not_used(own_home, model_folder, monkeypatch):
    reference = resolve(model_folder)
    remember_model(reference, read_shape(reference), local_tokenizer(reference))
    remember_machine({"cpu": target_of(CPU, memory_of(CPU).planned_overhead(0))})
    assert recall_model(reference) is not None
    assert recall_machine("cpu")[0].rate is not None
    for module in ("models.known_models", "memory.known_machine"):
        monkeypatch.setattr(f"sebp_edge.engine.{module}.version", lambda package: "0.0")
    assert recall_model(reference) is None
    assert recall_machine("cpu")[0].rate is None


def test_a_seed_that_is_none_is_refused_on_a_known_machine_too(own_home, notes_folder):
    refused = []
    for _ in range(2):
        refused.append(run("inspect", notes_folder, "--seed", -1, "--device", "cpu"))
        keep_device(CPU)
    assert [each.exit_code for each in refused] == [refused[0].exit_code] * 2 and refused[0].exit_code != 0
    assert refused[0].stderr == refused[1].stderr != ""


def test_a_busy_moment_does_not_make_a_device_slow(own_home):
    target = target_of(CPU, 10**8)
    for rate, kept in ((2e9, 2e9), (1e9, 2e9), (3e9, 3e9)):
        remember_machine({"cpu": replace(target, rate=rate)})
        assert recall_machine("cpu")[0].rate == kept


@pytest.mark.parametrize("content", ["", "{", "[]", '{"devices": 5}', '{"versions": 1, "devices": {"cpu": []}}'])
def test_damaged_memories_are_not_used(content, own_home, model_folder):
    reference = resolve(model_folder)
    remember_model(reference, read_shape(reference), local_tokenizer(reference))
    remember_machine({"cpu": target_of(CPU, 1)})
    for path in (own_home / "cache" / "sebp-edge").rglob("*.json"):
        path.write_text(content)
    assert recall_model(reference) is None
    assert recall_machine("cpu")[0].rate is None


def test_a_gpu_is_known_with_what_is_free_on_it_now(tmp_path, monkeypatch):
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho GPU-aa-1, 700\necho GPU-aa-2, 20000\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert recall_machine(None) is None  # torch must say what it can do with it
    target = Target("cuda", "bfloat16", True, has_bitsandbytes(), 1e14, 10**9, host=5.0)
    remember_machine({"cuda": target, "default": target}, "aa-2")
    found, free = recall_machine(None)
    assert replace(found, host=5.0) == target
    assert (found.host > 10**6, free) == (True, 20000 * 2**20)
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho GPU-aa-1, 700\n")
    assert recall_machine(None) is None  # it was taken out


def test_a_damaged_adapter_is_recognised_by_its_size(tmp_path):
    file = tmp_path / "adapter_model.safetensors"
    header = json.dumps({"one": {"dtype": "F32", "shape": [5], "data_offsets": [0, 20]}}).encode()
    whole = len(header).to_bytes(8, "little") + header + bytes(20)
    file.write_bytes(whole)
    refuse_truncated(tmp_path)
    for damaged in (whole[:-1], whole[:9], b"", whole + b"1", b"\xff" * 30):
        file.write_bytes(damaged)
        with pytest.raises(AdapterError, match="is damaged"):
            refuse_truncated(tmp_path)


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"HF_HOME": "~/models"},
        {"HF_HUB_CACHE": "$HOME/a"},
        {"HUGGINGFACE_HUB_CACHE": "/b"},
        {"XDG_CACHE_HOME": "/c"},
    ],
)
def test_the_cache_is_where_the_hubs_client_has_it(variables, monkeypatch):
    for name in ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    code = "from huggingface_hub import constants; print(constants.HF_HUB_CACHE)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert str(cache_of_the_hub()) == said
