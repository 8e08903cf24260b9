"""Calculates how often the quiz of the recipe `ask` finds a gain, by the number of its questions.

    python kernels/bench/quality/quiz_power.py [--record [FILE]]

A share of the questions is answered right after a training and not before, another one the other way round; the gain is
what lies between. The quiz finds it by a sign test on both. The questions are taken to be independent.
"""

import math
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

import evidence
from sebp_edge.values.probe_figures import CHANCE, by_chance

SOURCES = ("sebp_edge/values/probe_figures.py", "sebp_edge/engine/training/quiz.py", __file__)
QUESTIONS, GAINS, LOST = (63, 100, 150, 200, 250, 313, 400), (0, 0.05, 0.1, 0.15), (0.02, 0.05, 0.08, 0.1, 0.12, 0.15)


def main(arguments: list[str] | None = None) -> None:
    options = evidence.parser(__doc__).parse_args(arguments)
    rows = [evidence.show(row) for row in measured()]
    evidence.record("quiz-power", SOURCES, rows, options.record, on_cpu=True)


def measured() -> Iterator[dict]:
    for gain in GAINS:
        for lost in LOST:
            found = {f"of_{number}": round(power(number, lost + gain, lost), 4) for number in QUESTIONS}
            yield {"gain": gain, "lost": lost} | found


def power(questions: int, gained: float, lost: float) -> float:
    """Returns the share of quizzes that find a gain, for the shares of questions that are gained and lost."""
    differ = gained + lost
    return sum(
        binomial(questions, number, differ)
        * sum(binomial(number, more, gained / differ) for more in range(least(number), number + 1))
        for number in range(questions + 1)
    )


@cache
def least(differ: int) -> int:
    """Returns how many of the questions that differ must be gained at least."""
    return next((more for more in range(differ + 1) if by_chance(more, differ) <= CHANCE), differ + 1)


def binomial(total: int, number: int, share: float) -> float:
    return math.comb(total, number) * share**number * (1 - share) ** (total - number)


if __name__ == "__main__":
    main()
