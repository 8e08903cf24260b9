"""The versions of the libraries that compute, on which the bits of a training depend."""

import functools
import importlib.metadata
import platform
from contextlib import suppress

# Reading it takes 4 ms for each package.
_version = functools.cache(importlib.metadata.version)


def package_versions() -> dict[str, str]:
    """Returns the versions of Python and of the libraries that compute."""
    versions = {"python": platform.python_version()}
    for name in ("torch", "transformers", "peft", "safetensors"):
        with suppress(importlib.metadata.PackageNotFoundError):  # a frozen app may lack it
            versions[name] = _version(name)
    return versions
