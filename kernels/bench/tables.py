"""The documents' tables of speed, memory and quality, each a function from recorded results to Markdown.

`documents.py` writes them between their markers. `paper_tables.py` has those that stand beside the SEBP paper's.
"""

import csv
import json
import re
from collections.abc import Callable, Iterable
from functools import partial
from statistics import mean

import evidence

Row = dict[str, str | int | float | None]

LIBRARIES = ("torch", "triton", "transformers", "peft")
NOT_RECORDED = "Not recorded yet."

# The trainers of peers.py in plain English, in the order of the tables. Others follow under their own names.
ARMS = {
    "hf padded to 4096": "HF, padded to 4096",
    "hf dynamic padding": "HF, dynamic padding",
    "hf packed varlen": "HF, packed, varlen attention",
    "hf packed varlen adamw8bit": "HF, packed, varlen attention, AdamW of bitsandbytes",
    "hf compiled": "HF, packed, varlen attention, `torch.compile` with graphs",
    "hf graph": "HF, packed, varlen attention, captured graph",
    "liger packed varlen": "Liger, packed, varlen attention",
    "unsloth dynamic padding": "Unsloth, dynamic padding",
    "unsloth packed": "Unsloth, packed",
    "drop-in padded to 4096": "sebp-edge, drop-in, padded to 4096",
    "sebp-edge all rows": "sebp-edge, eager, all rows in head and last layer",
    "sebp-edge hoisted": "sebp-edge, eager",
    "sebp-edge step torch adamw": "sebp-edge, AdamW of torch",
    "sebp-edge step": "**sebp-edge**",
}
OURS = "sebp-edge step"
# Rows that the short table leaves out.
SECONDARY = (*(ARMS[arm] for arm in ARMS if "sebp-edge" in ARMS[arm] and arm != OURS), "sebp-edge / limit")
RIVALS_WITHOUT_GRAPHS = (
    *(ARMS[arm] for arm in ("hf packed varlen", "liger packed varlen")),
    "fastest other trainer / sebp-edge",
)

# Of 160 shapes of linear layers, those that are shown: layer, rows, share that is active, and where those rows are.
SHOWN_LAYERS = (
    ("3072->8192", 4096, 0.015, "random"),
    ("3072->8192", 4096, 0.2, "random"),
    ("3072->8192", 16384, 0.015, "1 span"),
    ("3072->8192", 16384, 0.2, "random"),
    ("3072->8192", 16384, 0.2, "1 span"),
    ("3072->8192", 16384, 0.2, "32 spans"),
    ("8192->3072", 16384, 0.2, "random"),
    ("3072->3072", 16384, 0.2, "random"),
    ("3072->1024", 16384, 0.2, "32 spans"),
    ("768->3072", 16384, 0.2, "32 spans"),
)
# How close to the limit a layer is meant to be, by where its active rows are.
LAYER_GOALS = {"1 span": 1.15, "random": 1.3, "8 spans": 1.15, "32 spans": 1.15}


# -------------------------------------------------------------------------------------------------------------- results


def index() -> dict[str, dict]:
    """The entries of results.json by name."""
    return json.loads(evidence.RESULTS.read_text(encoding="utf-8"))


def rows(name: str) -> list[Row]:
    """The rows of a recorded table; a cell is a number where it can be, and None where it is empty."""
    with (evidence.RESULTS.parent / index()[name]["table"]).open(newline="", encoding="utf-8") as file:
        return [{key: _value(cell) for key, cell in row.items()} for row in csv.DictReader(file)]


def _value(cell: str) -> str | int | float | None:
    for kind in (int, float):
        try:
            return kind(cell)
        except ValueError:
            pass
    return cell or None


def if_recorded(result: str, table: Callable[[], str]) -> str:
    """The table of a result, or a sentence if nothing was recorded yet."""
    return table() if result in index() else NOT_RECORDED


