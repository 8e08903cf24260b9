"""Where attaching fails half-way, for example since memory runs out, the model is as it was."""

import pytest
import torch
from builders import make_encoder, make_llama
from peft import LoraConfig, get_peft_model

from sebp_edge.sparse import fused_lora
from sebp_edge.sparse.checkpoints import Checkpoints
from sebp_edge.sparse.fused_lora import FusedLora
from sebp_edge.sparse.hoist import Hoisted
from sebp_edge.sparse.hoist_encoder import HoistedEncoder
from sebp_edge.sparse.last_layer import LastLayer
from sebp_edge.sparse.mlp_pieces import MlpPieces
from sebp_edge.sparse.small_ops import SmallOps
from sebp_edge.sparse.sparsify import sparsify
from sebp_edge.sparse.tied_embedding import TiedEmbedding


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


HANDLES = {
    "hoisted": lambda model: Hoisted(model, checkpoints=1, blocks_in_pieces=True),
    "drop-in": sparsify,
    "hoisted encoder": HoistedEncoder,
}
PARTS = [
    ("hoisted", SmallOps),
    ("hoisted", FusedLora),
    ("hoisted", TiedEmbedding),
    ("hoisted", MlpPieces),
    ("hoisted", LastLayer),
    ("hoisted", Checkpoints),
    ("drop-in", FusedLora),
    ("hoisted encoder", FusedLora),
]


@pytest.mark.parametrize(("kind", "part"), PARTS, ids=str)
def test_a_model_is_as_it_was_after_a_part_ran_out_of_memory(kind, part, monkeypatch):
    model = with_adapter(make_encoder("bert", "sequence") if kind == "hoisted encoder" else make_llama())
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


@pytest.mark.parametrize("kind", HANDLES)
def test_a_model_is_as_it_was_after_some_of_its_layers_were_put_together(kind, monkeypatch):
    model = with_adapter(make_encoder("bert", "sequence") if kind == "hoisted encoder" else make_llama())
    before, made, make = state_of(model), [], fused_lora._Group.__init__

    def run_out(group, *given):
        made.append(group)
        if len(made) == 3:
            raise torch.OutOfMemoryError("no more")
        make(group, *given)

    monkeypatch.setattr(fused_lora._Group, "__init__", run_out)
    with pytest.raises(torch.OutOfMemoryError):
        HANDLES[kind](model)
    assert len(made) == 3
    assert state_of(model) == before


def test_where_weights_cannot_be_copied_the_model_has_its_own_code_all_the_same(monkeypatch):
    model = with_adapter(make_llama())
    attention, handle = model.config._attn_implementation, Hoisted(model)
    monkeypatch.setattr(fused_lora._Group, "unstack", lambda group: (_ for _ in ()).throw(torch.OutOfMemoryError("no")))
    with pytest.raises(torch.OutOfMemoryError):
        handle.remove()
    assert state_of(model)[0] == []
    assert model.config._attn_implementation == attention
    ids = torch.randint(320, (1, 9))
    assert model(ids, labels=ids).loss.isfinite()
