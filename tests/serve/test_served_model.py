"""The model that answers during a training: it shares all weights, and its answers stay within the memory budget."""

import torch

from sebp_edge.models.catalog import resolve
from sebp_edge.models.loading import load_base_model
from sebp_edge.recipe import Recipe
from sebp_edge.serve.served_model import has_room, twin


def test_a_copy_of_the_modules_shares_all_tensors_and_an_answer_fits_into_what_the_budget_leaves(model_folder):
    base = load_base_model(resolve(str(model_folder)), Recipe.load("notes"), torch.device("cpu"))
    served = twin(base)
    pairs = zip(base.model.state_dict().values(), served.model.state_dict().values(), strict=True)
    assert all(own.data_ptr() == other.data_ptr() for own, other in pairs)
    assert not {*base.model.modules()} & {*served.model.modules()}
    config = base.model.config
    heads = config.num_key_value_heads * config.hidden_size // config.num_attention_heads
    needed = 2 * config.num_hidden_layers * heads * 4 * (30 // 2 + 7)
    assert has_room(base, needed + 1000, 1000, 30, 7)
    assert not has_room(base, needed + 999, 1000, 30, 7)
    assert has_room(base, None, 10**15, 30, 7)
    most = 2 * config.num_hidden_layers * heads * 4 * config.max_position_embeddings
    assert has_room(base, most, 0, 10**9, 10**9)
