"""Removing handles restores a model bit for bit: in any order, under wrappers, and after any failure."""

import random

import pytest
import torch
from builders import batch_losses, make_encoder, make_encoder_batch, make_llama
from failing_memory import Failing
from peft import LoraConfig, get_peft_model

from sebp_edge.engine.models.lora import without_adapter
from sebp_edge.engine.sparse.hoist import ATTENTION, Hoisted
from sebp_edge.engine.sparse.patches.attention import FusedAttention
from sebp_edge.engine.sparse.patches.checkpoints import CheckpointedBlocks
from sebp_edge.engine.sparse.patches.fused_lora import FusedLora
from sebp_edge.engine.sparse.patches.last_layer import LastLayer
from sebp_edge.engine.sparse.patches.mlp_chunks import ChunkedMlps
from sebp_edge.engine.sparse.patches.norms_and_mlps import SmallOps
from sebp_edge.engine.sparse.patches.patch import Patch
from sebp_edge.engine.sparse.patches.tied_embedding import TiedEmbedding
from sebp_edge.errors import SparsityError
from sebp_edge.research import HoistedEncoder, Sparsified, sparsify


def part(make, *given):
    def attached(model):
        handle = make(without_adapter(model))
        handle.attach(*given)
        return handle

    return attached


def attention(model):
    handle = Patch()
    handle._set_attention(without_adapter(model), ATTENTION)
    handle._include(FusedAttention(without_adapter(model)))
    return handle


HANDLES = {
    "hoisted": lambda model: Hoisted(model, checkpoints=1, offload=True, chunked_blocks=True),
    "drop-in": sparsify,
    "attention": attention,
    "norms and MLPs": part(SmallOps),
    "LoRA": part(FusedLora),
    "tied embedding": part(TiedEmbedding),
    "chunked MLPs": part(lambda model: ChunkedMlps(model, 7), torch.no_grad),
    "last layer": part(LastLayer),
    "checkpoints": part(lambda model: CheckpointedBlocks(model, 1), torch.no_grad),
    "encoder": HoistedEncoder,
    "encoder, drop-in": sparsify,
    "full, hoisted": Hoisted,
    "full, drop-in": sparsify,
}
# Those that users attach, of which the others are parts.
LEVELS = ["hoisted", "drop-in", "encoder", "encoder, drop-in", "full, hoisted", "full, drop-in"]
# Handles that can be attached to one model.
TOGETHER = {
    "LoRA": [name for name in HANDLES if not name.startswith(("encoder", "full"))],
    "encoder": ["encoder", "encoder, drop-in"],
    "full": ["full, hoisted", "full, drop-in", "tied embedding"],
}


@pytest.fixture(autouse=True)
def as_on_a_gpu(fused_modules, fits_flash_attention):
    """Attaches the parts that are otherwise attached only where they are faster."""


def model_for(kind):
    model = make_encoder("bert", "sequence") if kind.startswith("encoder") else make_llama()
    if kind.startswith("full"):
        return model.eval()
    model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)).eval()
    # A mode that `train()` or `eval()` of the whole model would overwrite.
    next(module for name, module in model.named_modules() if name.endswith("lora_dropout")).train()
    # The tied embedding is replaced only if it is trained.
    without_adapter(model).get_input_embeddings().weight.requires_grad_(True)
    return model


def batch_for(model):
    if "bert" in type(without_adapter(model)).__name__.lower():
        return make_encoder_batch("bert", "sequence")
    input_ids = torch.arange(3, 35).view(2, 16)
    labels = input_ids.clone()
    labels[0, 9:], labels[1, :4] = -100, -100
    return {"input_ids": input_ids, "labels": labels}


class State:
    """Everything that a handle may change in a model, to compare with its later state."""

    def __init__(self, model):
        self.model, self.outputs = model, outputs_of(model)
        self.before = self.now()
        self.values = {name: value.clone() for name, value in model.state_dict().items()}

    def now(self):
        modules = dict(self.model.named_modules())
        return {
            "attributes": {name: vars(module).keys() for name, module in modules.items()},
            "forwards": {name: vars(module).get("forward") for name, module in modules.items()},
            "hooks": {name: hooks_of(module) for name, module in modules.items()},
            "modes": {name: module.training for name, module in modules.items()},
            "attention": without_adapter(self.model).config._attn_implementation,
            "parameters": {name: storage_of(one) for name, one in self.model.named_parameters(remove_duplicate=False)},
        }

    def is_changed(self):
        return self.now() != self.before

    def check(self):
        now = self.now()
        for name, before in self.before.items():
            assert now[name] == before, name
        values = self.model.state_dict()
        assert values.keys() == self.values.keys()
        assert all(torch.equal(values[name], value) for name, value in self.values.items())
        assert all(torch.equal(*pair) for pair in zip(self.outputs, outputs_of(self.model), strict=True))


def hooks_of(module):
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return [list(getattr(module, kind).values()) for kind in kinds]


def storage_of(parameter):
    """Returns the parameter's identity and its position in its storage, whose address may change."""
    size = parameter.untyped_storage().nbytes()
    return id(parameter), parameter.requires_grad, parameter.stride(), parameter.storage_offset(), size


def outputs_of(model):
    """Returns the model's own loss, logits and gradients."""
    output = model(**batch_for(model))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [output.loss, output.logits, *torch.autograd.grad(output.loss, trained)]


def losses_of(handle):
    """Returns the losses that the handle computes."""
    batch = batch_for(handle.model)
    if isinstance(handle, HoistedEncoder):
        return handle.losses(batch)
    if isinstance(handle, Sparsified) and "attention_mask" in batch:
        return handle.model(**batch).loss
    return batch_losses(handle, batch)


