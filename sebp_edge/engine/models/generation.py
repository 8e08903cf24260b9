"""Generates text from a prompt's tokens, and streams it: whole characters only, up to a stop string."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor
from transformers import PreTrainedModel

from sebp_edge.engine.models.decoding import Decoder
from sebp_edge.engine.models.sampling import Sampler, Sampling
from sebp_edge.errors import Interrupted


@dataclass(frozen=True)
class Generation:
    """A text that was generated."""

    text: str
    prompt_tokens: int
    new_tokens: int  # how many tokens were generated, without one that ended the text
    # Whether the model or a stop string ended the text, or the limit of new tokens or the context did.
    finish: Literal["stop", "length"]
    probability: float  # of the whole text after the prompt, its end included, as the model has it


def generate_text(
    model: PreTrainedModel,
    tokenizer,
    input_ids: list[int],
    end_ids: list[int],
    sampling: Sampling,
    *,
    decoder: Decoder | None = None,
    on_text: Callable[[str], None] | None = None,
    check: Callable[[], None] = lambda: None,
) -> Generation:
    """Continues a prompt.

    Args:
        decoder: of this model, which keeps what prompts begin with between calls.
        on_text: receives the new text in parts as it is generated; no part is empty.
        check: is called after each token; may raise to end the generation.

    Raises:
        TextsError, ModelError, NonFiniteLogits: see `Decoder.decode`.
        Interrupted: `check` or Ctrl-C raised a KeyboardInterrupt; its `text` is the text so far.
    """
    text_stream = TextStream(tokenizer, sampling.stop, on_text or (lambda text: None))
    decoder, weighed = decoder or Decoder(model), _Weighed(Sampler(sampling, model.device))
    try:
        (tokens,) = decoder.decode(
            [input_ids],
            end_ids,
            sampling,
            choose=weighed,
            on_token=lambda number, token: text_stream.add(token),
            check=check,
        )
    except KeyboardInterrupt as stop:
        text_stream.end()
        raise Interrupted("Interrupted; the text is incomplete.", text=text_stream.text) from stop
    text_stream.end()
    is_full = len(tokens) == min(sampling.max_new_tokens, decoder.room_after(input_ids))
    finish = "length" if is_full and not text_stream.is_stopped else "stop"
    return Generation(text_stream.text, len(input_ids), len(tokens), finish, weighed.probability)


class _Weighed:
    """Chooses tokens with a sampler, and adds up the logarithms of their probabilities."""

    def __init__(self, sampler: Sampler):
        self._sampler, self._logarithm = sampler, 0.0

    def __call__(self, tokens: list[int], logits_1V: Tensor) -> int:
        if self._sampler.is_random:
            token = self._sampler(tokens, logits_1V)
        else:
            (token,) = self._sampler.likeliest([tokens], logits_1V)
        # Not read here, so that no GPU is waited for.
        self._logarithm += logits_1V[0, token] - logits_1V[0].logsumexp(dim=0)
        return token

    @property
    def probability(self) -> float:
        """The probability of all tokens that were chosen."""
        return math.exp(self._logarithm)


def answer_all(
    model: PreTrainedModel,
    tokenizer,
    prompts: list[list[int]],
    end_ids: list[int],
    max_new_tokens: int,
    check: Callable[[], None] = lambda: None,
) -> list[str]:
    """Returns the new text of each prompt, the likeliest token each time; see `Decoder.decode`."""
    replies = Decoder(model).decode(prompts, end_ids, Sampling(max_new_tokens, temperature=0), check=check)
    return [tokenizer.decode(tokens, skip_special_tokens=True).strip() for tokens in replies]


class TextStream:
    """A text that grows token by token.

    Args:
        stop: the text ends before the first of these strings; no part of it is emitted.
        on_text: receives each part of the text as soon as it is final; no part is empty.
    """

    def __init__(self, tokenizer, stop: Sequence[str], on_text: Callable[[str], None]):
        self.text, self.is_stopped = "", False
        self._tokenizer, self._stop, self._on_text = tokenizer, stop, on_text
        self._tokens: list[int] = []
        # Tokens before `_decoded` have been decoded; those from `_context` on are decoded again as context.
        self._context = self._decoded = 0
        self._pending = ""

    def add(self, token: int) -> bool:
        """Adds a token; returns whether it ends the text with a stop string."""
        self._tokens.append(token)
        return self._take(self._new_text(at_end=False))

    def end(self) -> None:
        """Emits the pending text."""
        if not self._take(self._new_text(at_end=True)):
            self._emit(len(self._pending))

    def _new_text(self, *, at_end: bool) -> str:
        """Returns the text that the latest tokens add.

        A token's text depends on the token before it. A character may take several tokens, and decodes to "\\ufffd"
        until the last of them.
        """
        before = self._decode(self._tokens[self._context : self._decoded])
        text = self._decode(self._tokens[self._context :])
        if text.endswith("\ufffd") and not at_end:
            return ""
        self._context, self._decoded = self._decoded, len(self._tokens)
        return text[len(before) :]

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True)

    def _take(self, new_text: str) -> bool:
        """Emits what cannot be part of a stop string; returns whether a stop string was found."""
        self._pending += new_text
        # The stop string that is complete first wins, regardless of where tokens are cut.
        found = [(start + len(string), start) for string in self._stop if (start := self._pending.find(string)) >= 0]
        if found:
            self._emit(min(found)[1])
            self._pending, self.is_stopped = "", True
            return True
        self._emit(len(self._pending) - self._partial_stop_size())
        return False

    def _partial_stop_size(self) -> int:
        """Returns how many of the last pending characters may begin a stop string."""
        longest = max(map(len, self._stop), default=1) - 1
        sizes = range(min(longest, len(self._pending)), 0, -1)
        return next((size for size in sizes if any(s.startswith(self._pending[-size:]) for s in self._stop)), 0)

    def _emit(self, size: int) -> None:
        text, self._pending = self._pending[:size], self._pending[size:]
        if text:
            self.text += text
            self._on_text(text)
