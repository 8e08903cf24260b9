"""The drop-in under torch.compile: dense gradients, and one graph if the dense model is one."""

import pytest
import torch
from against_dense import assert_same, encoder_batch, loss_and_gradients, padded_batch, with_lora
from builders import make_llama
from model_families import ENCODERS, make_decoder
from model_families import make as make_model
from torch._dynamo.utils import counters
from transformers import AutoModelForSequenceClassification

from sebp_edge import sparsify
from sebp_edge.research import Threshold

pytestmark = [
    pytest.mark.slow,
    # torch.compile itself warns: when it traces a Function, and when it guards on a block's input.
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor:UserWarning"),
]


@pytest.fixture(autouse=True)
def nothing_compiled():
    forget_graphs()


def forget_graphs():
    torch.compiler.reset()
    counters.clear()


def bert(head):
    config = ENCODERS["bert"]()
    config.num_hidden_layers = 1
    return make_model(head, config), [encoder_batch(head), encoder_batch(head, "left")]


def small_llama():
    return make_llama(use_cache=False, num_hidden_layers=1).double()


def decoder(model):
    return model.train(), [padded_batch(prompt=5), padded_batch(lengths=(3, 20, 9, 1))]


def partly_adapted_llama():
    """A model of which adapters and weights are trained, one norm's among them."""
    model = with_lora(small_llama(), ["q_proj", "down_proj"])
    for name, parameter in model.named_parameters():
        if any(part in name for part in ("k_proj", "input_layernorm", "embed_tokens")):
            parameter.requires_grad_(True)
    return decoder(model)


# To see that a model is one graph, tracing is enough, once of the backward pass too; tests/ops has a small model whose
# code is generated.
MODELS = {
    "llama": (partly_adapted_llama, "aot_eager"),
    "bert": (lambda: bert(AutoModelForSequenceClassification), "eager"),
}


def gradients(compiled, batch):
    loss, found = loss_and_gradients(compiled, batch)
    return loss, {name.removeprefix("_orig_mod."): gradient for name, gradient in found.items()}


@pytest.mark.parametrize(("make", "backend"), MODELS.values(), ids=MODELS)
def test_a_whole_model_is_one_graph_and_trains_like_dense(make, backend):
    model, batches = make()
    dense = [loss_and_gradients(model, batch) for batch in batches]
    with sparsify(model):
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        for batch, expected in zip(batches, dense, strict=True):
            assert_same(expected, gradients(compiled, batch), tolerance=1e-5)
    assert counters["stats"]["unique_graphs"] == 1


def test_the_layers_of_gpt2_are_no_graph_break_and_train_like_dense():
    model, (batch, *_) = decoder(make_decoder("gpt2", n_layer=1))
    expected = loss_and_gradients(model, batch)
    with sparsify(model, keep_logits=True):
        model.transformer.h[0].mlp.compile(backend="eager", fullgraph=True)
        assert_same(expected, loss_and_gradients(model, batch), tolerance=1e-10)
    assert counters["stats"]["unique_graphs"]


def test_separately_compiled_blocks_train_like_dense_without_a_graph_for_each_batch():
    # Of the last block, keys and values compute all rows, as all of another block's layers do.
    model, batches = decoder(small_llama())
    batches += [padded_batch(prompt=2) for _ in range(2)]
    dense = [loss_and_gradients(model, batch) for batch in batches]
    graphs, breaks = [], []
    with sparsify(model):
        for block in model.model.layers:
            block.compile(backend="eager")
        for batch, expected in zip(batches, dense, strict=True):
            assert_same(expected, loss_and_gradients(model, batch), tolerance=1e-5)
            graphs.append(counters["stats"]["unique_graphs"])
            breaks.append(sum(counters["graph_break"].values()))
    # The first two batches run trials and watch the last layer, with and without a restriction. The next one is the
    # first that nobody watches; another one compiles nothing new, and breaks no graph.
    assert (graphs[-2], breaks[-2]) == (graphs[-1], breaks[-1])


def test_a_compiled_model_can_be_sparsified_and_restored():
    model, batches = decoder(small_llama())
    dense = loss_and_gradients(model, batches[0])
    compiled = torch.compile(model, backend="eager")
    assert_same(dense, gradients(compiled, batches[0]), tolerance=1e-10)
    with sparsify(compiled) as sparsified:
        selected = []
        selector = sparsified._selector
        sparsified._selector = lambda layers, own=selector, all=selected: all.append(layers) or own(layers)
        assert_same(dense, gradients(compiled, batches[0]), tolerance=1e-5)
    assert len(selected) >= 8
    assert not any("forward" in vars(module) for module in model.modules())
    assert_same(dense, gradients(compiled, batches[0]), tolerance=1e-10)


def test_an_approximation_drops_the_same_rows_when_compiled():
    model, batches = decoder(small_llama())
    rule = Threshold(calibration_passes=1)
    with sparsify(model, rows=rule, keep_logits=True) as plain:
        expected = [loss_and_gradients(model, batches[0]) for _ in range(2)]
    with sparsify(model, rows=rule, keep_logits=True) as sparsified:
        model.model.layers[0].mlp.compile(backend="eager")
        for one in expected:
            assert_same(one, loss_and_gradients(model, batches[0]), tolerance=1e-10)
    assert counters["stats"]["unique_graphs"]
    assert sparsified.dropped() == plain.dropped()
