"""N:M training in one's own loop: the methods' definition, other parts of the house around it, and misuse."""

import copy

import pytest
import torch
from builders import make_llama
from peft import LoraConfig, get_peft_model
from torch import nn

from sebp_edge.errors import OptionError, SparsityError
from sebp_edge.research import nm_sparse, sparsify

METHODS = ["sr-ste", "mdgf-linear", "mdgf-exponential", "sdgf-stepwise", "sdgf-geometric"]


def make_model(dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(128, 32), nn.Tanh(), nn.Linear(32, 5)).to(dtype)


def batches(count, dtype=torch.float64):
    draw = torch.Generator().manual_seed(1)
    for _ in range(count):
        yield torch.randn(16, 128, generator=draw, dtype=dtype), torch.randn(16, 5, generator=draw, dtype=dtype)


def loss_of(model, batch):
    x, y = batch
    return (model(x) - y).square().mean()


def prune_by_sorting(weight, stage):
    groups = weight.detach().reshape(-1, stage.m)
    order = groups.abs().argsort(dim=1, descending=True, stable=True)
    kept = torch.zeros_like(groups).scatter_(1, order[:, : stage.n], 1.0).view(weight.shape)
    return kept, weight.detach() * (kept + (1 - kept) * stage.decay)


def train_by_definition(model, stages, optimizer_class, rate, shrinkage):
    """The methods with plain autograd: dense weights, functional calls with pruned ones, straight-through gradients."""
    layers = [layer for layer in model if isinstance(layer, nn.Linear)]
    dense = [layer.weight.detach().clone().requires_grad_() for layer in layers]
    biases = [layer.bias for layer in layers]
    optimizer = optimizer_class([*dense, *biases], lr=rate)
    for stage, (x, y) in zip(stages, batches(len(stages), dense[0].dtype), strict=True):
        used = [weight + (prune_by_sorting(weight, stage)[1] - weight).detach() for weight in dense]
        hidden = torch.tanh(nn.functional.linear(x, used[0], biases[0]))
        loss = (nn.functional.linear(hidden, used[1], biases[1]) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        # The regularisation of the weights that this step has pruned, decoupled from the gradient.
        masks = [prune_by_sorting(weight, stage)[0] for weight in dense]
        optimizer.step()
        if not stage.is_dense:
            for weight, kept in zip(dense, masks, strict=True):
                weight.data.mul_(1 - rate * shrinkage * (1 - kept))
    return [prune_by_sorting(weight, stages[-1])[1] for weight in dense], biases


@pytest.mark.parametrize(
    ("method", "optimizer_class"), [*((method, torch.optim.AdamW) for method in METHODS), ("sr-ste", torch.optim.SGD)]
)
def test_a_training_is_that_of_the_methods_definition(method, optimizer_class):
    model, other, stages = make_model(), make_model(), []
    optimizer = optimizer_class(model.parameters(), lr=3e-2)
    with nm_sparse(model, "1:4", method, num_steps=20, dense=0.2, layers=["0", "2"]) as sparse:
        for batch in batches(20):
            stages.append(sparse.stage)
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            sparse.step()
    shrinkage = 2e-4 if method == "sr-ste" else 0
    expected, biases = train_by_definition(other, stages, optimizer_class, 3e-2, shrinkage)
    for layer, weight, bias in zip([model[0], model[2]], expected, biases, strict=True):
        torch.testing.assert_close(layer.weight.detach(), weight, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(layer.bias, bias, rtol=1e-9, atol=1e-12)
        assert ((layer.weight.view(-1, 4) != 0).sum(1) == 1).all()


@pytest.fixture
def tokens():
    """A right-padded batch of tokens."""
    lengths, length = torch.tensor([[5], [3], [13]]), 13
    mask = torch.arange(length) < lengths
    ids = torch.randint(3, 320, (3, length), generator=torch.Generator().manual_seed(0)).masked_fill(~mask, 2)
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": ids.masked_fill(~mask, -100)}


@pytest.mark.slow
@pytest.mark.parametrize("dropin", [False, True])
def test_a_decoder_keeps_its_head_embeddings_and_norms_dense(dropin, tokens):
    model = make_llama(intermediate_size=64)
    before = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with nm_sparse(model, "2:4", num_steps=6) as sparse:
        for _ in range(6):
            if dropin:
                with sparsify(model):
                    model(**tokens).loss.backward()
            else:
                model(**tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            sparse.step()
    head = model.lm_head
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear):
            kept = (layer.weight != 0).view(-1, 4).sum(1)
            assert (kept == (4 if layer is head else 2)).all(), name
    assert not torch.equal(model.lm_head.weight, before.lm_head.weight)


@pytest.mark.slow
def test_the_drop_in_gives_the_same_training(tokens):
    found = []
    for dropin in (False, True):
        model = make_llama(intermediate_size=64).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-1)
        with nm_sparse(model, "1:8", "sdgf-stepwise", num_steps=8) as sparse:
            handle = sparsify(model) if dropin else None
            for _ in range(8):
                model(**tokens).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                sparse.step()
            if handle:
                handle.remove()
        found.append([parameter.detach() for parameter in model.parameters()])
    for one, other in zip(*found, strict=True):
        # The drop-in computes the loss in fp32.
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def test_parameters_stay_the_same_tensors_in_the_same_memory():
    """A captured graph reads them."""
    model = make_model()
    parameters = list(model.parameters())
    addresses = [parameter.data_ptr() for parameter in parameters]
    optimizer = torch.optim.SGD(parameters, lr=1e-2)
    with nm_sparse(model, "1:4", num_steps=4) as sparse:
        for batch in batches(4):
            loss_of(model, batch).backward()
            optimizer.step()
            sparse.step()
            assert [parameter.data_ptr() for parameter in parameters] == addresses
    assert list(model.parameters()) == parameters
    assert [parameter.data_ptr() for parameter in parameters] == addresses


def test_only_the_named_layers_are_pruned():
    model = make_llama(intermediate_size=64)
    with nm_sparse(model, "1:4", "sr-ste", num_steps=1, layers=["gate_proj", "up_proj"]):
        pass
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear):
            most = (layer.weight != 0).view(-1, 4).sum(1).max()
            assert most == (1 if name.endswith(("gate_proj", "up_proj")) else 4), name


