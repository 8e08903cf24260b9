"""sebp-edge: a language model learns its owner's texts, on the owner's own machine.

    from pathlib import Path
    from sebp_edge import Personalizer
    result = Personalizer().adapt(Path("notes"))

Names are imported on first use, so that `sebp-edge --help` does not load torch.
"""

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

_HOMES = {
    "AdaptResult": "sebp_edge.result",
    "AdapterStore": "sebp_edge.adapters.store",
    "Personalizer": "sebp_edge.personalizer",
    "Recipe": "sebp_edge.recipe",
    "SebpEdgeError": "sebp_edge.errors",
    "sparsify": "sebp_edge.sparse.sparsify",
}

__all__ = ["AdaptResult", "AdapterStore", "Personalizer", "Recipe", "SebpEdgeError", "__version__", "sparsify"]

if TYPE_CHECKING:
    from sebp_edge.adapters.store import AdapterStore
    from sebp_edge.errors import SebpEdgeError
    from sebp_edge.personalizer import Personalizer
    from sebp_edge.recipe import Recipe
    from sebp_edge.result import AdaptResult
    from sebp_edge.sparse.sparsify import sparsify


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module 'sebp_edge' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
