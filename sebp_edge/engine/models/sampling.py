"""Options of text generation: how the next token is chosen, and where the text ends."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from sebp_edge.errors import OptionError
from sebp_edge.recipe import check_seed


@dataclass(frozen=True)
class Sampling:
    """Options of one generation."""

    max_new_tokens: int = 200
    temperature: float = 0.7  # divides the logits; 0 always takes the most likely token
    top_p: float = 0.9  # draw from the most likely tokens that together have this probability
    top_k: int | None = None  # draw from this many of the most likely tokens; None draws from all
    # Divides the positive logits of tokens that are already in the prompt or the text, and multiplies the negative ones
    # (Keskar et al. 2019); 1 changes nothing.
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] | list[str] = ()  # the text ends before the first of these strings
    seed: int | None = None  # makes the text repeatable; None draws anew each time

    def __post_init__(self):
        _check_count("max_new_tokens", self.max_new_tokens)
        if self.top_k is not None:
            _check_count("top_k", self.top_k)
        # Smaller temperatures would make logits infinite.
        if self.temperature != 0:
            check_number("temperature", self.temperature, 0.001, 100, "0, or a number from 0.001 to 100")
        check_number("top_p", self.top_p, math.ulp(0.0), 1, "a number above 0 and at most 1")
        check_number("repetition_penalty", self.repetition_penalty, 0.1, 10, "a number from 0.1 to 10")
        if self.seed is not None:
            check_seed(self.seed)
        if not isinstance(self.stop, list | tuple):
            raise OptionError(f"stop must be a list of strings, but is a {type(self.stop).__name__}.")
        if not all(isinstance(string, str) and string for string in self.stop):
            raise OptionError("stop must be a list of non-empty strings.")

    def processors(self) -> LogitsProcessorList:
        """Returns what transformers does to logits for these options, in the order of its `generate`."""
        found = []
        if self.repetition_penalty != 1:
            found.append(RepetitionPenaltyLogitsProcessor(float(self.repetition_penalty)))
        if self.temperature > 0:
            found.append(TemperatureLogitsWarper(float(self.temperature)))
            if self.top_k is not None:
                found.append(TopKLogitsWarper(self.top_k))
            if self.top_p < 1:
                found.append(TopPLogitsWarper(float(self.top_p)))
        return LogitsProcessorList(found)


class NonFiniteLogits(ArithmeticError):
    """The model's logits are NaN or infinite, so no next token can be chosen."""


class Sampler:
    """Chooses the next tokens of one text. Texts with the same seed draw the same numbers, alone and in a batch."""

    def __init__(self, sampling: Sampling, device: torch.device):
        self._processors = sampling.processors()
        self.is_random = sampling.temperature > 0
        # Whether it always takes the token with the largest logit.
        self.is_greedy = not self.is_random and not self._processors
        self._generator = None
        if self.is_random:
            self._generator = torch.Generator(device)
            if sampling.seed is None:
                self._generator.seed()
            else:
                self._generator.manual_seed(sampling.seed)

    def __call__(self, tokens: list[int], logits_1V: Tensor) -> int:
        """Returns a random next token after `tokens`, the prompt's and the new ones."""
        scores = self._process([tokens], logits_1V)
        return int(torch.multinomial(scores.softmax(dim=-1), 1, generator=self._generator))

    def likeliest(self, texts: list[list[int]], logits_NV: Tensor) -> list[int]:
        """Returns the next token of each of several texts, if none is random."""
        longest = max(map(len, texts))
        # A token that is there twice counts once.
        filled = [[*text, *(longest - len(text)) * text[:1]] for text in texts]
        return self._process(filled, logits_NV).argmax(dim=1).tolist()

    def _process(self, texts: list[list[int]], logits_NV: Tensor) -> Tensor:
        if not self._processors:
            return logits_NV
        return self._processors(torch.tensor(texts, device=logits_NV.device), logits_NV)


def _check_count(name: str, value: int) -> None:
    if type(value) is not int or value < 1:
        raise OptionError(f"{name} must be a whole number of at least 1, but is {value!r}.")


def check_number(name: str, value: float, least: float, most: float, wanted: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise OptionError(f"{name} must be {wanted}, but is {value!r}.")