def pruned_layers(model, **options):
    """The names of the layers that `nm_sparse` prunes to 1:4."""
    nm_sparse(model, "1:4", "sr-ste", num_steps=1, **options).remove()
    linear = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    return {name for name, layer in linear.items() if (layer.weight != 0).view(-1, 4).sum(1).max() == 1}


def test_a_model_with_torchs_own_attention_is_pruned():
    layer = nn.TransformerEncoderLayer(16, 2, dim_feedforward=32, batch_first=True)
    assert pruned_layers(layer) == {"self_attn.out_proj", "linear1", "linear2"}


def test_sr_ste_takes_any_dense_phase_since_it_has_no_decay():
    model = make_model()
    with nm_sparse(model, "1:4", "sr-ste", num_steps=10, dense=0.9) as sparse:
        assert sparse.stage.is_dense
    with pytest.raises(OptionError, match="whose sum is below 1"):
        nm_sparse(model, "1:4", "mdgf-linear", num_steps=10, dense=0.9)


def with_injected_adapter():
    model = make_llama()
    model.add_adapter(LoraConfig(target_modules=["q_proj"]))
    return model


def test_an_end_between_the_update_and_the_step_leaves_pruned_weights():
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with pytest.raises(KeyboardInterrupt), nm_sparse(model, "1:4", "sr-ste", num_steps=9):
        loss_of(model, next(batches(1))).backward()
        optimizer.step()
        raise KeyboardInterrupt
    assert ((model[0].weight.view(-1, 4) != 0).sum(1) == 1).all()
    optimizer.step()
    # Nothing of the handle is left.
    assert (model[0].weight.view(-1, 4) != 0).sum(1).max() == 4


def test_several_optimizers_may_share_the_weights():
    model = make_model()
    first, second = (torch.optim.SGD(layer.parameters(), lr=1e-2) for layer in (model[0], model[2]))
    with nm_sparse(model, "1:4", "sr-ste", num_steps=2) as sparse:
        for batch in batches(2):
            loss_of(model, batch).backward()
            first.step()
            second.step()
            sparse.step()
        assert sparse.num_done == 2
    assert ((model[2].weight.view(-1, 4) != 0).sum(1) == 1).all()


def test_a_forgotten_step_is_refused():
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with nm_sparse(model, "1:4", num_steps=4):
        loss_of(model, next(batches(1))).backward()
        optimizer.step()
        with pytest.raises(SparsityError, match=r"call step\(\) of the handle"):
            optimizer.step()


def test_a_change_by_anything_but_an_optimizer_of_torch_is_refused():
    model = make_model()
    with nm_sparse(model, "1:4", num_steps=4) as sparse:
        with torch.no_grad():
            model[0].weight.add_(1)
        with pytest.raises(SparsityError, match=r"not in the step of an optimizer of torch"):
            sparse.step()


@pytest.mark.parametrize(
    ("make", "options", "error", "message"),
    [
        (make_model, {"pattern": "1:3"}, SparsityError, "'0' has 128 inputs, which groups of 3 do not divide"),
        (make_model, {"pattern": "1:32", "method": "sdgf-geometric"}, SparsityError, "groups of 256"),
        (make_model, {"pattern": "5:4"}, OptionError, "expected N:M"),
        (make_model, {"pattern": "2:4", "layers": ["up"]}, SparsityError, "no linear layers named 'up'; choose from"),
        (make_model, {"pattern": "2:4", "layers": "up"}, OptionError, "must be a list"),
        (make_model, {"pattern": "2:4", "layers": []}, SparsityError, "no linear layers to prune"),
        (lambda: nn.Sequential(nn.Tanh()), {"pattern": "2:4"}, SparsityError, "no linear layers to prune"),
        (
            lambda: get_peft_model(make_llama(), LoraConfig(target_modules="all-linear")),
            {"pattern": "2:4"},
            SparsityError,
            "LoRA adapter would not be N:M",
        ),
        (with_injected_adapter, {"pattern": "2:4"}, SparsityError, "LoRA adapter would not be N:M"),
    ],
)
def test_what_cannot_be_pruned_is_refused_and_unchanged(make, options, error, message):
    model = make()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(error, match=message):
        nm_sparse(model, num_steps=10, **options)
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))
