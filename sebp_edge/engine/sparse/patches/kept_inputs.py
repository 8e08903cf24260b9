"""Shares one copy of an input's active rows among successive linear layers that read it (q, k, v; gate, up)."""

import weakref

from torch import Tensor

from sebp_edge.ops import Rows, keep_rows


class KeptInputs:
    """Remembers the last input, by identity and without keeping it alive, and what is kept of it."""

    def __init__(self):
        self.forget()

    def keep(self, x: Tensor, x_cast: Tensor, rows: Rows) -> Tensor:
        """Returns what a layer's backward pass needs of its input; see `keep_rows`."""
        if callable(rows):
            # All of x, without a copy to share; remembered here, it might outlive the graph.
            return keep_rows(x_cast.detach().reshape(-1, x.shape[-1]), rows)
        key = (x._version, x_cast.dtype, id(rows))
        if self._x() is not x or self._key != key:
            self._x, self._key, self._rows = weakref.ref(x), key, rows
            self._kept = keep_rows(x_cast.detach().reshape(-1, x.shape[-1]), rows)
        return self._kept

    def forget(self) -> None:
        """Drops all references; after the forward pass, only the graph keeps what it needs."""
        self._x, self._key, self._rows, self._kept = lambda: None, None, None, None
