"""SEBP for researchers: the sparse backward pass in your own model and training loop.

    from sebp_edge.research import HoistedEncoder, sparsify

sparsify, Sparsified            the drop-in, and the handle it returns
TopN, Threshold, Energy, DroppedRows
                                rules that drop rows, for sparsify(rows=...), and what they dropped
Hoisted, HoistedEncoder         decoders and encoders that compute active rows only
RowPlan, ActiveTokens           the active rows of a batch, and their tokens: the input of hoisted models
CapturedGradients               gradients of hoisted models by replayed CUDA graphs
nm_sparse, NmSparse             N:M sparsity: training that ends with N of each M neighbouring weights
semi_structured, SemiStructured inference with 2:4 weights by torch's sparse kernels
learning_rates                  a recipe's learning rate at each step
analyze                         how sparse a model's gradients are on texts

The operations are in `sebp_edge.ops`, the errors in `sebp_edge.errors`. guide/for-researchers.md shows how to use each.
The folder has what only researchers need; what they share with `Personalizer` stays where it is:

rules                 TopN, Threshold and Energy
pruning               N:M sparsity in your own loop; inference with 2:4 weights
analysis              how sparse gradients are
"""

from sebp_edge.engine.sparse.hoist_encoder import HoistedEncoder
from sebp_edge.engine.sparse.hoist_if_exact import HoistedIfExact as Hoisted
from sebp_edge.engine.sparse.rows.active_tokens import ActiveTokens
from sebp_edge.engine.sparse.rows.row_plan import RowPlan
from sebp_edge.engine.sparse.rows.row_rule import DroppedRows
from sebp_edge.engine.sparse.sparsify import Sparsified, sparsify
from sebp_edge.engine.training.captured_gradients import CapturedGradients
from sebp_edge.engine.training.loop import learning_rates
from sebp_edge.research.analysis.analysis import analyze
from sebp_edge.research.pruning.nm_sparse import NmSparse, nm_sparse
from sebp_edge.research.pruning.semi_structured import SemiStructured, semi_structured
from sebp_edge.research.rules.selection import Energy, Threshold, TopN

__all__ = [
    "ActiveTokens",
    "CapturedGradients",
    "DroppedRows",
    "Energy",
    "Hoisted",
    "HoistedEncoder",
    "NmSparse",
    "RowPlan",
    "SemiStructured",
    "Sparsified",
    "Threshold",
    "TopN",
    "analyze",
    "learning_rates",
    "nm_sparse",
    "semi_structured",
    "sparsify",
]
