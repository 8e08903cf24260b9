"""Finds what would make a gain on some texts meaningless, before training.

Random strings and shuffled words are found by the order of neighbours. In a language, two neighbours such as "t" and
"h", or "of" and "the", mostly stand in the same order; in random texts they stand in either order equally often. This
works for any alphabet. It needs no language, and pairs must only occur twice.
"""

import zlib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from itertools import pairwise

from sebp_edge.basics.units import percent

# Sizes in characters: of the sample that is checked, of the part of it that is tokenised, of their pieces.
SAMPLE, TOKENISED_SAMPLE, PIECE = 1_000_000, 100_000, 10_000
# Texts are random if the preference of neighbours is below this. Of 15,000 real texts, those with words have 0.15 or
# more for characters (tables of numbers 0.06) and 0.31 or more for words; random ones have at most 0.04 and 0.2.
MIN_CHARACTER_PREFERENCE, MIN_WORD_PREFERENCE = 0.05, 0.25
# The preference is known from this number of neighbours, in pairs that occur twice.
MIN_CHARACTERS, MIN_WORDS = 400, 60
# Shorter lines, in words, may be tags, which may stand in any order.
MIN_LINE = 5
# Texts repeat themselves if they can be compressed to less than this share; it is 0.2 or more in real texts.
MIN_COMPRESSED = 0.03
MAX_DUPLICATES, MAX_UNKNOWN_TOKENS = 0.5, 0.05


def find_concerns(
    texts: Collection[str], cluster_of: Mapping[int, int], num_exact_duplicates: int, tokenizer
) -> tuple[str, ...]:
    """Returns what makes a gain on these texts meaningless, each as a sentence for the user; usually nothing.

    Large texts are sampled.

    Args:
        cluster_of: the cluster of near-duplicates that each document is in.
        num_exact_duplicates: how many documents were left out since they equal others.
    """
    places = [(text, begin) for text in texts for begin in range(0, len(text), PIECE)]
    step = _step(sum(map(len, texts)), SAMPLE)
    pieces = [text[begin : begin + PIECE] for text, begin in places[::step]]
    sample = pieces[:: _step(sum(map(len, pieces)), TOKENISED_SAMPLE)]
    return (
        *_concerns_about_order(pieces),
        *_concerns_about_duplicates(cluster_of, num_exact_duplicates),
        *_concerns_about_repetition(pieces),
        *_concerns_about_tokens("\n".join(sample), tokenizer),
    )


def _step(size: int, sample: int) -> int:
    """Returns n so that every n-th piece makes `sample` characters or fewer, if the pieces are of one size."""
    return max(1, -(-size // sample))


def _concerns_about_order(pieces: list[str]) -> Iterator[str]:
    characters, words = Counter(), Counter()
    for piece in pieces:
        characters.update(pairwise(piece))
        for line in map(str.split, piece.split("\n")):
            if len(line) >= MIN_LINE:
                # Numbers and operators, and the items of a list with commas, may stand in any order too.
                words.update(pair for pair in pairwise(line) if pair[0].isalpha() and pair[1].isalpha())
    if _order_preference(characters, MIN_CHARACTERS) < MIN_CHARACTER_PREFERENCE:
        yield (
            "The characters of these texts stand in no order, as in keys or encoded files, so there is nothing to "
            "learn but how often each one occurs; leave such texts out."
        )
    elif _order_preference(words, MIN_WORDS) < MIN_WORD_PREFERENCE:
        yield (
            "The words of these texts stand in no order, as in shuffled or generated texts, so there is nothing "
            "to learn but how often each one occurs; give texts of sentences."
        )


def _order_preference(pairs: Counter, min_neighbours: int) -> float:
    """Returns how strongly neighbours prefer one order: 1 if each pair always has the same order, 0 if at random.

    It is the mean of (p - q)^2 over pairs {a, b} that occur n > 1 times, weighted by n, where p and q are the
    probabilities of "ab" and "ba"; ((ab - ba)^2 - n) / (n (n - 1)) of the counts estimates it without bias. Returns 1
    if these pairs have fewer neighbours than `min_neighbours`.
    """
    total, neighbours = 0.0, 0
    for (first, second), count in pairs.items():
        opposite = pairs.get((second, first), 0)
        if first == second or (opposite and second < first):
            continue  # the opposite pair counts both
        both = count + opposite
        if both > 1:
            total += ((count - opposite) ** 2 - both) / (both - 1)
            neighbours += both
    return total / neighbours if neighbours >= min_neighbours else 1.0


def _concerns_about_duplicates(cluster_of: Mapping[int, int], num_exact_duplicates: int) -> Iterator[str]:
    documents = num_exact_duplicates + len(cluster_of)
    duplicates = documents - len(set(cluster_of.values()))
    if duplicates > MAX_DUPLICATES * documents:
        yield (
            f"{duplicates} of {documents} documents are copies or near-duplicates of another one, so a lower loss says "
            "little about new texts; give each text once."
        )


def _concerns_about_repetition(pieces: list[str]) -> Iterator[str]:
    encoded = [piece.encode() for piece in pieces]
    # Each on its own, since many chats begin with the same long message.
    compressed = sum(len(zlib.compress(piece, 1)) for piece in encoded)
    if compressed < MIN_COMPRESSED * sum(map(len, encoded)):
        yield "These texts repeat a few characters or lines over and over; give texts with more content."


def _concerns_about_tokens(text: str, tokenizer) -> Iterator[str]:
    # In a user's text, "<|eos|>" is text, not the control token.
    tokens = tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]
    if len(tokens) > len(text):
        yield (
            f"This model's tokenizer needs {len(tokens) / len(text):.1f} tokens for each character of these texts, so "
            "it cannot read their language or symbols; choose a model that was made for them."
        )
    unknown = tokens.count(tokenizer.unk_token_id) if tokenizer.unk_token_id is not None else 0
    if unknown > MAX_UNKNOWN_TOKENS * len(tokens):
        yield (
            f"This model's tokenizer does not know {percent(unknown / len(tokens), 0)} of these texts; choose a model "
            "that was made for their language or symbols."
        )
