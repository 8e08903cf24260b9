"""Runs mlx-lm on a base model with an exported adapter, in a child process, in fp32."""

import sys
from importlib.util import find_spec
from pathlib import Path

from sebp_edge.export.child import Predicted, run
from sebp_edge.stopping import Check


def is_installed() -> bool:
    """Whether mlx-lm can be run."""
    return find_spec("mlx_lm") is not None and find_spec("mlx") is not None and not getattr(sys, "frozen", False)


def predict(base: Path, adapter: Path, rows: list[list[int]], check: Check) -> Predicted:
    """Returns what mlx-lm predicts after each token of `rows`.

    Raises:
        ExportError: it cannot read the folders.
    """
    return run(__name__, "mlx-lm", {"base": str(base), "adapter": str(adapter), "rows": rows}, check)


def _answer(request: dict, top: int) -> dict:
    """Computes the answer, in the child process."""
    import mlx.core as mx
    import mlx.nn as nn
    import mlx_lm

    model, _ = mlx_lm.load(request["base"], adapter_path=request["adapter"])
    model.set_dtype(mx.float32)
    predicted = []
    for row in request["rows"]:
        for values in nn.log_softmax(model(mx.array([row]))[0], axis=-1):
            likeliest = mx.argsort(-values)[:top].tolist()
            predicted.append([(token, values[token].item()) for token in likeliest])
    return {"predicted": predicted, "tokens": []}
