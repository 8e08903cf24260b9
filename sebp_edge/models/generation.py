"""Generates text from a prompt's tokens."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

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

from sebp_edge.errors import Interrupted, TextsError
from sebp_edge.machine.devices import forked_random_state
from sebp_edge.models.loading import pad_token_id_of, refuse_unknown_tokens
from sebp_edge.models.sampling import Sampling
from sebp_edge.models.text_stream import TextStream


class NonFiniteLogits(ArithmeticError):
    """The model's logits are NaN or infinite, so no next token can be chosen."""


def generate_text(
    model: PreTrainedModel,
    tokenizer,
    input_ids: list[int],
    end_ids: list[int],
    sampling: Sampling,
    *,
    on_text: Callable[[str], None] | None = None,
    check: Callable[[], None] = lambda: None,
) -> str:
    """Continues a prompt; returns the new text.

    Args:
        input_ids: the prompt's tokens.
        end_ids: tokens that end the text, besides those of the model's generation config.
        on_text: receives the new text in parts as it is generated; no part is empty.
        check: is called after each token; may raise to end the generation.

    Raises:
        TextsError: the prompt is empty, or leaves no room in the model's context.
        ModelError: the prompt has tokens unknown to the model.
        NonFiniteLogits: the model, with its current adapter, computes NaN or infinite logits.
        Interrupted: `check` or Ctrl-C raised a KeyboardInterrupt; its `text` is the text so far.
    """
    length = len(input_ids)
    limit = getattr(model.config, "max_position_embeddings", None) or length + sampling.max_new_tokens
    if length == 0 or length >= limit:
        raise TextsError(f"The prompt has {length} tokens; expected 1 to {limit - 1} for this model.")
    refuse_unknown_tokens(model, input_ids)
    ends = sorted({*end_ids, *end_ids_of(model)})
    text_stream = TextStream(tokenizer, sampling.stop, on_text or (lambda text: None))
    config = sampling.config(
        min(sampling.max_new_tokens, limit - length),
        eos_token_id=ends or None,
        pad_token_id=pad_token_id_of(tokenizer, model),
        bos_token_id=model.generation_config.bos_token_id,
    )
    prompt = torch.tensor([input_ids], device=model.device)
    try:
        with _random_state(model.device, sampling.seed), only_config(config, model):
            model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                generation_config=config,
                logits_processor=require_finite(),
                stopping_criteria=StoppingCriteriaList([_StopAtEnd(text_stream, length, set(ends), check)]),
            )
    except KeyboardInterrupt as stop:
        text_stream.end()
        raise Interrupted("Interrupted; the text is incomplete.", text=text_stream.text) from stop
    text_stream.end()
    return text_stream.text


class _RequireFinite(LogitsProcessor):
    """Raises NonFiniteLogits if the largest logit is not finite; masked tokens may have -inf."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if not scores.amax().isfinite():  # amax propagates NaN
            raise NonFiniteLogits
        return scores


def require_finite() -> LogitsProcessorList:
    """Returns what raises NonFiniteLogits as soon as the logits are not finite."""
    return LogitsProcessorList([_RequireFinite()])


class _StopAtEnd(StoppingCriteria):
    """Passes each new token to `TextStream`, and stops the generation where the text ends."""

    def __init__(self, text_stream: TextStream, prompt_length: int, end_ids: set[int], check: Callable[[], None]):
        self._text_stream, self._seen, self._end_ids, self._check = text_stream, prompt_length, end_ids, check
        self._done = False

    def __call__(self, input_ids: Tensor, scores: Tensor, **options) -> Tensor:
        self._check()
        # transformers may stop late and generate further tokens.
        for token in input_ids[0, self._seen :].tolist():
            self._done = self._done or token in self._end_ids or self._text_stream.add(token)
        self._seen = input_ids.shape[1]
        return torch.full((1,), self._done, device=input_ids.device)


def end_ids_of(model: PreTrainedModel) -> list[int]:
    """Returns the tokens that end a text according to the model's generation config."""
    ids = model.generation_config.eos_token_id
    ids = ids if isinstance(ids, list) else [ids]
    known = model.get_input_embeddings().weight.shape[0]
    return [token for token in ids if type(token) is int and 0 <= token < known]


@contextmanager
def only_config(config: GenerationConfig, model: PreTrainedModel) -> Iterator[None]:
    """Context in which only `config` applies: transformers fills unset options from the model's own config."""
    own, model.generation_config = model.generation_config, config
    try:
        yield
    finally:
        model.generation_config = own


@contextmanager
def _random_state(device: torch.device, seed: int | None) -> Iterator[None]:
    """Context that seeds the random state, anew if `seed` is None, and restores the process's state afterwards."""
    with forked_random_state(device):
        if seed is not None:
            torch.manual_seed(seed)
        else:
            torch.seed()
        yield
