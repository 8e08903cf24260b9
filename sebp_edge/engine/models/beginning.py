"""Keeps the cache of a prompt's beginning, so that a prompt that begins alike computes only the rest.

For models whose rows cannot share a `RowCache`. A state cannot go back, so a copy of the cache is extended, and a trial
tells which models compute the same from such a copy.
"""

import copy
import functools
import json

import torch
from transformers import Cache, DynamicCache, PreTrainedModel

from sebp_edge.engine.models.small_copy import VOCABULARY, small_copy

# So many tokens before a prompt's last are not kept: they become others as the text goes on.
UNSETTLED = 8
# Where the trial's text is cut: within the reach of short convolutions, and beyond.
CUTS = (2, 3, 11, 12, 13, 30)


class Beginning:
    """What a model's cache holds after the first tokens of a prompt, all but its last ones; `tokens` are these."""

    def __init__(self):
        self.tokens: list[int] = []
        self._cache: Cache | None = None

    def after(self, model: PreTrainedModel, prompt: list[int]) -> Cache:
        """Returns a cache of all tokens of a prompt but the last; computes those that are not kept."""
        tokens, cache, self.tokens, self._cache = self.tokens, self._cache, [], None
        if cache is None or tokens != prompt[:-1][: len(tokens)]:
            tokens, cache = [], DynamicCache(config=model.config.get_text_config())
        settled = tokens + prompt[len(tokens) : -1 - UNSETTLED]
        self._add(model, cache, settled[len(tokens) :])
        self.tokens, self._cache = settled, cache
        own = copy.deepcopy(cache)
        self._add(model, own, prompt[len(settled) : -1])
        return own

    def _add(self, model: PreTrainedModel, cache: Cache, tokens: list[int]) -> None:
        if tokens:
            ids = torch.tensor([tokens], device=model.device)
            model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)


def goes_on(model: PreTrainedModel) -> bool:
    """Whether a small copy of a model has the same logits if its text is cut and its cache goes on."""
    return _goes_on(type(model), type(model.config), json.dumps(model.config.to_dict(), default=str, sort_keys=True))


@functools.lru_cache(maxsize=16)
@torch.no_grad()
def _goes_on(kind: type[PreTrainedModel], config: type, values: str) -> bool:
    draw, beginning = torch.Generator().manual_seed(0), Beginning()
    try:
        model = small_copy(config.from_dict(json.loads(values)), kind).model
        for parameter in model.parameters():  # fresh ones are so small that little shows
            parameter.add_(torch.randn(parameter.shape, generator=draw), alpha=0.05)
        ids = torch.randint(1, VOCABULARY, (1, max(CUTS)), generator=draw)
        expected = model(ids, use_cache=False).logits[0]
        for cut in CUTS:
            cache = beginning.after(model, ids[0, :cut].tolist())
            model(ids.flip(1), use_cache=False)  # which resets states that are not in the cache
            found = model(ids[:, cut - 1 : cut], past_key_values=cache, use_cache=True).logits[0, -1]
            if not (found - expected[cut - 1]).norm() <= 1e-4 * expected[cut - 1].norm():
                return False
    except (TypeError, ValueError, RuntimeError, LookupError, AttributeError):
        return False
    return True