@pytest.mark.parametrize("kind", HANDLES)
def test_removing_a_handle_restores_the_model(kind):
    model = model_for(kind)
    state = State(model)
    handle = HANDLES[kind](model)
    assert state.is_changed()
    handle.remove()
    state.check()
    handle.remove()
    state.check()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("group", "first"), [(group, first) for group, handles in TOGETHER.items() for first in handles]
)
def test_two_handles_are_removed_in_any_order(group, first):
    model = model_for(group)
    state = State(model)
    # Each pair once, in either order. Mostly the first handle is removed first, which is the harder order.
    for other in TOGETHER[group][TOGETHER[group].index(first) :]:
        below, above = random.sample((first, other), 2)
        order = random.choice((1, 1, 1, -1))
        handles = [HANDLES[below](model)]
        with_first = state.now()
        try:
            handles.append(HANDLES[above](model))
        except SparsityError:
            # A handle that refuses the first one leaves it unchanged.
            assert state.now() == with_first, (below, above)
        for handle in handles[::order]:
            handle.remove()
        assert not state.is_changed(), (below, above, order)
    state.check()


@pytest.mark.parametrize("first", ["hoisted", "drop-in"])
def test_a_handle_works_after_one_beneath_it_is_removed(first):
    model = model_for(first)
    one, other = HANDLES[first](model), HANDLES["hoisted"](model)
    with torch.no_grad():
        expected = losses_of(other)
        one.remove()
        torch.testing.assert_close(losses_of(other), expected, rtol=1e-5, atol=1e-6)
    other.remove()


def wrap(modules):
    """Wraps the modules' forwards, as a user may; returns the forward beneath each wrapper."""
    beneath = {}
    for module in modules:
        beneath[module] = own = module.forward
        module.forward = lambda *args, own=own, **kwargs: own(*args, **kwargs)
    return beneath


@pytest.mark.parametrize("kind", LEVELS)
def test_a_wrapper_under_a_handle_stays(kind):
    model = model_for(kind)
    # The drop-in refuses linear layers with a replaced forward.
    wrap([module for module in model.modules() if type(module) is not torch.nn.Linear])
    state = State(model)
    try:
        handle = HANDLES[kind](model)
    except SparsityError:
        state.check()
        return
    handle.remove()
    state.check()


@pytest.mark.parametrize("kind", LEVELS)
def test_a_wrapper_over_a_handle_works_without_the_handle_and_can_be_removed(kind):
    model = model_for(kind)
    state = State(model)
    handle = HANDLES[kind](model)
    beneath = wrap([module for module in model.modules() if "forward" in vars(module)])
    wrappers = {module: module.forward for module in beneath}
    handle.remove()
    assert all(module.forward is wrapper for module, wrapper in wrappers.items())
    assert all(torch.equal(*pair) for pair in zip(state.outputs, outputs_of(model), strict=True))
    for module, forward in beneath.items():
        module.forward = forward
    outputs_of(model)
    state.check()


@pytest.mark.parametrize("kind", LEVELS)
def test_a_model_is_restored_if_attaching_fails_midway(kind, monkeypatch):
    model, replaced, replace, last = model_for(kind), [], Patch._replace, None
    state = State(model)

    def failing(handle, module, forward):
        if len(replaced) == last:
            raise torch.OutOfMemoryError("no more")
        replaced.append(module)
        replace(handle, module, forward)

    monkeypatch.setattr(Patch, "_replace", failing)
    HANDLES[kind](model).remove()
    count = len(replaced)
    for share in (0, 0.6, 1):
        last = int(share * (count - 1))
        replaced.clear()
        with pytest.raises(torch.OutOfMemoryError):
            HANDLES[kind](model)
        assert len(replaced) == last
        assert not state.is_changed(), share
    state.check()


@pytest.mark.slow
@pytest.mark.parametrize("kind", LEVELS)
def test_a_model_is_restored_wherever_attaching_runs_out_of_memory(kind):
    model = model_for(kind)
    state = State(model)
    with Failing() as counting:
        handle = HANDLES[kind](model)
    handle.remove()
    for number in range(1, counting.count + 1, 1 + counting.count // 12):
        with pytest.raises(torch.OutOfMemoryError), Failing(number):
            HANDLES[kind](model)
        assert not state.is_changed(), number
    state.check()


@pytest.mark.parametrize("kind", LEVELS)
def test_a_model_is_restored_after_a_failed_forward_pass(kind):
    model = model_for(kind)
    state = State(model)
    norms = [module for name, module in model.named_modules() if name.endswith(("norm", "LayerNorm"))]
    with HANDLES[kind](model) as handle:
        # The first losses run the model's trials.
        losses_of(handle)
        hook = norms[-1].register_forward_hook(lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("no more")))
        with pytest.raises(torch.OutOfMemoryError):
            losses_of(handle)
        hook.remove()
    state.check()


@pytest.mark.parametrize("kind", ["hoisted", "drop-in"])
def test_if_weights_cannot_be_copied_the_model_still_has_its_own_code(kind):
    model = model_for(kind)
    state = State(model)
    handle = HANDLES[kind](model)
    with pytest.raises(torch.OutOfMemoryError), Failing(1):
        handle.remove()
    now = state.now()
    assert all(now[name] == before for name, before in state.before.items() if name != "parameters")
    assert now["parameters"] != state.before["parameters"]
    assert all(torch.equal(*pair) for pair in zip(state.outputs, outputs_of(model), strict=True))
    # With memory again, the next call restores the rest.
    handle.remove()
    state.check()
