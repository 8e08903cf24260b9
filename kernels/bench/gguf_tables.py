"""The documents' tables of GGUF files: reading, training on them, exporting, and what llama.cpp computes with them."""

from collections.abc import Callable
from functools import partial

from tables import Row, if_recorded, markdown, ms, recorded, rows


def gguf_types() -> str:
    """Seconds for a billion weights of each type, by the number of threads."""
    found = [row for row in rows("gguf-loading") if row.get("to") is None]
    threads = list(dict.fromkeys(row["threads"] for row in found))
    seconds = {(row["what"], row["threads"]): f"{row['seconds_per_billion']:.2f}" for row in found}
    body = [[kind, *(seconds[kind, number] for number in threads)] for kind in dict.fromkeys(key for key, _ in seconds)]
    head = ["type", *(f"{number} thread{'s' * (number > 1)}" for number in threads)]
    return f"{markdown(head, body)}\n\n{recorded('gguf-loading', libraries=('torch',))}"


def gguf_files() -> str:
    """Time and memory of loading whole files."""
    body = [
        [
            row["what"],
            row["to"],
            f"{row['seconds']:.1f} s",
            f"{row['weight_bytes'] / 1e9:.2f} GB",
            f"{row['peak_bytes'] / 1e9:.2f} GB",
            f"{row['peak_bytes'] / row['weight_bytes']:.2f}x",
        ]
        for row in rows("gguf-loading")
        if row.get("to") is not None
    ]
    head = ("file", "loaded to", "time", "weights", "peak", "peak / weights")
    return f"{markdown(head, body)}\n\n{recorded('gguf-loading')}"


def gguf_training() -> str:
    """Times of training steps on the same weights from both kinds of files."""
    found = rows("gguf-training")
    body = [[row["base"], ms(row["step_ms"]), ms(row["fastest_ms"]), f"{row['loss']:.4f}"] for row in found]
    head = ("base", "median step, ms", "fastest step, ms", "first loss")
    return f"{markdown(head, body)}\n\n{recorded('gguf-training')}"


def export_costs() -> str:
    """Time and peak memory of exports."""
    body = [
        [
            row["model"],
            row["quant"],
            "yes" if row["read_back"] == "True" else "no",
            f"{row['seconds']:.0f} s",
            f"{row['peak_bytes'] / 1e9:.2f} GB",
            f"{row['file_bytes'] / 1e9:.2f} GB",
        ]
        for row in rows("export")
    ]
    head = ("model", "file", "model run", "time", "peak", "file size")
    return f"{markdown(head, body)}\n\n{recorded('export')}"


def export_differences() -> str:
    """How predictions differ from those of the file's weights by our reader."""
    by_file: dict[tuple, dict[str, Row]] = {}
    for row in rows("export-differences"):
        by_file.setdefault((row["model"], row["quant"]), {})[row["program"]] = row
    body = []
    for (model, quant), found in by_file.items():
        theirs, rounded = found["llama.cpp"], found.get("sebp-edge, rounded")
        cells = [_difference(theirs), _difference(rounded) if rounded else ""]
        cells += [f"{row['same_likeliest']:.1%}" if row else "" for row in (theirs, rounded)]
        first = [theirs["first_token"], theirs["first_token_rounded"]] if rounded else [theirs["first_token"]]
        body.append([model, quant, *cells, " -> ".join(f"{value:.0e}" for value in first)])
    head = ("model", "file", "llama.cpp", "rounded", "same, llama.cpp", "same, rounded", "first token")
    return f"{markdown(head, body)}\n\n{recorded('export-differences')}"


def _difference(row: Row) -> str:
    return f"{row['mean_difference']:.1e} ({row['largest_difference']:.1e})"


TABLES: dict[str, Callable[[], str]] = {
    "export-costs": partial(if_recorded, "export", export_costs),
    "export-differences": partial(if_recorded, "export-differences", export_differences),
    "gguf-files": partial(if_recorded, "gguf-loading", gguf_files),
    "gguf-training": partial(if_recorded, "gguf-training", gguf_training),
    "gguf-types": partial(if_recorded, "gguf-loading", gguf_types),
}
