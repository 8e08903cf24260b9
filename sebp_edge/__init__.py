"""sebp-edge: adapts a language model to its owner's texts, on the owner's machine.

    from pathlib import Path
    from sebp_edge import Personalizer
    result = Personalizer().adapt(Path("notes"))

Names are imported on first use, so that `sebp-edge --help` does not load torch. `sebp_edge.events`, `sebp_edge.errors`,
`sebp_edge.research` and `sebp_edge.ops` are public too; all other modules are internal.
"""

import importlib
from pathlib import Path
from typing import TYPE_CHECKING

from sebp_edge.basics.version import __version__

# An installed package has `ops` and `recipes` in it; in a checkout, they lie in other folders.
if not Path(__path__[0], "ops").is_dir():
    __path__ += [str(Path(__path__[0]).parent / "kernels"), str(Path(__path__[0]).parent)]

_HOMES = {
    "AdaptResult": "sebp_edge.run.result",
    "Adapter": "sebp_edge.store.adapter",
    "AdapterRecord": "sebp_edge.store.record",
    "AdapterStore": "sebp_edge.store.adapter_store",
    "Analysis": "sebp_edge.research.analysis.analysis",
    "Answer": "sebp_edge.ask.answer",
    "Completion": "sebp_edge.engine.models.completion",
    "ExportResult": "sebp_edge.export.export_result",
    "Folder": "sebp_edge.values.folder",
    "Inspection": "sebp_edge.run.inspection",
    "Personalizer": "sebp_edge.personalizer",
    "Plan": "sebp_edge.engine.memory.memory_plan",
    "Politeness": "sebp_edge.machine.politeness",
    "Receipt": "sebp_edge.store.erasure",
    "Recipe": "sebp_edge.recipe",
    "SavedAdapter": "sebp_edge.store.saved",
    "SebpEdgeError": "sebp_edge.errors",
    "UnchangedResult": "sebp_edge.run.unchanged",
    "sparsify": "sebp_edge.engine.sparse.sparsify",
}

__all__ = [
    "AdaptResult",
    "Adapter",
    "AdapterRecord",
    "AdapterStore",
    "Analysis",
    "Answer",
    "Completion",
    "ExportResult",
    "Folder",
    "Inspection",
    "Personalizer",
    "Plan",
    "Politeness",
    "Receipt",
    "Recipe",
    "SavedAdapter",
    "SebpEdgeError",
    "UnchangedResult",
    "__version__",
    "sparsify",
]

if TYPE_CHECKING:
    from sebp_edge.ask.answer import Answer
    from sebp_edge.engine.memory.memory_plan import Plan
    from sebp_edge.engine.models.completion import Completion
    from sebp_edge.engine.sparse.sparsify import sparsify
    from sebp_edge.errors import SebpEdgeError
    from sebp_edge.export.export_result import ExportResult
    from sebp_edge.machine.politeness import Politeness
    from sebp_edge.personalizer import Personalizer
    from sebp_edge.recipe import Recipe
    from sebp_edge.research.analysis.analysis import Analysis
    from sebp_edge.run.inspection import Inspection
    from sebp_edge.run.result import AdaptResult
    from sebp_edge.run.unchanged import UnchangedResult
    from sebp_edge.store.adapter import Adapter
    from sebp_edge.store.adapter_store import AdapterStore
    from sebp_edge.store.erasure import Receipt
    from sebp_edge.store.record import AdapterRecord
    from sebp_edge.store.saved import SavedAdapter
    from sebp_edge.values.folder import Folder


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module 'sebp_edge' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
