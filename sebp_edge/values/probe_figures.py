"""What a probe shows of a training: how many of its items a model knows, before and after."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

# A difference counts if chance alone would make it in at most this share of all cases.
CHANCE = 0.05


@dataclass(frozen=True)
class ProbeFigures:
    """How many items of a probe a model knows.

    Attributes:
        items: all of them; half of them are known by guessing.
        before, after: how many the base model and the adapter know.
        lost: how many the base model knows and the adapter does not.
    """

    items: int
    before: int
    after: int
    lost: int

    @classmethod
    def of(cls, before: Sequence[bool], after: Sequence[bool]) -> "ProbeFigures | None":
        """Counts the same items before and after; returns None without any."""
        lost = sum(old and not new for old, new in zip(before, after, strict=True))
        return cls(len(before), sum(before), sum(after), lost) if before else None

    @property
    def is_telling(self) -> bool:
        """Whether the base model knows more than by guessing; else there is nothing to lose."""
        return by_chance(self.before, self.items) <= CHANCE

    @property
    def is_worse(self) -> bool:
        """Whether more is lost than gained, by more than chance; both probes of a training share that chance."""
        gained = self.after - self.before + self.lost
        return self.is_telling and by_chance(self.lost, self.lost + gained) <= CHANCE / 2

    def __str__(self) -> str:
        guessed = "" if self.is_telling else " (no better than guessing, so this tells nothing)"
        return f"{self.after} of {self.items}, {self.before} before{guessed}"


def describe(language: ProbeFigures | None, facts: ProbeFigures | None) -> str:
    """Returns the figures of both probes in words; empty if there are none."""
    return "; ".join(f"{name} {each}" for name, each in (("language", language), ("facts", facts)) if each is not None)


def by_chance(number: int, total: int) -> float:
    """Returns how likely at least `number` of `total` fair coins show heads."""
    return sum(math.comb(total, heads) for heads in range(number, total + 1)) / 2**total
