"""Text out."""

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

from sebp_edge.errors import Interrupted, ModelError
from sebp_edge.models.loading import padding_of, refuse_unknown_tokens
from sebp_edge.models.sampling import Sampling
from sebp_edge.models.writing import Writing


class NonFiniteLogits(ArithmeticError):
    """The model computes NaN or infinite numbers, so there is no next token."""


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
    """Continues a prompt.

    Args:
        input_ids, end_ids: the prompt's tokens, and the tokens that end the text beside those that the model names.
        on_text: is given the new text piece by piece, as it is written; no piece is empty.
        check: is called after each token, and may raise to end it.

    Raises:
        ModelError: the prompt leaves no room in the model's context, or has tokens that the model does not know.
        NonFiniteLogits: the model, as it is now, computes NaN or infinite logits.
        Interrupted: `check`, or Ctrl-C, raised a KeyboardInterrupt; what was written so far is its `text`.
    """
    length = len(input_ids)
    limit = getattr(model.config, "max_position_embeddings", None) or length + sampling.max_new_tokens
    if length == 0 or length >= limit:
        raise ModelError(f"The prompt has {length} tokens; this model takes 1 to {limit - 1}, so give another.")
    refuse_unknown_tokens(model, input_ids)
    ends = sorted({*end_ids, *_end_ids(model)})
    writing = Writing(tokenizer, sampling.stop, on_text or (lambda piece: None))
    config = sampling.config(
        min(sampling.max_new_tokens, limit - length),
        eos_token_id=ends or None,
        pad_token_id=padding_of(tokenizer, model),
        bos_token_id=model.generation_config.bos_token_id,
    )
    prompt = torch.tensor([input_ids], device=model.device)
    try:
        with _random_state(model.device, sampling.seed), _only(config, model):
            model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                generation_config=config,
                logits_processor=LogitsProcessorList([_Finite()]),
                stopping_criteria=StoppingCriteriaList([_Written(writing, length, set(ends), check)]),
            )
    except KeyboardInterrupt as stop:
        writing.end()
        raise Interrupted("Interrupted; what was written so far is not complete.", text=writing.text) from stop
    writing.end()
    return writing.text


class _Finite(LogitsProcessor):
    """Refuses logits that no token can be chosen by; masked tokens may have -inf."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if not scores.amax().isfinite():  # of NaN and anything, the largest is NaN
            raise NonFiniteLogits
        return scores


class _Written(StoppingCriteria):
    """Has each new token written, and ends the generation where the text ends."""

    def __init__(self, writing: Writing, prompt_length: int, end_ids: set[int], check: Callable[[], None]):
        self._writing, self._seen, self._end_ids, self._check = writing, prompt_length, end_ids, check
        self._done = False

    def __call__(self, input_ids: Tensor, scores: Tensor, **options) -> Tensor:
        self._check()
        # transformers may notice the end late, and go on for a token or more.
        for token in input_ids[0, self._seen :].tolist():
            self._done = self._done or token in self._end_ids or self._writing.add(token)
        self._seen = input_ids.shape[1]
        return torch.full((1,), self._done, device=input_ids.device)


def _end_ids(model: PreTrainedModel) -> list[int]:
    """The tokens that the model's folder says end a text."""
    named = model.generation_config.eos_token_id
    named = named if isinstance(named, list) else [named]
    known = model.get_input_embeddings().weight.shape[0]
    return [token for token in named if type(token) is int and 0 <= token < known]


@contextmanager
def _only(config: GenerationConfig, model: PreTrainedModel) -> Iterator[None]:
    """Within it nothing else applies: where a given config is silent, transformers asks the model's own."""
    own, model.generation_config = model.generation_config, config
    try:
        yield
    finally:
        model.generation_config = own


@contextmanager
def _random_state(device: torch.device, seed: int | None) -> Iterator[None]:
    """Draws by `seed`; the process's random state is left as it was."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        if seed is not None:
            torch.manual_seed(seed)
        else:
            torch.seed()
        yield
