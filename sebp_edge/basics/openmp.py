"""How OpenMP's threads wait for each other on the CPU. Imports nothing that takes time."""

import os

# By default, GNU's OpenMP spins for milliseconds. Beside a busy program, a thread that computes is not scheduled while
# others spin for it. So many turns take microseconds: longer than most waits, and shorter than a time slice.
SPINS = "1000"


def spin_briefly() -> None:
    """Lets a thread that waits for others sleep soon, unless the user has set how they wait; no result changes.

    Must be called before torch is imported.
    """
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = SPINS
