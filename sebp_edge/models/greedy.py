"""Decodes one prompt with transformers' own loop and cache, with the likeliest token each time."""

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from sebp_edge.models.generation import only_config, require_finite


def decode_alone(
    model: PreTrainedModel,
    prompt: list[int],
    ends: set[int],
    max_new_tokens: int,
    pad_token_id: int,
    check: Callable[[], None],
) -> list[int]:
    """Returns the new tokens, the one that ended them included.

    Raises:
        NonFiniteLogits: the model computes NaN or infinite logits.
    """
    config = GenerationConfig(
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=sorted(ends) or None,
        pad_token_id=pad_token_id,
        bos_token_id=model.generation_config.bos_token_id,
    )
    input_ids = torch.tensor([prompt], device=model.device)
    with only_config(config, model):
        generated = model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            generation_config=config,
            logits_processor=require_finite(),
            stopping_criteria=StoppingCriteriaList([_Check(check)]),
        )
    return generated[0, len(prompt) :].tolist()


class _Check(StoppingCriteria):
    """Calls `check` after each token."""

    def __init__(self, check: Callable[[], None]):
        self._check = check

    def __call__(self, input_ids: Tensor, scores: Tensor, **options) -> Tensor:
        self._check()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)