def recorded(*names: str, libraries: Iterable[str] = LIBRARIES) -> str:
    """One sentence on where results come from: machine, commit, versions and files."""
    entries, said = index(), {}
    for name in names:
        said.setdefault(_origin(entries[name], libraries), []).append(f"`{entries[name]['table']}`")
    return "\n".join(f"{origin}: {', '.join(tables)}." for origin, tables in said.items())


def _origin(entry: dict, libraries: Iterable[str]) -> str:
    commit = entry["commit"][:7] + (" with uncommitted changes" if entry["uncommitted"] else "")
    versions = (
        f"{each.replace('_', '-')} {entry['versions'][each]}" for each in libraries if each in entry["versions"]
    )
    machine = f"an {entry['gpu']}" if entry["gpu"] else entry["cpu"]
    return f"Recorded on {machine} at commit {commit} ({', '.join(versions)})"


def markdown(head: Iterable[str], body: Iterable[Iterable[str]]) -> str:
    head = list(head)
    first, *others = ("|" + "".join(f" {cell} |" if cell else " |" for cell in cells) for cells in (head, *body))
    return "\n".join([first, "|---" * len(head) + "|", *others])


def ms(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def between(values: Iterable[float], form: str = ".1f") -> str:
    """The smallest and the largest value, such as "1.7 to 2.0"."""
    values = list(values)
    low, high = (format(end, form) for end in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


# -------------------------------------------------------------------------------------------------- a step beside peers


def peers(name: str, left_out: tuple[str, ...] = ()) -> str:
    """A step of every recorded arm: ms and peak GiB by the number of texts."""
    found = rows(name)
    batches = dict(sorted((row["texts"], row["tokens"]) for row in found if row["tokens"]))
    arms = sorted({row["arm"]: None for row in found}, key=lambda arm: [*ARMS, arm].index(arm))
    cells = {(row["arm"], row["texts"]): row for row in found}
    head = (f"{texts} text{'s' * (texts > 1)}, {tokens:,} tokens" for texts, tokens in batches.items())
    body = [[_arm(cells, arm), *(_peer_cell(cells[arm, texts]) for texts in batches)] for arm in arms]
    ours = [cells[OURS, texts] for texts in batches]
    body.append(["fastest other trainer / sebp-edge", *(_ratio(1, row["to_fastest_peer"]) for row in ours)])
    body.append(["limit", *(ms(row["limit_ms"]) if row["limit_ms"] else "" for row in ours)])
    body.append(["sebp-edge / limit", *(_ratio(row["to_limit"], 1) for row in ours)])
    libraries = evidence.LIBRARIES if any("unsloth" in arm or "liger" in arm for arm in arms) else LIBRARIES
    table = markdown(["ms (GiB)", *head], [row for row in body if row[0] not in left_out])
    return f"{table}\n\n{recorded(name, libraries=libraries)}"


def _ratio(value: float | None, by: float | None) -> str:
    return f"{value / by:.1f}" if value and by else ""


def _arm(cells: dict[tuple, Row], arm: str) -> str:
    """An arm's name, with the format of AdamW's moments if all weights are trained and the rows say it."""
    moments = {row.get("moments") for (name, _), row in cells.items() if name == arm and row["trained"] == "all"}
    return ", moments in ".join([ARMS.get(arm, arm), *filter(None, moments)])


def _peer_cell(row: Row) -> str:
    if row["status"] != "ok":
        # Such as "not run with more than 4 texts" and "ended with code 1: ...".
        return re.split(" with |[:,]", row["status"])[0]
    time = f"**{ms(row['step_ms'])}**" if row["arm"] == OURS else ms(row["step_ms"])
    return f"{time} ({row['peak_gib']:.1f})"


def peers_gradients() -> str:
    """One sentence on the gradient errors that every arm was gated by."""
    errors: dict[bool, list[float]] = {True: [], False: []}
    for row in rows("peers"):
        if row["status"] == "ok":
            errors["sebp-edge" in ARMS.get(row["arm"], row["arm"])].append(100 * row["gradient_error"])
    ours, others = between(errors[True]), between(errors[False])
    return f"{ours} % in sebp-edge and {others} % in the other trainers (`results/peers.csv`)."


# ----------------------------------------------------------------------------------------------------------- whole runs


def end_to_end() -> str:
    found = rows("end-to-end")
    head = ("", "import", "load", "texts", "attach", "compile, capture", "steps", "evaluation", "samples, save, exit", "all")
    body = []
    for row in found:
        parts = [row[part] for part in ("import", "load", "texts", "attach", "capture", "steps", "evaluation")]
        parts.append(row["save"] + row["exit"])
        cache = "first time" if row["triton_cache"] == "empty" else "kernels in Triton's cache"
        about = f"{row['notes']} notes ({row['tokens']:,} tokens, {row['steps_done']:,} steps), {cache}"
        body.append([about, *(f"{part:.1f}" for part in (*parts, sum(parts)))])
    return f"{markdown(head, body)}\n\n{recorded('end-to-end')}"


def memory() -> str:
    found = [row for row in rows("memory") if not row["failed"]]
    refused = [row for row in rows("memory") if row["failed"]]
    head = ("shape, budget, texts", "plan", "predicted", "held", "torch's allocator", "tokens/s")
    body = [
        [
            f"{row['shape']}, {_budget(row)}, {row['data'].split(',')[0]}",
            json.loads(row["plan"])["description"],
            f"{row['predicted_gb']:.2f}",
            f"{row['peak_gb']:.2f}",
            f"{row['allocator_gb']:.2f}",
            f"{row['tokens_per_second']:,.0f}",
        ]
        for row in found
    ]
    body += [[f"{row['shape']}, {_budget(row)}, {row['data'].split(',')[0]}", "refused", *[""] * 4] for row in refused]
    return f"{markdown(head, body)}\n\n{_held(found, 'peak_gb')} {recorded('memory')}"


def memory_families() -> str:
    found = rows("memory-families")
    head = ("shape, budget", "plan", "predicted", "held", "held beside predicted")
    body = [
        [
            f"{row['shape']}, {_budget(row)}",
            json.loads(row["plan"])["description"],
            f"{row['predicted_gb']:.2f}",
            f"{row['held_gb']:.2f}",
            f"{row['held_gb'] / row['predicted_gb'] - 1:+.1%}".replace("%", " %"),
        ]
        for row in found
    ]
    return f"{markdown(head, body)}\n\n{_held(found, 'held_gb')} {recorded('memory-families')}"


def _budget(row: Row) -> str:
    return row["budget"].replace("GB", " GB")


def _held(found: list[Row], column: str) -> str:
    """One sentence: how many runs held no more than their budgets and plans, and how far from their plans they were."""
    budgets = sum(row[column] <= float(row["budget"].removesuffix("GB")) for row in found)
    off = [100 * (row[column] / row["predicted_gb"] - 1) for row in found]
    return (
        f"Of {len(found)} trainings {budgets} held no more than their budget and {sum(each <= 0 for each in off)} no "
        f"more than their plan ({min(off):+.1f} to {max(off):+.1f} % beside it)."
    )


# ---------------------------------------------------------------------------------------------------- single operations


def layers() -> str:
    found = {(row["layer"], row["rows"], row["active"], row["pattern"]): row for row in rows("layers")}
    head = ("layer", "rows", "active", "dense", "index", "ours", "limit", "ours / limit", "dense / ours")
    body = []
    for key in SHOWN_LAYERS:
        row, (layer, count, share, pattern) = found[key], key
        times = (f"{row[column]:.3f}" for column in ("dense", "index", "ours", "limit"))
        ratios = (f"{row['ours'] / row['limit']:.2f}", f"{row['dense'] / row['ours']:.1f}")
        body.append([layer.replace("->", " -> "), str(count), f"{100 * share:g} %, {pattern}", *times, *ratios])
    return f"{markdown(head, body)}\n\n{recorded('layers')}"


def layers_summary() -> str:
    body = []
    for pattern, goal in LAYER_GOALS.items():
        found = [row["ours"] / row["limit"] for row in rows("layers") if row["pattern"] == pattern]
        body.append(
            [pattern, str(len(found)), f"{sum(each <= goal for each in found)} within {goal}", f"{max(found):.2f}"]
        )
    return markdown(("active rows", "shapes", "ours / limit", "at most"), body)


def lora_groups() -> str:
    found = [row for row in rows("layers") if row["peft"]]
    counts = list(dict.fromkeys(row["rows"] for row in found))
    groups: dict[str, list[str]] = {}
    for row in found:
        groups.setdefault(row["layer"], []).append(
            f"{row['peft']:.3f} -> {row['ours']:.3f}, {row['peft'] / row['ours']:.1f}x"
        )
    head = ["group", *(f"{count} rows" for count in counts)]
    return markdown(head, ([group, *cells] for group, cells in groups.items()))


def attention() -> str:
    found = rows("attention")
    batches = list(dict.fromkeys((row["texts"], row["tokens"]) for row in found))
    heads: dict[str, list[str]] = {}
    for row in found:
        flash, ours = (row[f"{whose} forward"] + row[f"{whose} backward"] for whose in ("flash", "our"))
        heads.setdefault(row["model"], []).append(f"{flash:.0f} -> {ours:.0f}, {flash / ours:.1f}x")
    head = ["heads of", *(f"{texts} text{'s' * (texts > 1)}, {tokens:,} tokens" for texts, tokens in batches)]
    body = ([model, *cells] for model, cells in heads.items())
    return f"{markdown(head, body)}\n\n{recorded('attention')}"


def safety_net() -> str:
    found = {row["case"]: row for row in rows("safety-net")}
    names = ("drop-in", "drop-in, logits returned", "detect")
    shown = {"detect": 'rows found in every pass (`rows="detect"`)'}
    body = [["dense", "", f"{found['dense']['ms']:.0f} ms"]]
    for name in names:
        cells = (found[f"{name}, {which}"] for which in ("first pass", "later passes"))
        body.append([shown.get(name, name), *(f"{row['ms']:.0f} ms, {row['peak_gib']:.1f} GiB" for row in cells)])
    trial = (
        f"The trial on a small copy before a hoisted training took {found['trial on a small copy']['ms']:.0f} ms there."
    )
    table = markdown(("", "first pass, trials included", "later passes"), body)
    return f"{table}\n\n{trial} {recorded('safety-net')}"


def families() -> str:
    found = rows("families")
    names = ", ".join(row["family"] for row in found)
    padded = ", ".join(row["family"] for row in found if row["hoisted"] != "True")
    eager = ", ".join(row["family"] for row in found if row["hoisted"] == "True" and row["graphs"] <= 1)
    errors = {column: 100 * max(row[column] for row in found) for column in found[0] if column.endswith("_error")}
    return (
        f"{len(found)} families: {names}.\n\n"
        f"Losses were within {errors['loss_error']:.1f} % and gradient norms within {errors['norm_error']:.1f} % of "
        f"the dense model's in fp32 (the dense model in bf16: {errors['dense_bf16_loss_error']:.1f} and "
        f"{errors['dense_bf16_norm_error']:.1f} %). On padded batches: {padded}. Without CUDA graphs: {eager}.\n"
        f"{recorded('families')}"
    )


# ------------------------------------------------------------------------------------------------------------- on a CPU


def cpu_steps() -> str:
    found = rows("cpu-steps")
    dense = {row["trained"]: row for row in found if row["variant"] == "dense padded"}
    trained = {"lora": "LoRA", "full": "all weights"}
    body = []
    for row in found:
        base = dense[row["trained"]]
        if row is not base:
            ratios = (f"{base[f'{part}_ms'] / row[f'{part}_ms']:.1f}x" for part in ("forward", "backward", "step"))
            body.append([f"{trained[row['trained']]}, {row['variant']}", *ratios])
    return f"{markdown(('', 'forward', 'backward', 'step'), body)}\n\n{recorded('cpu-steps', libraries=('torch',))}"


def notes_quality() -> str:
    """What an adaptation gains and costs, for each model and texts, seed by seed."""
    groups: dict[tuple, list[Row]] = {}
    for row in rows("notes-quality"):
        groups.setdefault((row["model"], row["texts"]), []).append(row)
    body = [
        [
            model,
            texts,
            _losses(found),
            ", ".join(f"{100 * row['gain']:.1f} ({100 * row['at_least']:.1f})" for row in found),
            ", ".join(f"{row['refit_validation']:.2f}" for row in found),
            ", ".join(f"{100 * (row['general_after'] / row['general_before'] - 1):+.1f}" for row in found),
            ", ".join(str(row["copied_tokens"]) for row in found),
            ", ".join(row["verdict"] for row in found),
            ", ".join(f"{row['seconds']:.0f}" for row in found),
        ]
        for (model, texts), found in groups.items()
    ]
    head = ("model", "texts", "test loss", "gain, %", "refit", "general text, %", "copied", "verdict", "seconds")
    return f"{markdown(head, body)}\n\n{recorded('notes-quality')}"


def _losses(found: list[Row]) -> str:
    return ", ".join(f"{row['before']:.3f} -> {row['after']:.3f}" for row in found)


def four_bit_quality() -> str:
    bases: dict[str, list[Row]] = {}
    for row in rows("four-bit-quality"):
        bases.setdefault(row["base"], []).append(row)
    body = []
    for base, found in bases.items():
        before, after = (mean(row[when] for row in found) for when in ("before", "after"))
        cells = (f"{row['before']:.3f} -> {row['after']:.3f}" for row in found)
        body.append([base, *cells, f"{before:.3f} -> {after:.3f}", f"{100 * (1 - after / before):.1f} %"])
    head = ["base", *(f"seed {row['seed']}" for row in found), "mean", "fall"]
    apart = max(abs(one["after"] - other["after"]) for one, other in zip(*bases.values(), strict=True))
    return (
        f"{markdown(head, body)}\n\nAfter training the two bases are at most {apart:.3f} nats apart with one seed.\n"
        f"{recorded('four-bit-quality')}"
    )


def export_gain() -> str:
    """How much of an adapter's gain each quantisation keeps, trained as usual and for it: means over seeds."""
    groups: dict[tuple, dict[str | None, list[Row]]] = {}
    for row in rows("export-gain"):
        group = groups.setdefault((row["model"], row["texts"], row["quant"]), {})
        group.setdefault(row["trained_for"], []).append(row)
    body = []
    for group, found in groups.items():
        usual, own = found[None], found.get(group[-1], [])
        gains = [row["base"] - row["adapter"] for row in usual]
        losses = [mean(row[name] for row in usual) for name in ("base", "adapter", "rounded_base", "rounded")]
        losses += [mean(row["rounded"] for row in own)] if own else []
        cells = [f"{loss:.3f}" for loss in losses]
        shares = (
            [(row["rounded_base"] - row["rounded"]) / gain for row, gain in zip(each, gains, strict=True)]
            for each in (usual, own)
            if each
        )
        kept = [", ".join(f"{100 * share:.0f}" for share in each) for each in shares]
        body.append([*group, *cells, *[""] * (5 - len(cells)), *kept, *[""] * (2 - len(kept))])
    head = ["model", "notes", "file", "base", "adapter", "rounded base", "rounded", "rounded, trained for it"]
    head += ["gain kept, %", "trained for it, %"]
    return f"{markdown(head, body)}\n\n{recorded('export-gain')}"


def recipes() -> str:
    by_recipe: dict[tuple, list[Row]] = {}
    for row in rows("recipes"):
        by_recipe.setdefault((row["recipe"], row["texts"]), []).append(row)
    body = (
        [recipe, texts, ", ".join(str(row["seed"]) for row in found), _losses(found)]
        for (recipe, texts), found in by_recipe.items()
    )
    return f"{markdown(('recipe', 'texts', 'seeds', 'test loss before -> after'), body)}\n\n{recorded('recipes')}"


def recipe_values() -> str:
    """By how much the test loss fell with each setting, on average over seeds."""
    settings: dict[tuple, dict[str, list[float]]] = {}
    for row in rows("recipe-values"):
        setting = row["learning_rate"], row["r"], row["batch_tokens"], row["epochs"]
        settings.setdefault(setting, {}).setdefault(row["texts"], []).append(row["gain"])
    all_texts = list(dict.fromkeys(texts for found in settings.values() for texts in found))
    body = []
    for setting, found in sorted(settings.items()):
        falls = (f"{100 * mean(found[texts]):.1f} %" if texts in found else "" for texts in all_texts)
        body.append([*map(str, setting), *falls])
    table = markdown(("learning rate", "r", "loss tokens per step", "epochs", *all_texts), body)
    return f"{table}\n\n{recorded('recipe-values')}"


def chat_settings() -> str:
    """The test loss and the general loss after each setting of the recipes chat and instruct, as means over seeds."""
    found: dict[tuple, list[Row]] = {}
    for row in rows("chat-settings"):
        found.setdefault((row["recipe"], row["texts"], row["setting"]), []).append(row)
    body = [
        [
            *group,
            f"{len(own)}",
            f"{mean(row['before'] for row in own):.3f} -> {mean(row['after'] for row in own):.3f}",
            f"{round(100 * mean(row['general_rise'] for row in own), 1) + 0.0:+.1f} %",
            f"{mean(row['steps'] for row in own):.0f}",
        ]
        for group, own in found.items()
    ]
    head = ("recipe", "texts", "setting", "seeds", "test loss before -> after", "general loss", "steps")
    return f"{markdown(head, body)}\n\n{recorded('chat-settings')}"


# --------------------------------------------------------------------------------------------------------- several GPUs


def several_gpus() -> str:
    """Steps and peaks of each way to train on several GPUs; throughput relative to one GPU's, in the same variant."""
    found, body = {(row["gpus"], row["way"], row["variant"]): row for row in rows("several-gpus")}, []
    alone = {variant: row["step_ms"] for (gpus, _, variant), row in found.items() if gpus == 1}
    for gpus, way in dict.fromkeys(key[:2] for key in found):
        pair = {variant: found[gpus, way, variant] for variant in alone}
        steps = [f"{ms(row['step_ms'])} ms" for row in pair.values()]
        throughput = [f"{gpus * alone[variant] / row['step_ms']:.2f}" for variant, row in pair.items()]
        peaks = [f"{row['peak_gib']:.1f} GiB" for row in pair.values()]
        body.append([way if gpus == 1 else f"{gpus} GPUs, {way}", *steps, *throughput, *peaks])
    columns = ("step", "throughput", "peak per GPU")
    table = markdown(("", *(f"{column}, {variant}" for column in columns for variant in alone)), body)
    return f"{table}\n\n{recorded('several-gpus')}"


# ------------------------------------------------------------------------------------------------------------- the gate

GATE_TEST = "jackknife, t at 98.5 %"
GATE_RIVALS = (
    "jackknife, t at 97.5 %",
    "ratio, t",
    "ratio, t at 98 %",
    "differences, t at 97.5 %",
    "studentised bootstrap",
)


def gate_base() -> str:
    """How often each test keeps what has exactly the margin, in per cent: the worst of the recorded noises."""
    found = rows("gate-base")
    settings = list(dict.fromkeys(row["setting"] for row in found))
    body = []
    for test in dict.fromkeys(row["test"] for row in found):
        at_margin = [row for row in found if row["test"] == test and row["true_gain"] == row["bound"]]
        usual = [row for row in at_margin if "unequal" not in row["noise"]]
        cells = [_worst_rate(row for row in usual if row["setting"] == setting) for setting in settings]
        body.append([_chosen(test), *cells, _worst_rate(row for row in at_margin if row not in usual)])
    table = markdown(("% kept at the margin", *settings, "more unequal sizes"), body)
    return f"{table}\n\n{recorded('gate-base', libraries=('python',))}"


def gate_power() -> str:
    """The power of the chosen test and its rivals, in per cent."""
    found = rows("gate-base")
    settings = list(dict.fromkeys(row["setting"] for row in found))
    body = []
    for test in (GATE_TEST, *GATE_RIVALS):
        cells = []
        for setting in settings:
            chosen = [row for row in found if (row["test"], row["setting"]) == (test, setting)]
            cells.append(", ".join(f"{100 * row['rate']:.0f}" for row in chosen if row["true_gain"] > row["bound"]))
        body.append([_chosen(test), *cells])
    return markdown(("% kept at 2, 5 and 10 %", *settings), body)


def gate_active() -> str:
    """How often the chosen test accepts a version instead of the active one, in per cent."""
    found = [row for row in rows("gate-active") if row["test"] == GATE_TEST]
    alike = [row for row in found if row["noise"] in ("other seed", "other notes")]
    settings = list(dict.fromkeys(row["setting"] for row in found))
    worse = [row for row in found if row["true_gain"] == row["bound"]]
    cells = (_worst_rate(row for row in worse if row["setting"] == setting) for setting in settings)
    body = [["", "worse by the tolerance", *cells]]
    for bound in sorted({row["bound"] for row in found}, reverse=True):
        for gain in sorted({row["true_gain"] for row in found if row["true_gain"] >= 0}):
            accepted = [row for row in alike if (row["bound"], row["true_gain"]) == (bound, gain)]
            shares = (
                [f"{100 * row['rate']:.0f}" for row in accepted if row["setting"] == setting] for setting in settings
            )
            better = f"{100 * gain:.0f} % better" if gain else "equally good"
            body.append([f"{-100 * bound:.0f} %", better, *(", ".join(each) for each in shares)])
    table = markdown(("tolerance", "% accepted of versions that are", *settings), body)
    return f"{table}\n\n{recorded('gate-active', libraries=('python',))}"


def gate_verdicts() -> str:
    """How many runs the chosen test keeps, with their true gains for each author."""
    found = rows("gate-verdicts")
    settings = list(dict.fromkeys(row["setting"] for row in found))
    body = []
    for case in dict.fromkeys(row["case"] for row in found):
        cells = []
        for setting in settings:
            of_case = [row for row in found if (row["case"], row["setting"]) == (case, setting)]
            gains = ", ".join(f"{100 * row['true_gain']:.1f} %" for row in of_case)
            kept, number = (sum(row[column] for row in of_case) for column in ("kept", "trials"))
            cells.append(f"{gains}: {kept:,} of {number:,}" if of_case else "")
        body.append([case, *cells])
    return f"{markdown(('trained on', *settings), body)}\n\n{recorded('gate-verdicts', libraries=('python',))}"


def _worst_rate(found: Iterable[Row]) -> str:
    """The highest rate and its standard error, in per cent."""
    row = max(found, key=lambda row: row["rate"], default=None)
    return f"{100 * row['rate']:.1f} ± {100 * row['error']:.1f}" if row else ""


def _chosen(test: str) -> str:
    return f"**{test}**" if test == GATE_TEST else test


TABLES: dict[str, Callable[[], str]] = {
    "attention": attention,
    "cpu-steps": cpu_steps,
    "end-to-end": end_to_end,
    "export-gain": partial(if_recorded, "export-gain", export_gain),
    "families": families,
    "four-bit-quality": four_bit_quality,
    "gate-active": gate_active,
    "gate-base": gate_base,
    "gate-power": gate_power,
    "gate-verdicts": gate_verdicts,
    "layers": layers,
    "layers-summary": layers_summary,
    "lora-groups": lora_groups,
    "memory": memory,
    "memory-families": memory_families,
    "notes-quality": notes_quality,
    "recipe-values": recipe_values,
    "chat-settings": chat_settings,
    "recipes": recipes,
    "peers-gradients": peers_gradients,
    "peers-short": lambda: peers("peers", SECONDARY),
    "safety-net": safety_net,
    "several-gpus": several_gpus,
    **{name: partial(peers, name) for name in index() if name.startswith("peers")},
    # That run had no rival in a graph, so its rivals are not shown.
    "peers-loss-share": lambda: peers("peers-loss-share", RIVALS_WITHOUT_GRAPHS),
}
