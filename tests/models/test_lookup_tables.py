"""Lookup tables, of which only rows are read, stay in host memory while an adapter is trained on a GPU."""

import ctypes
import gc
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from builders import load_base, make_llama, save_model, silent
from fake_gpu import FakeCuda, simulate
from model_families import large_tables, make_model
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import Gemma4TextConfig

from sebp_edge import Personalizer, Recipe
from sebp_edge.engine.memory.memory_options import FASTEST, MemoryOptions
from sebp_edge.engine.memory.prediction import host_bytes, predict_footprint
from sebp_edge.engine.memory.refusal import refuse_if_too_big
from sebp_edge.engine.memory.setup import TrainingSetup
from sebp_edge.engine.models.architecture import LARGE_TABLE, lookup_tables
from sebp_edge.engine.models.catalog import resolve
from sebp_edge.engine.models.known_models import recall_model
from sebp_edge.engine.models.loading import load_base_model
from sebp_edge.engine.models.model_shape import shape_of
from sebp_edge.engine.models.streaming import move_to_device
from sebp_edge.engine.sparse.rows.buckets import Bucket
from sebp_edge.errors import MachineError
from sebp_edge.machine.locked_memory import lock
from sebp_edge.run.model_in_use import ModelInUse

CUDA, FIRST, META = torch.device("cuda"), torch.device("cuda", 0), torch.device("meta")
LORA, FULL = Recipe.load("notes").replace(r=4), Recipe.load("full")
SMALLEST = [Bucket(1, 1, 1, 1)]


def make_gemma4(**changes):
    sizes = {
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "global_head_dim": 64,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 64,
        "vocab_size_per_layer_input": 320,
        "pad_token_id": 2,
    }
    return make_model(Gemma4TextConfig(**sizes | changes))


@pytest.fixture
def any_size():
    with large_tables(least=1):
        yield


def table_of(model):
    return model.base_model.embed_tokens_per_layer


@pytest.mark.usefixtures("any_size")
@pytest.mark.parametrize("is_tied", [True, False])
def test_embeddings_at_the_models_ends_are_no_tables(is_tied):
    model = make_gemma4(tie_word_embeddings=is_tied)
    assert [each is table_of(model).weight for each in lookup_tables(model)] == [True]
    llama = make_llama(tie_word_embeddings=is_tied)
    assert lookup_tables(llama) == []
    # Two modules with one weight have one table.
    llama.more = nn.ModuleList([nn.Embedding(9, 3), nn.Embedding(9, 3), nn.Embedding(320, 32)])
    llama.more[1].weight, llama.more[2].weight = llama.more[0].weight, llama.get_input_embeddings().weight
    assert [each is llama.more[0].weight for each in lookup_tables(llama)] == [True]


