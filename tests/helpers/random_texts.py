"""Random texts that share next to nothing, and edited copies of texts."""

import random

WORDS = ["".join(random.Random(number).choices("abcdefghijklmnopqrstuvwxyz", k=6)) for number in range(3000)]

# Characters of one to four bytes, scripts of both directions, joined emoji, blanks of many kinds, a control token.
ALPHABET = [
    *(*"abcdefghij the and. , !?\n\n\n\t  ", *"åéß日本語。שלוםمرحبا\u00a0\u3000\u2028🙂"),
    *("👨‍👩‍👧", "e\u0301", "नमस्ते", "<|eos|>", "12", "\n\n"),
]


def words(count: int, seed) -> str:
    """Returns random words, the same for the same seed."""
    return " ".join(random.Random(f"words {seed}").choices(WORDS, k=count))


def edit(text: str, share: float, seed=0) -> str:
    """Replaces, deletes and inserts a share of the words."""
    draw = random.Random(f"edit {seed}")
    edited = text.split(" ")
    for place in draw.sample(range(len(edited)), int(share * len(edited))):
        edited[place] = draw.choice(["", draw.choice(WORDS), f"{edited[place]} {draw.choice(WORDS)}"])
    return " ".join(edited)


def of_split(drawn, name: str) -> list[int]:
    """Returns the documents that a draw has put into a split."""
    return [document for document, split in drawn.split_of.items() if split == name]
