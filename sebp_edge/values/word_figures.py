"""Figures of a test that a person feels: next words that are guessed, and keystrokes that ghost text saves."""

from dataclasses import dataclass

from sebp_edge.basics.units import percent


@dataclass(frozen=True)
class WordFigures:
    """What ghost text would have done in test documents, before and after a training; without boilerplate lines.

    Attributes:
        keystrokes: all characters.
        saved_before, saved_after: how many of them ghost text would have saved, with the base model and with the
            adapter, if a person accepts what is right, word by word or all of it, with a key each.
        saved_more_lowest, saved_more_highest: a 95 % interval of how many more are saved after than before, as a share
            of all; None if there are too few documents for one.
        words: all words that follow a space.
        guessed_before, guessed_after: how many of them are the likeliest next word.
        guessed_more_lowest, guessed_more_highest: as of the keystrokes, as a share of the words.
        is_typed: whether suggestions after each key are counted; in older records, only words after a space.
    """

    keystrokes: int
    saved_before: int
    saved_after: int
    saved_more_lowest: float | None
    saved_more_highest: float | None
    words: int
    guessed_before: int
    guessed_after: int
    guessed_more_lowest: float | None
    guessed_more_highest: float | None
    is_typed: bool = False

    @property
    def saved(self) -> tuple[str, str]:
        """The share of keystrokes saved before and after: "3.1 %"."""
        before, after = (percent(saved / max(1, self.keystrokes)) for saved in (self.saved_before, self.saved_after))
        return before, after

    @property
    def guessed(self) -> tuple[int, int]:
        """How many of 100 next words were guessed before and after."""
        before, after = (round(100 * found / max(1, self.words)) for found in (self.guessed_before, self.guessed_after))
        return before, after

    @property
    def more_saved(self) -> str:
        """The interval of the keystrokes saved more than before, in words; empty if there is none."""
        return _interval(self.saved_more_lowest, self.saved_more_highest)

    @property
    def more_guessed(self) -> str:
        """The interval of the words guessed more than before, in words; empty if there is none."""
        return _interval(self.guessed_more_lowest, self.guessed_more_highest)

    @property
    def sentence(self) -> str:
        """How many keys the texts take; empty if there are too few documents, or only words after a space count."""
        if not self.is_typed or self.saved_more_lowest is None or self.saved_more_highest is None:
            return ""
        before, after = (100 - 100 * saved / self.keystrokes for saved in (self.saved_before, self.saved_after))
        digits = 0 if abs(before - after) >= 1 else 1
        chance = ", which may be chance" if self.saved_more_lowest <= 0 <= self.saved_more_highest else ""
        keys = f"{after:.{digits}f} of 100 keys, {before:.{digits}f} before"
        return f"Typing your texts with its suggestions takes {keys}{chance}."


def _interval(lowest: float | None, highest: float | None) -> str:
    """Formats an interval of a difference of shares of all keystrokes or words."""
    if lowest is None or highest is None:
        return ""
    low, high = (percent(abs(share)) for share in (lowest, highest))
    if lowest >= 0:
        return f"between {low} and {high} more"
    if highest <= 0:
        return f"between {high} and {low} fewer"
    return f"from {low} fewer to {high} more"
