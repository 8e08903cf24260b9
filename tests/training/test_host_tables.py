"""A GPU that reads a lookup table from host memory computes what it does with one of its own, and has more room."""

import gc

import pytest
import torch
from builders import make_sentences, save_model
from graph_learners import RECIPE, losses_and_steps, with_adapter
from model_families import large_tables, make_model
from torch import nn
from transformers import Gemma4TextConfig

from sebp_edge import AdapterStore, Personalizer
from sebp_edge.engine.memory.memory_options import FASTEST, MemoryOptions
from sebp_edge.engine.models.catalog import resolve
from sebp_edge.engine.models.generation import generate_text
from sebp_edge.engine.models.loading import load_base_model
from sebp_edge.engine.models.sampling import Sampling
from sebp_edge.machine import devices
from sebp_edge.machine.locked_memory import lock, readable_by_gpu

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)
CHECKPOINTED = MemoryOptions(checkpoints=3, offload=True, chunked_blocks=True, small_buffers=True)
PRECISIONS = pytest.mark.parametrize("in_4_bits", [False, True], ids=["bf16", "4 bits"])
# The table takes 16 MiB in bf16, and all other weights 6.
ROWS, COLUMNS = 2**15, 4 * 64


@pytest.fixture
def folder(tmp_path):
    config = Gemma4TextConfig(
        vocab_size=320,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        global_head_dim=128,
        sliding_window=16,
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_kv_shared_layers=2,
        hidden_size_per_layer_input=COLUMNS // 4,
        vocab_size_per_layer_input=ROWS,
        max_position_embeddings=256,
        pad_token_id=2,
    )
    return save_model(make_model(config).to(torch.bfloat16), tmp_path / "model")


def load(folder, in_4_bits):
    if in_4_bits:
        pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: pip install 'sebp-edge[4bit]'")
    return load_base_model(resolve(folder), RECIPE.replace(load_in_4bit=in_4_bits), torch.device("cuda"))


def table_of(base):
    return base.model.base_model.embed_tokens_per_layer


def test_a_table_reads_what_the_host_holds_in_graphs_too_and_keeps_it():
    values = torch.randn(4096, 512).bfloat16()
    before = torch.cuda.memory_allocated()
    host = lock(values.nbytes, CUDA).view(values.dtype).view(values.shape).copy_(values)
    assert host.is_pinned()
    table, address = nn.Parameter(readable_by_gpu(host, CUDA), requires_grad=False), host.data_ptr()
    assert (table.device, table.data_ptr()) == (CUDA, address)
    assert torch.cuda.memory_allocated() == before
    rows = table.detach().view(torch.int16)
    del host, table
    gc.collect()
    ids = torch.arange(64, device=CUDA)
    with torch.cuda.stream(torch.cuda.Stream()):
        nn.functional.embedding(ids, rows.view(torch.bfloat16))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = nn.functional.embedding(ids, rows.view(torch.bfloat16))
    for some in torch.randint(len(values), (3, len(ids))):
        ids.copy_(some)
        graph.replay()
        assert torch.equal(found.cpu(), values[some])


def test_a_table_is_copied_to_the_host_and_from_it_and_written():
    values = torch.randn(40, 512)
    table = readable_by_gpu(lock(values.nbytes, CUDA).view(values.dtype).view(values.shape), CUDA)
    table.copy_(values)
    assert torch.equal(table.to("cpu", copy=True), values)
    table[5] = 0
    assert not table[5].any() and torch.equal(table[6:].cpu(), values[6:])


@PRECISIONS
def test_loading_never_puts_the_table_on_the_gpu(folder, in_4_bits):
    load(folder, in_4_bits)  # libraries' own memory
    gc.collect()
    devices.release_memory(CUDA)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with large_tables(least=ROWS * COLUMNS):
        base = load(folder, in_4_bits)
    table = table_of(base)
    others = sum(each.numel() for each in base.model.parameters() if each is not table.weight)
    assert torch.cuda.max_memory_allocated() - before < 2 * others + 2**21 < table.weight.nbytes
    assert table.weight.is_cuda and base.in_4bit == in_4_bits and base.placed_for == "lora"
    ids = torch.arange(0, ROWS, 77, device=CUDA)
    assert torch.equal(table(ids), table_of(load(folder, in_4_bits))(ids))


@PRECISIONS
@pytest.mark.parametrize(
    ("options", "with_graphs"), [(FASTEST, True), (CHECKPOINTED, True), (CHECKPOINTED, False)], ids=str
)
def test_steps_are_those_of_a_resident_table_bit_for_bit(folder, in_4_bits, options, with_graphs):
    expected = losses_and_steps(load(folder, in_4_bits), options, with_graphs=with_graphs)
    with large_tables(least=ROWS * COLUMNS):
        base = load(folder, in_4_bits)
        found = losses_and_steps(base, options, with_graphs=with_graphs)
    assert base.placed_for == "lora"
    assert all(map(torch.equal, found, expected))


def test_replies_are_those_of_a_resident_table(folder):
    def reply():
        base = load(folder, False)
        adaptation = with_adapter(base)
        text = generate_text(base.model, base.tokenizer, [5, 6, 7], [], Sampling(max_new_tokens=8, temperature=0))
        adaptation.detach()
        return text

    expected = reply()
    with large_tables(least=ROWS * COLUMNS):
        assert reply() == expected


@pytest.mark.slow
@pytest.mark.fills_gpu
def test_an_adaptation_stays_within_a_plan_without_the_table(folder, tmp_path):
    texts = make_sentences(30, words=60)
    recipe = RECIPE.replace(batch_tokens=500, epochs=1, context_length=128)
    options = {"recipe": recipe, "device": "cuda", "store": AdapterStore(tmp_path / "store")}
    with large_tables(least=ROWS * COLUMNS):
        personalizer = Personalizer(folder, memory_budget="20GB", **options)
        plan, result = personalizer.plan(texts), personalizer.adapt(texts)
        assert personalizer.in_use.base.placed_for == "lora"
        assert personalizer.in_use.loaded_bytes < 2 * ROWS * COLUMNS < plan.chosen.host_memory
        assert result.peak_memory_bytes <= result.predicted_peak_bytes
        assert personalizer.generate("the ferry", max_new_tokens=4, seed=1)
