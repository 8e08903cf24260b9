"""What a training prunes, and how: the pattern, the method, its phases and the layers."""

import re
from dataclasses import dataclass
from typing import Literal, get_args

from sebp_edge.errors import OptionError, suggest

MAX_M = 32
PruningMethod = Literal["sr-ste", "mdgf-linear", "mdgf-exponential", "sdgf-stepwise", "sdgf-geometric"]
METHODS = get_args(PruningMethod)
_PATTERN = re.compile(r"([1-9][0-9]?):([1-9][0-9]?)")


def parse_pattern(text: str) -> tuple[int, int]:
    """Returns N and M of a pattern such as "2:4": of each M neighbours in a row of a weight, N are kept.

    Raises:
        OptionError: it is no pattern with 0 < N < M <= 32.
    """
    found = _PATTERN.fullmatch(text) if isinstance(text, str) else None
    if found is None or not 0 < int(found[1]) < int(found[2]) <= MAX_M:
        raise OptionError(
            f"The pattern is {str(text)[:40]!r}; expected N:M with N below M and M at most {MAX_M}, such as '2:4'."
        )
    return int(found[1]), int(found[2])


@dataclass(frozen=True, kw_only=True)
class PruningRecipe:
    """How linear layers are pruned to N:M while they are trained.

    Attributes:
        pattern: N:M, such as "2:4": of each M neighbouring inputs of an output, N weights are left; M is at most 32.
        method: what happens to pruned weights in the decay phase, see `phases`.
        dense, decay: the shares of the steps in the dense and in the decay phase; the sparse phase has the rest.
            "sr-ste" has no decay phase.
        layers: the ends of the layers' names, such as "gate_proj" or "output.dense"; None for all linear layers but the
            head.

    Raises:
        OptionError: a value is of the wrong type or out of range.
    """

    pattern: str
    method: PruningMethod = "mdgf-exponential"
    dense: float = 0.0
    decay: float = 0.5
    layers: tuple[str, ...] | None = None

    def __post_init__(self):
        parse_pattern(self.pattern)
        if self.method not in METHODS:
            raise OptionError(f"Unknown N:M method {str(self.method)[:40]!r}; {suggest(str(self.method), METHODS)}")
        shares, decay = (self.dense, self.decay), 0 if self.method == "sr-ste" else self.decay
        if not all(type(share) in (int, float) and 0 <= share < 1 for share in shares) or self.dense + decay >= 1:
            raise OptionError(
                f"The dense phase is {str(self.dense)[:40]} and the decay phase {str(self.decay)[:40]} of the steps; "
                "expected shares of at least 0 whose sum is below 1, since the sparse phase has the rest."
            )
        if self.layers is not None:
            if isinstance(self.layers, str) or not all(isinstance(name, str) and name for name in self.layers):
                raise OptionError("The layers to prune must be a list of the ends of their names.")
            object.__setattr__(self, "layers", tuple(self.layers))