def test_a_small_embedding_is_no_table():
    with META:
        model = make_gemma4(num_hidden_layers=4)
        assert lookup_tables(model) == []
        for rows, found in ((LARGE_TABLE // 256, 1), (LARGE_TABLE // 256 - 1, 0)):
            model.base_model.embed_tokens_per_layer = nn.Embedding(rows, 256)
            assert len(lookup_tables(model)) == found


@pytest.mark.usefixtures("any_size")
@pytest.mark.parametrize("in_4_bits", [False, True])
def test_a_plan_counts_the_table_in_host_memory_exactly(in_4_bits):
    model = make_gemma4().bfloat16()
    table, shape = table_of(model).weight.nbytes, shape_of(model, "some")
    assert 2 * shape.table_parameters == table

    def counted(recipe, *, on_gpu=True, tables=shape.table_parameters, options=FASTEST):
        setup = TrainingSetup(replace(shape, table_parameters=tables), recipe, on_gpu, on_gpu, 2, options)
        return predict_footprint(setup, SMALLEST, [], 0).weights, host_bytes(setup, SMALLEST)

    lora = LORA.replace(load_in_4bit=in_4_bits)
    (weights, host), (all_weights, without) = counted(lora), counted(lora, tables=0)
    assert (all_weights - weights, host - without) == (table, table)
    if not in_4_bits:
        assert weights == sum(each.nbytes for each in model.parameters()) - table
    # Beside streamed blocks, too. Whatever trains all weights, and a CPU, have it where the others are.
    streamed = MemoryOptions(streamed_blocks=4)
    assert counted(lora, options=streamed)[0] == counted(lora, options=streamed, tables=0)[0] - table
    for others in ({"recipe": FULL}, {"recipe": lora, "on_gpu": False}):
        assert counted(**others) == counted(**others, tables=0)


@pytest.mark.parametrize(("name", "least"), [("gemma-4-e2b", 4.6e9), ("gemma-4-e4b", 5.6e9), ("llama-3.2-3b", 0)])
def test_shapes_that_ship_know_their_tables(name, least):
    assert least <= 2 * recall_model(resolve(name)).shape.table_parameters <= 1.05 * least


class Moves(TorchFunctionMode):
    """Stands in for a device: notes what is moved where, and leaves it; reads locked memory.

    Attributes:
        seen: addresses with devices.
    """

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs, given = kwargs or {}, args[1] if len(args) == 2 else (kwargs or {}).get("device")
        if not isinstance(given, torch.device) or given.type == "cpu":
            return function(*args, **kwargs)
        if function is torch.Tensor.to:
            self.seen.add((args[0].data_ptr(), given))
            return args[0]
        if given.type == "cuda" and function is torch.empty:
            return SimpleNamespace(device=FIRST)
        return args[0]._host if function is torch.as_tensor else function(*args, **kwargs)


@pytest.mark.usefixtures("any_size")
def test_a_model_is_moved_without_its_table():
    model, checked = make_gemma4(), []
    with Moves() as moves:
        move_to_device(model, META, 0, None, checked.append)
    assert checked == [*model.base_model.layers]
    others = {*model.parameters(), *model.buffers()} - {table_of(model).weight}
    assert table_of(model).embed_scale in others
    assert moves.seen == {(each.data_ptr(), META) for each in others}


@pytest.mark.usefixtures("any_size")
def test_the_scales_of_a_model_that_is_in_4_bits_already_are_moved_with_it(tmp_path):
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    save_model(make_gemma4(), tmp_path)
    model = load_base(tmp_path, LORA.replace(load_in_4bit=True)).model
    states = [weight.quant_state for weight in model.parameters() if hasattr(weight, "quant_state")]
    with Moves() as moves:
        move_to_device(model, META, 0, None, lambda block: None)
    assert len(states) > 20
    scales = [tensor for each in states for tensor in (each.absmax, each.offset, each.state2.absmax)]
    assert {(each.data_ptr(), META) for each in (*scales, *model.buffers())} <= moves.seen


@pytest.mark.usefixtures("any_size")
def test_on_a_cpu_nothing_changes(tmp_path):
    expected = make_gemma4()
    save_model(expected, tmp_path)
    base = load_base(tmp_path)
    assert base.placed_for is None and not hasattr(table_of(base.model).weight, "is_on_host")
    assert torch.equal(table_of(base.model).weight, table_of(expected).weight)


@pytest.mark.usefixtures("any_size")
def test_a_host_without_room_for_the_table_is_told_so_before_anything_is_loaded(tmp_path, machine):
    model = make_gemma4(vocab_size_per_layer_input=2**15)
    model.config.save_pretrained(tmp_path)
    machine.computes_in(torch.bfloat16)
    machine.has_memory(2**23)  # of the GPU, and of the host
    with pytest.raises(
        MachineError, match=r"lookup tables of .* in host memory they need 17 MB, but 8 MB are free; cho"
    ):
        refuse_if_too_big(resolve(tmp_path), LORA, CUDA)
    machine.has_memory(2**25)
    assert refuse_if_too_big(resolve(tmp_path), LORA, CUDA) == 0


def test_a_model_is_loaded_again_if_its_tables_belong_elsewhere(two_layer_folder):
    used = Personalizer(two_layer_folder, recipe=LORA, device="cpu").in_use
    lora, full = LORA.with_defaults(), FULL.with_defaults()
    base = used.load(silent)
    assert used.load(silent, full) is used.load(silent, lora) is base
    used.base = replace(base, placed_for="lora")
    assert used.load(silent, lora).model is base.model
    assert used.load(silent, full).model is not base.model


def test_blocks_in_host_memory_have_the_same_layers_in_4_bits(tmp_path):
    bitsandbytes = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    save_model(make_gemma4(), tmp_path)

    def layers(number):
        recipe = LORA.replace(load_in_4bit=True)
        model = load_base_model(resolve(tmp_path), recipe, torch.device("cpu"), streamed_blocks=number).model
        return {name for name, layer in model.named_modules() if isinstance(layer, bitsandbytes.nn.Linear4bit)}

    assert "model.per_layer_model_projection" in layers(0)
    assert layers(0) == layers(1)


class Driver:
    """A driver that locks memory, until `free` bytes are locked."""

    def __init__(self, free):
        self.free, self.locked = free, {}

    def cuMemHostAlloc(self, address, size, flags):
        if size.value > self.free:
            return 2
        memory = ctypes.create_string_buffer(size.value)
        self.locked[ctypes.addressof(memory)] = memory
        ctypes.cast(address, ctypes.POINTER(ctypes.c_void_p)).contents.value = ctypes.addressof(memory)
        return 0

    def cuMemFreeHost(self, address):
        del self.locked[address.value]
        return 0


class Gpu(FakeCuda):
    def __init__(self, free):
        self.driver = Driver(free)

    def synchronize(self, device):
        assert device in (CUDA, FIRST)


def test_exactly_the_memory_is_locked_and_freed_with_the_last_tensor(monkeypatch):
    gpu = Gpu(free=10**6)
    simulate(monkeypatch, gpu)
    table = nn.Parameter(lock(3 * 5 * 2, CUDA).view(torch.bfloat16).view(3, 5), requires_grad=False)
    assert [len(each) for each in gpu.driver.locked.values()] == [30]
    table.data.copy_(torch.arange(15).view(3, 5))
    rows = table.detach()[1:]
    del table
    gc.collect()
    assert len(gpu.driver.locked) == 1
    assert rows.flatten().tolist() == [*range(5, 15)]
    del rows
    assert not gpu.driver.locked
    with pytest.raises(MachineError, match=r"The host refuses to lock 2.0 GB of memory for weights .* close other"):
        lock(2 * 10**9, CUDA)


@pytest.mark.usefixtures("any_size")
@pytest.mark.parametrize("in_4_bits", [False, True])
def test_a_model_is_loaded_with_its_table_in_locked_memory(in_4_bits, tmp_path, machine, monkeypatch):
    if in_4_bits:
        pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    save_model(make_gemma4(), tmp_path)
    recipe, ids = LORA.replace(load_in_4bit=in_4_bits), torch.arange(3, 40)[None]
    expected = load_base(tmp_path, recipe)
    machine.computes_in(torch.float32)
    gpu = Gpu(free=10**6)
    simulate(monkeypatch, gpu)
    used = ModelInUse(resolve(tmp_path), recipe, CUDA)
    with Moves() as moves:
        base = used.base = load_base_model(resolve(tmp_path), recipe, CUDA)
    table = table_of(base.model).weight
    assert (base.placed_for, base.in_4bit) == ("lora", in_4_bits)
    assert [*gpu.driver.locked] == [table.data_ptr()]
    assert [len(each) for each in gpu.driver.locked.values()] == [table.nbytes]
    assert table.data_ptr() not in {address for address, _ in moves.seen}
    resident = used.loaded_bytes + table.nbytes
    used.base = expected
    assert resident == used.loaded_bytes
    assert torch.equal(base.model(ids).logits, expected.model(ids).logits)
