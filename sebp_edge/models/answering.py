"""Answers many prompts at once, with the likeliest token each time."""

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from sebp_edge.errors import TextsError
from sebp_edge.models.generation import end_ids_of, only_config, require_finite
from sebp_edge.models.loading import pad_token_id_of, refuse_unknown_tokens

# Rows of a batch, padding included; on a CPU, larger batches are no faster.
MAX_ROWS = 8192


@torch.no_grad()
def answer_all(
    model: PreTrainedModel,
    tokenizer,
    prompts: list[list[int]],
    end_ids: list[int],
    max_new_tokens: int,
    check: Callable[[], None] = lambda: None,
) -> list[str]:
    """Returns the new text of each prompt. Prompts of about the same length are answered together.

    Args:
        prompts: the tokens of each prompt.
        end_ids: tokens that end a text, besides those of the model's generation config.
        check: is called after each token; may raise to end the call.

    Raises:
        TextsError: a prompt is empty, or leaves no room in the model's context.
        NonFiniteLogits: the model, with its current adapter, computes NaN or infinite logits.
    """
    limit = getattr(model.config, "max_position_embeddings", None)
    for prompt in prompts:
        if not prompt or (limit is not None and len(prompt) + max_new_tokens > limit):
            room = "any length" if limit is None else f"1 to {limit - max_new_tokens}"
            raise TextsError(f"A prompt has {len(prompt)} tokens; expected {room} for this model.")
        refuse_unknown_tokens(model, prompt)
    ends = sorted({*end_ids, *end_ids_of(model)})
    pad = pad_token_id_of(tokenizer, model)
    config = GenerationConfig(
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=ends or None,
        pad_token_id=pad,
        bos_token_id=model.generation_config.bos_token_id,
    )
    answers: dict[int, str] = {}
    with only_config(config, model):
        for batch in _batches(prompts, max_new_tokens):
            new = _generate(model, [prompts[number] for number in batch], pad, config, check)
            for number, tokens in zip(batch, new.tolist(), strict=True):
                until = next((at for at, token in enumerate(tokens) if token in ends), len(tokens))
                answers[number] = tokenizer.decode(tokens[:until], skip_special_tokens=True).strip()
    return [answers[number] for number in range(len(prompts))]


def _batches(prompts: list[list[int]], max_new_tokens: int) -> list[list[int]]:
    """Returns the numbers of the prompts that are answered together, longest first."""
    batches, rows = [], 0
    for number in sorted(range(len(prompts)), key=lambda each: -len(prompts[each])):
        if not batches or (len(batches[-1]) + 1) * rows > MAX_ROWS:
            rows = len(prompts[number]) + max_new_tokens
            batches.append([])
        batches[-1].append(number)
    return batches


def _generate(
    model: PreTrainedModel, prompts: list[list[int]], pad: int, config: GenerationConfig, check: Callable[[], None]
) -> Tensor:
    """Returns the new tokens of prompts that are padded on the left, [prompts, new tokens]."""
    longest = max(map(len, prompts))
    input_ids = torch.full((len(prompts), longest), pad)
    attention_mask = torch.zeros_like(input_ids)
    for row, prompt in enumerate(prompts):
        input_ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        attention_mask[row, longest - len(prompt) :] = 1
    generated = model.generate(
        input_ids.to(model.device),
        attention_mask=attention_mask.to(model.device),
        generation_config=config,
        logits_processor=require_finite(),
        stopping_criteria=StoppingCriteriaList([_Check(check)]),
    )
    return generated[:, longest:].cpu()


class _Check(StoppingCriteria):
    """Calls `check` after each token."""

    def __init__(self, check: Callable[[], None]):
        self._check = check

    def __call__(self, input_ids: Tensor, scores: Tensor, **options) -> Tensor:
        self._check()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)
