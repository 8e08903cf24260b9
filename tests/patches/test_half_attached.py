"""Where attaching fails half-way, for example since memory runs out, the model is as it was."""

import pytest
import torch
from builders import make_encoder, make_llama
from peft import LoraConfig, get_peft_model

from sebp_edge.patches import lora, norms_and_mlps
from sebp_edge.patches.attention import OwnAttention
from sebp_edge.patches.checkpoints import Checkpoints
from sebp_edge.patches.last_layer import LastLayer
from sebp_edge.patches.lora import FusedLora
from sebp_edge.patches.mlp_pieces import MlpPieces
from sebp_edge.patches.norms_and_mlps import SmallOps
from sebp_edge.patches.tied_embedding import TiedEmbedding
from sebp_edge.sparse import hoist
from sebp_edge.sparse.hoist import Hoisted
from sebp_edge.sparse.hoist_encoder import HoistedEncoder
from sebp_edge.sparse.sparsify import sparsify


def with_adapter(model):
    return get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)).eval()


def state_of(model):
    """What a handle changes of a model: whose forward is another, where weights are, how it attends."""
    storages = [parameter.untyped_storage().nbytes() for parameter in model.parameters()]
    hooks = [len(module._forward_pre_hooks) for module in model.modules()]
    return (
        [name for name, module in model.named_modules() if "forward" in vars(module)],
        storages,
        hooks,
        model.config._attn_implementation,
    )


def model_for(kind):
    if kind == "hoisted encoder":
        return with_adapter(make_encoder("bert", "sequence"))
    return make_llama() if kind == "plain, hoisted" else with_adapter(make_llama())


HANDLES = {
    "hoisted": lambda model: Hoisted(model, checkpoints=1, blocks_in_pieces=True),
    "plain, hoisted": Hoisted,
    "drop-in": sparsify,
    "hoisted encoder": HoistedEncoder,
}
PARTS = [
    ("hoisted", OwnAttention),
    ("hoisted", SmallOps),
    ("hoisted", FusedLora),
    ("hoisted", TiedEmbedding),
    ("hoisted", MlpPieces),
    ("hoisted", LastLayer),
    ("hoisted", Checkpoints),
    ("plain, hoisted", LastLayer),
    ("drop-in", FusedLora),
    ("drop-in", LastLayer),
    ("hoisted encoder", FusedLora),
]


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    """What is attached only where it is faster is attached here too."""
    monkeypatch.setattr(hoist, "_pays", lambda decoder: True)
    monkeypatch.setattr(norms_and_mlps, "runs_kernels", lambda tensor: True)


@pytest.mark.parametrize(("kind", "part"), PARTS, ids=str)
def test_a_model_is_as_it_was_after_a_part_ran_out_of_memory(kind, part, monkeypatch):
    model = model_for(kind)
    before, attach = state_of(model), part.attach

    def run_out(*given, **options):
        attach(*given, **options)
        raise torch.OutOfMemoryError("no more")

    monkeypatch.setattr(part, "attach", run_out)
    with pytest.raises(torch.OutOfMemoryError):
        HANDLES[kind](model)
    assert state_of(model) == before
    monkeypatch.setattr(part, "attach", attach)
    with HANDLES[kind](model):
        assert state_of(model) != before
    assert state_of(model) == before


@pytest.mark.parametrize("kind", ["hoisted", "drop-in", "hoisted encoder"])
def test_a_model_is_as_it_was_after_some_of_its_layers_were_put_together(kind, monkeypatch):
    model = model_for(kind)
    before, made, make = state_of(model), [], lora._Group.__init__

    def run_out(group, *given):
        made.append(group)
        if len(made) == 3:
            raise torch.OutOfMemoryError("no more")
        make(group, *given)

    monkeypatch.setattr(lora._Group, "__init__", run_out)
    with pytest.raises(torch.OutOfMemoryError):
        HANDLES[kind](model)
    assert len(made) == 3
    assert state_of(model) == before


def test_an_encoder_is_as_it_was_after_its_trial_ran_out_of_memory(monkeypatch):
    model = model_for("hoisted encoder")
    before = state_of(model)
    monkeypatch.setattr(HoistedEncoder, "row_logits", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("no")))
    with pytest.raises(torch.OutOfMemoryError):
        HoistedEncoder(model)
    assert state_of(model) == before


def test_where_weights_cannot_be_copied_the_model_has_its_own_code_all_the_same(monkeypatch):
    model = with_adapter(make_llama())
    before = state_of(model)
    handle, unstack = Hoisted(model), lora._Group.unstack
    monkeypatch.setattr(lora._Group, "unstack", lambda group: (_ for _ in ()).throw(torch.OutOfMemoryError("no")))
    with pytest.raises(torch.OutOfMemoryError):
        handle.remove()
    assert state_of(model)[0] == []
    assert state_of(model)[3] == before[3]
    ids = torch.randint(320, (1, 9))
    assert model(ids, labels=ids).loss.isfinite()
    # When there is memory again, the rest is done.
    monkeypatch.setattr(lora._Group, "unstack", unstack)
    handle.remove()
    assert state_of(model) == before
