"""One copy of X's active rows for all linear layers that read the same X one after the other (q, k, v; gate, up)."""

import weakref

from torch import Tensor

from sebp_edge.ops import Rows, kept_rows


class KeptInputs:
    """Remembers the last X by identity, without keeping it alive, and what is kept of it."""

    def __init__(self):
        self.forget()

    def keep(self, x: Tensor, x_cast: Tensor, rows: Rows) -> Tensor:
        """What the backward pass of a layer that reads `x` needs of it: see `kept_rows`.

        Args:
            x: what the layer was given.
            x_cast: the same in the dtype of the product.
            rows: the layer's active rows.
        """
        if callable(rows):
            # All of x, which it has anyway; remembered here it might outlive the graph.
            return kept_rows(x_cast.detach().reshape(-1, x.shape[-1]), rows)
        key = (x._version, x_cast.dtype, id(rows))
        if self._x() is not x or self._key != key:
            self._x, self._key, self._rows = weakref.ref(x), key, rows
            self._kept = kept_rows(x_cast.detach().reshape(-1, x.shape[-1]), rows)
        return self._kept

    def forget(self) -> None:
        """Lets go of everything: after the forward pass, only the graph keeps what it needs."""
        self._x, self._key, self._rows, self._kept = lambda: None, None, None, None
