"""Sets of words, written as text, and endings of words."""


def listed(words: str) -> frozenset[str]:
    return frozenset(words.split())


def is_genitive(word: str) -> bool:
    return word.endswith(("'s", "’s"))


def has_plural_s(word: str) -> bool:
    """Whether a word ends like a plural, or like a verb after "she"; in lower case."""
    return word.endswith("s") and not word.endswith(("ss", "us", "is"))
