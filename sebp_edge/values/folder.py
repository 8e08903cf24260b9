"""A folder of texts, and the patterns of the files that are read."""

import re
from dataclasses import dataclass
from pathlib import Path

from sebp_edge.errors import OptionError

# Patterns become regular expressions, which take a time that is exponential in this number of asterisks.
MAX_ASTERISKS = 4


@dataclass(frozen=True)
class Folder:
    """A folder of texts, of which only some files are read.

    Patterns have the syntax of .gitignore, such as "*.md", "drafts/" or "/2024/**".

    Attributes:
        path: the folder; a file is read whatever the patterns are.
        include: reads only files that match one of these patterns; all files if it is empty.
        exclude: leaves out files and folders that match one of these patterns.

    Raises:
        OptionError: a pattern is not valid.
    """

    path: str | Path
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()

    def __post_init__(self):
        for name in ("include", "exclude"):
            patterns = getattr(self, name)
            if isinstance(patterns, str):
                raise OptionError(f"{name} is a list of patterns, but a string was given; write [{patterns!r}].")
            object.__setattr__(self, name, tuple(patterns))
            for pattern in patterns:
                if not is_valid_pattern(pattern):
                    raise OptionError(
                        f"{name} has {pattern!r}, which is not a valid pattern; write it as in .gitignore, with "
                        f"{MAX_ASTERISKS} asterisks at most."
                    )


def is_valid_pattern(pattern: str) -> bool:
    """Returns whether a pattern can be used: it is valid, and has few asterisks."""
    if pattern.startswith("#"):
        return True
    if "\0" in pattern or pattern.replace("**", "*").count("*") > MAX_ASTERISKS:
        return False
    from pathspec import GitIgnoreSpec  # most folders have no patterns

    try:
        GitIgnoreSpec.from_lines([pattern])
    except (ValueError, re.error):
        return False
    return True
