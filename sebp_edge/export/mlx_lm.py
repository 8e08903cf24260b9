"""Runs mlx-lm on a model, with an adapter or without one, in a child process, in fp32."""

import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from sebp_edge.export.child import Predicted, run
from sebp_edge.export.export_result import ExportProgress

_WITHOUT_WINDOWS = ("mistral", "qwen2", "qwen3", "smollm3", "gemma2", "phi3")


def is_installed() -> bool:
    """Whether mlx-lm can be run."""
    return find_spec("mlx_lm") is not None and find_spec("mlx") is not None and not getattr(sys, "frozen", False)


def what_it_lacks(config) -> Iterator[str]:
    """Yields what mlx-lm computes otherwise than transformers with a model, a sentence each."""
    window = getattr(config, "sliding_window", None)
    if config.model_type in _WITHOUT_WINDOWS and window and window < config.max_position_embeddings:
        yield (
            f"mlx-lm has no sliding windows for {config.model_type} models, so it computes something else for texts of "
            f"more than {window:,} tokens."
        )
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope" and rope["long_factor"] != rope["short_factor"]:
        yield (
            "mlx-lm has only the rotary embeddings for long texts of this model, so it computes something else for "
            f"texts of up to {rope['original_max_position_embeddings']:,} tokens."
        )


def predict(base: Path, adapter: Path | None, rows: list[list[int]], progress: ExportProgress) -> Predicted:
    """Returns what mlx-lm predicts after each token of `rows`, with the folder of a model, and maybe an adapter's."""
    request = {"base": str(base), "adapter": adapter and str(adapter), "rows": rows}
    return run(__name__, "mlx-lm", request, progress)


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
