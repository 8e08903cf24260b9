"""The documents' tables of GGUF files and of exports: reading, training, writing, and what other programs compute."""

from collections.abc import Callable
from functools import partial

from tables import Row, if_recorded, markdown, ms, recorded, rows

# Losses that are closer than this, in nats, are the same.
SAME_LOSS = 5e-4


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


def merged_models() -> str:
    """Losses of merged models in other programs, with the older names in config.json and without them."""
    found: dict[str, dict[tuple, Row]] = {}
    for row in rows("merged-models"):
        found.setdefault(row["model"], {})[row["when"], row["program"]] = row
    programs = list(dict.fromkeys(program for one in found.values() for _, program in one))
    body = []
    for model, by_program in found.items():
        cells = [f"{next(iter(by_program.values()))['ours']:.4f}"]
        cells += [_loss(by_program["after", program]) for program in programs]
        cells += [_loss(by_program["before", program]) for program in programs[1:]]
        body.append([model, *cells])
    version = {row["program"]: row["version"] for one in found.values() for row in one.values()}
    named = [f"{program.split()[0]} {version[program]}" for program in programs]
    head = ("model", "sebp-edge", *named, *(f"before, {each}" for each in named[1:]))
    return f"{markdown(head, body)}\n\n{recorded('merged-models')}"


def _loss(row: Row) -> str:
    """A loss, in bold if it is not ours."""
    return f"{row['loss']:.4f}" if abs(row["loss"] - row["ours"]) < SAME_LOSS else f"**{row['loss']:.4f}**"


TABLES: dict[str, Callable[[], str]] = {
    "export-costs": partial(if_recorded, "export", export_costs),
    "export-differences": partial(if_recorded, "export-differences", export_differences),
    "merged-models": partial(if_recorded, "merged-models", merged_models),
    "gguf-files": partial(if_recorded, "gguf-loading", gguf_files),
    "gguf-training": partial(if_recorded, "gguf-training", gguf_training),
    "gguf-types": partial(if_recorded, "gguf-loading", gguf_types),
}
