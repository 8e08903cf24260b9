"""Decodes one prompt with transformers' own loop and cache, for models whose rows cannot share a `RowCache`."""

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)


def decode_alone(
    model: PreTrainedModel, prompt: list[int], max_new_tokens: int, add_next: Callable[[Tensor], int | None]
) -> None:
    """Passes the logits of each next token, [1, vocabulary], to `add_next`, until that returns no token."""
    step = _Step(add_next)
    # The processor chooses, so the config only lets transformers take the largest score.
    bos = model.generation_config.bos_token_id
    config = GenerationConfig(do_sample=False, max_new_tokens=max_new_tokens, pad_token_id=0, bos_token_id=bos)
    own, model.generation_config = model.generation_config, config
    input_ids = torch.tensor([prompt], device=model.device)
    if len(prompt) == 1:
        # RecurrentGemma keeps states in its modules, and one token does not reset them; a pass without a cache does.
        model(input_ids, use_cache=False)
    try:
        model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            generation_config=config,
            logits_processor=LogitsProcessorList([step]),
            stopping_criteria=StoppingCriteriaList([_Ended(step)]),
        )
    finally:
        model.generation_config = own


class _Step(LogitsProcessor):
    """Leaves only the chosen token possible."""

    def __init__(self, add_next: Callable[[Tensor], int | None]):
        self._add_next, self.ended = add_next, False

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        # transformers may stop late and take further steps.
        token = None if self.ended else self._add_next(scores)
        self.ended = token is None
        chosen = torch.full_like(scores, -torch.inf)
        chosen[0, token or 0] = 0
        return chosen


class _Ended(StoppingCriteria):
    def __init__(self, step: _Step):
        self._step = step

    def __call__(self, input_ids: Tensor, scores: Tensor, **options) -> Tensor:
        return torch.full((1,), self._step.ended, device=input_ids.device)
