"""Limits the CPU time that a test's code takes, on a machine of any speed."""

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager

TEXT = "the [[boat](green) *sails*, <b>and</b> the &amp; wind: 17 knots\n" * 200
PATTERN = re.compile(r"\[\[(\w+)\]|<(\w+)>|&\w+;|\d+\s\w+")
# CPU seconds that `read` takes on the machine that the tests' limits are for.
USUAL = 0.0125


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Fails if the code takes more CPU seconds; a slower machine, or a core that others share, gets more of them."""
    begin = time.process_time()
    yield
    taken = time.process_time() - begin
    if taken > seconds:
        begin = time.process_time()
        read()
        pace = (time.process_time() - begin) / USUAL
        assert taken < seconds * pace, f"{taken:.2f} CPU seconds, on a machine of {pace:.1f} times the usual ones"


def read() -> None:
    """Computes what readers do: with a pattern, words and a dictionary."""
    counts = {}
    for _ in range(20):
        for found in PATTERN.finditer(TEXT):
            counts[found[0]] = counts.get(found[0], 0) + 1
        for word in TEXT.split():
            counts[word.strip(".,:*")] = counts.get(word, 0) + len(word)
