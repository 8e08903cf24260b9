"""SEBP for researchers: the sparse backward pass in a model and a training loop of their own.

    from sebp_edge.research import HoistedEncoder, sparsify

sparsify, Sparsified            the drop-in, and the handle that it returns
TopN, Threshold, DroppedRows    sparsify(rows=...): rules that drop rows, and what they have dropped
Hoisted, HoistedEncoder         decoders and encoders on their active rows only
RowPlan, ActiveTokens           a batch's active rows, and their tokens, which hoisted models take
CapturedGradients               gradients of hoisted models by replays of CUDA graphs
learning_rates                  a recipe's learning rate at each step

`sebp_edge.ops` has the operations, `sebp_edge.errors` the errors.
"""

from sebp_edge.rows.active_tokens import ActiveTokens
from sebp_edge.rows.row_plan import RowPlan
from sebp_edge.rows.selection import DroppedRows, Threshold, TopN
from sebp_edge.sparse.hoist import Hoisted
from sebp_edge.sparse.hoist_encoder import HoistedEncoder
from sebp_edge.sparse.sparsify import Sparsified, sparsify
from sebp_edge.training.captured_gradients import CapturedGradients
from sebp_edge.training.loop import learning_rates

__all__ = [
    "ActiveTokens",
    "CapturedGradients",
    "DroppedRows",
    "Hoisted",
    "HoistedEncoder",
    "RowPlan",
    "Sparsified",
    "Threshold",
    "TopN",
    "learning_rates",
    "sparsify",
]
