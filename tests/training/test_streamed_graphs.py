"""On a GPU, blocks streamed from host memory give the gradients of resident ones, in graphs and within the plan."""

import pytest
import torch
from builders import make_llama, make_sentences, save_model
from graph_learners import RECIPE, losses_and_steps
from model_families import OF_NO_KNOWN_KIND, make_of_no_known_kind

from sebp_edge import AdapterStore, Personalizer
from sebp_edge.engine.memory.memory_options import FASTEST, MemoryOptions
from sebp_edge.engine.models.catalog import resolve
from sebp_edge.engine.models.loading import load_base_model
from sebp_edge.machine import devices

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)
SIZES = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 5, "tie_word_embeddings": False}
CHECKPOINTED = MemoryOptions(checkpoints=4, offload=True, chunked_blocks=True, small_buffers=True)
PRECISIONS = pytest.mark.parametrize("in_4_bits", [False, True], ids=["bf16", "4 bits"])


@pytest.fixture
def folder(tmp_path):
    return save_model(make_llama(attention_bias=True, **SIZES).to(torch.bfloat16), tmp_path / "model")


def needs_bitsandbytes():
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: pip install 'sebp-edge[4bit]'")


def load(folder, number, in_4_bits):
    if in_4_bits:
        needs_bitsandbytes()
    return load_base_model(
        resolve(folder), RECIPE.replace(load_in_4bit=in_4_bits), torch.device("cuda"), streamed_blocks=number
    )


@PRECISIONS
@pytest.mark.parametrize("number", [1, 3, 5])
@pytest.mark.parametrize("with_graphs", [True, False], ids=["graphs", "eager"])
@pytest.mark.parametrize("options", [FASTEST, CHECKPOINTED], ids=["kept", "recomputed"])
def test_steps_are_those_of_the_resident_model_bit_for_bit(folder, in_4_bits, number, with_graphs, options):
    if options is FASTEST and not in_4_bits:
        # Resident weights in bf16 would be joined with their adapters, which rounds otherwise.
        options = MemoryOptions(checkpoints=1)
    expected = losses_and_steps(load(folder, 0, in_4_bits), options, with_graphs=with_graphs)
    found = losses_and_steps(load(folder, number, in_4_bits), options, with_graphs=with_graphs)
    assert all(map(torch.equal, found, expected))


@PRECISIONS
@pytest.mark.parametrize("family", OF_NO_KNOWN_KIND)
def test_steps_of_blocks_of_no_known_kind_are_those_of_resident_ones(tmp_path, family, in_4_bits):
    folder = save_model(make_of_no_known_kind(family).to(torch.bfloat16), tmp_path / "model")
    options = MemoryOptions(checkpoints=2)
    expected = losses_and_steps(load(folder, 0, in_4_bits), options)
    found = losses_and_steps(load(folder, 5, in_4_bits), options)
    assert all(map(torch.equal, found, expected))


@PRECISIONS
def test_embeddings_in_host_memory_are_read_by_the_gpu(folder, in_4_bits):
    on_gpu = load(folder, 0, in_4_bits).model.get_input_embeddings()
    before = torch.cuda.memory_allocated()
    base = load(folder, 5, in_4_bits)
    on_host, ids = base.model.get_input_embeddings(), torch.arange(320, device=CUDA)
    assert on_host.weight.is_cuda and torch.equal(on_host(ids), on_gpu(ids))
    # Two buffers, the head and the norms.
    matrices = 2 * (4 * 256 * 256 + 3 * 256 * 704)
    assert torch.cuda.memory_allocated() - before < (0.6 if in_4_bits else 2.2) * matrices + 2 * 320 * 256 + 2**20


@pytest.mark.slow
@PRECISIONS
def test_an_adaptation_with_streamed_blocks_stays_within_its_plan(tmp_path, in_4_bits):
    if in_4_bits:
        needs_bitsandbytes()
    sizes = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 12, "num_attention_heads": 16}
    model = make_llama(**sizes, num_key_value_heads=4, head_dim=128, vocab_size=320, max_position_embeddings=512)
    save_model(model.to(torch.bfloat16), tmp_path / "model")
    del model
    devices.release_memory(CUDA)
    texts = make_sentences(60, words=200)
    recipe = RECIPE.replace(load_in_4bit=in_4_bits, context_length=512, batch_tokens=2000, epochs=1)
    options = {"recipe": recipe, "device": "cuda", "store": AdapterStore(tmp_path / "store")}
    plan = Personalizer(tmp_path / "model", memory_budget="70GB", **options).plan(texts)
    while not plan.chosen.options.streamed_blocks:
        plan = Personalizer(tmp_path / "model", memory_budget=plan.chosen.peak - 1, **options).plan(texts)
    budget = plan.chosen.peak  # with more, all blocks might fit
    personalizer = Personalizer(tmp_path / "model", memory_budget=budget, **options)
    result = personalizer.adapt(texts)
    assert personalizer.in_use.base.streamed_blocks
    assert result.peak_memory_bytes <= result.predicted_peak_bytes <= budget
    assert personalizer.generate("the ferry", max_new_tokens=4, seed=1)
