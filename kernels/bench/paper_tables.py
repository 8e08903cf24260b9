"""The tables of PAPER.md, which stand beside those of the SEBP paper; each a function from results to Markdown."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from statistics import mean, stdev

from sebp_edge.insight import paper
from tables import Row, between, markdown, ms, recorded, rows

LENGTHS = Path(__file__).with_name("lengths.json")
DENSE, GRAPH = "dense padded", "hoisted, in a graph"
VARIANTS = ("drop-in", "hoisted", GRAPH)

# The data sets of tiny-analysis, by their names in the paper's Table 2.
ANALYZED = {"WikiText": "WikiText-2", "Winogrande": "Winogrande", "ARC-E": "ARC-E", "ARC-C": "ARC-C"}
ANALYZED["OASST1 (512)"] = "OASST1"
# Those of the encoders' tables that were counted, by their names in the paper's Tables 1 and 11.
COUNTED = {"SST2": "SST-2", "CoLA": "CoLA", "MRPC": "MRPC", "RTE": "RTE", "MNLI": "MNLI"}

# The columns of a share's mean, largest and smallest layer.
ENDS = ("", "_max", "_min")
# The tasks of gradients-minilm-l6, by their names in the paper's Tables 1 and 11.
TASKS = {"SST2": "sst2", "CoLA": "cola", "MRPC": "mrpc", "RTE": "rte"}

SELECTED = ("stories260k", "tiny", "minilm-l6")


# --------------------------------------------------------------------------------------------- how sparse gradients are


def tiny_analysis() -> str:
    """Table 2 beside ours: shares of rows by data set, of the MLP's two halves."""
    table, found = _paper_table(2), rows("tiny-analysis")
    texts = list(dict.fromkeys(row["texts"] for row in found))
    columns = [table.datasets.index(name) for name in ANALYZED]
    rest = [""] * (len(texts) - len(columns))

    def printed(shares: paper.Rows) -> list[str]:
        return [_spread(*(part[column] for part in shares)) for column in columns] + rest

    def ours(column: str) -> list[str]:
        halves = ([row[column] for row in found if row["texts"] == name] for name in texts)
        return [", ".join(_share(value) for value in pair) for pair in halves]

    body = [
        ["paper, mean tokens of 4096", *(f"{table.tokens[0][column]}" for column in columns), *rest],
        ["paper, intermediate", *printed(table.intermediate)],
        ["paper, output", *printed(table.output)],
        ["ours, mean tokens of 512", *(f"{_first(found, name)['mean_tokens']:.0f}" for name in texts)],
        ["padding", *(_share(_first(found, name)["padding"]) for name in texts)],
        ["rows exactly zero", *ours("zero")],
        ["of the others, how many hold 99 % of the squared norm", *ours("holding_99")],
        ["rows that are zero or below the knee", *ours("zero_or_below_knee")],
        ["of the squared norm, below the knee", *ours("energy_below_knee")],
    ]
    below = [100 * row["energy_below_knee"] for row in found]
    needed = [100 * row["holding_99"] for row in found]
    return (
        f"{markdown(['', *texts], body)}\n\nRows below the knee hold {between(below, '.0f')} % of the squared norm; "
        f"{between(needed, '.0f')} % of the rows that are not zero hold 99 % of it.\n{recorded('tiny-analysis')}"
    )


def encoder_padding() -> str:
    """Tables 1 and 11 beside the shares of padding that follow from texts' lengths."""
    datasets = _paper_table(1).datasets
    columns = [datasets.index(name) for name in COUNTED]

    def printed(number: int) -> list[str]:
        table = _paper_table(number)
        halves = ((table.intermediate[0][column], table.output[0][column]) for column in columns)
        return [" / ".join(map(_share, pair)) for pair in halves]

    body = [
        ["paper, mean tokens", *(str(_paper_table(1).tokens[0][column]) for column in columns)],
        ["ours, mean tokens", *(f"{_mean_length(name):.1f}" for name in COUNTED.values())],
        ["paper, Table 1 (BERT), intermediate / output", *printed(1)],
        ["paper, Table 11 (RoBERTa), intermediate / output", *printed(11)],
        *(
            [f"counted, {context}", *(_share(_padding(name, context)) for name in COUNTED.values())]
            for context in (128, 512)
        ),
    ]
    return f"{markdown(['', *COUNTED.values()], body)}\n\nCounted from `lengths.json`, not measured."


def encoder_gradients() -> str:
    """Tables 1 and 11 beside what was measured on an encoder: shares of zero rows, and of elements below epsilon."""
    found = rows("gradients-minilm-l6")
    columns = [_paper_table(1).datasets.index(name) for name in TASKS]

    def printed(number: int, half: str) -> list[str]:
        shares = getattr(_paper_table(number), half)
        return [_spread(*(part[column] for part in shares)) for column in columns]

    def ours(half: str, context: int, column: str) -> list[str]:
        found_rows = [_one(found, texts=name, context=context, layers=half) for name in TASKS.values()]
        return [_spread(*(row[f"{column}{end}"] for end in ENDS)) for row in found_rows]

    body = [["padding to 512; to 128", *(_paddings(found, name) for name in TASKS.values())]]
    for half in ("intermediate", "output"):
        body += [[f"paper, Table {number}, {half}", *printed(number, half)] for number in (1, 11)]
        for context in (512, 128):
            body.append([f"ours, {half}, {context}: zero", *ours(half, context, "zero")])
            body.append([f"ours, {half}, {context}: below epsilon", *ours(half, context, "below_epsilon")])
    body.append(
        ["epsilon, 512", *(f"{_one(found, texts=name, context=512)['epsilon']:.2e}" for name in TASKS.values())]
    )
    lost = [100 * row["energy_below_epsilon"] for row in found]
    return (
        f"{markdown(['', *TASKS], body)}\n\nElements below epsilon hold {between(lost)} % of the squared norm.\n"
        f"{recorded('gradients-minilm-l6')}"
    )


def decoder_gradients() -> str:
    """Table 2 beside what was measured on a decoder, with a loss on tokens only and on padding too."""
    table, found = _paper_table(2), rows("gradients-smollm2-135m-instruct")
    texts = list(dict.fromkeys(row["texts"] for row in found))
    names = {ours: theirs for theirs, ours in ANALYZED.items()}
    body = [["padding to 512", *(_share(_one(found, texts=name)["padding"]) for name in texts)]]
    for half in ("intermediate", "output"):
        shares = getattr(table, half)
        columns = [table.datasets.index(names[name]) for name in texts]
        body.append([f"paper, {half}", *(_spread(*(part[column] for part in shares)) for column in columns)])
        for loss in ("every token", "every token and padding"):
            each = [_one(found, texts=name, layers=half, loss=loss) for name in texts]
            kinds = {"zero": "zero", "below_epsilon": "below epsilon"}
            body += [
                [
                    f"ours, {half}, loss on {loss}: {words}",
                    *(_spread(*(row[f"{column}{end}"] for end in ENDS)) for row in each),
                ]
                for column, words in kinds.items()
            ]
            body.append(["of the squared norm, below epsilon", *(_share(row["energy_below_epsilon"]) for row in each)])
    for loss in ("every token", "every token and padding"):
        values = (f"{_one(found, texts=name, loss=loss)['epsilon']:.2e}" for name in texts)
        body.append([f"epsilon, loss on {loss}", *values])
    return f"{markdown(['', *texts], body)}\n\n{recorded('gradients-smollm2-135m-instruct')}"


def _one(found: list[Row], **cells: str | int) -> Row:
    """The first row with these cells."""
    return next(row for row in found if all(row[name] == value for name, value in cells.items()))


def _paddings(found: list[Row], texts: str) -> str:
    return "; ".join(_share(_one(found, texts=texts, context=context)["padding"]) for context in (512, 128))


def _paper_table(number: int) -> paper.PaperTable:
    return next(table for table in paper.TABLES if table.number == number)


def _first(found: list[Row], texts: str) -> Row:
    return next(row for row in found if row["texts"] == texts)


def _share(value: float) -> str:
    return f"{value:.2f}"


def _spread(average: float, largest: float, smallest: float) -> str:
    """Such as "0.82 (0.99, 0.49)"; the average alone if all are the same."""
    return _share(average) + (f" ({_share(largest)}, {_share(smallest)})" if largest != smallest else "")


def _counts(texts: str) -> list[int]:
    return json.loads(LENGTHS.read_text(encoding="utf-8"))[texts]["counts"]


def _mean_length(texts: str, longest: float = math.inf) -> float:
    counts = _counts(texts)
    return sum(min(length, longest) * count for length, count in enumerate(counts)) / sum(counts)


def _padding(texts: str, context: int) -> float:
    return 1 - _mean_length(texts, context) / context


# --------------------------------------------------------------------------------------------------------- whole models


def whole_models(name: str) -> str:
    """GPU time of the backward pass, wall time of a step and peak memory of each case, in four variants."""
    cases: dict[str, dict[str, Row]] = {}
    for row in rows(name):
        case = f"{row['model']}, {row['texts']}, {row['batch_size']} x {row['context_length']}"
        cases.setdefault(case, {})[row["variant"]] = row
    body = []
    for case, found in cases.items():
        dense = found[DENSE]
        body.append([case, _times(dense), *(_beside(dense, found[variant]) for variant in VARIANTS)])
    table = markdown(("", "dense", "drop-in", "hoisted", GRAPH), body)
    return f"{table}\n\n{_gains(list(cases.values()))}\n{recorded(name)}"


def _times(row: Row) -> str:
    return f"{ms(row['gpu_backward_ms'])}, {ms(row['step_ms'])}, {row['peak_gib']:.1f}"


def _beside(dense: Row, row: Row) -> str:
    backward, step = (dense[column] / row[column] for column in ("gpu_backward_ms", "step_ms"))
    return f"{_times(row)}: {backward:.1f}x, {step:.1f}x"


def _gains(cases: list[dict[str, Row]]) -> str:
    """What each variant gains over all cases, from the least to the most."""
    sentences = []
    for variant in VARIANTS:
        pairs = [(found[DENSE], found[variant]) for found in cases]
        backward, step = (
            [dense[column] / row[column] for dense, row in pairs] for column in ("gpu_backward_ms", "step_ms")
        )
        peak = [100 * row["peak_gib"] / dense["peak_gib"] for dense, row in pairs]
        sentences.append(
            f"- {variant}: {between(backward)} times as fast as dense in GPU time of the backward pass, "
            f"{between(step)} in wall time of a step, with {between(peak, '.0f')} % of its memory"
        )
    return "\n".join(sentences) + "\n"


# -------------------------------------------------------------------------------------------------------------- quality


def selection_quality() -> str:
    """The same trainings in five variants, over seeds: what each loses beside dense."""
    settings: dict[str, dict[str, list[Row]]] = {}
    for model in SELECTED:
        for row in rows(f"selection-quality-{model}"):
            settings.setdefault(f"{row['model']}, {row['texts']}", {}).setdefault(row["variant"], []).append(row)
    # Older results have fewer variants.
    variants = dict.fromkeys(name for found in settings.values() for name in found if name not in ("dense", "exact"))
    found = list(settings.values())
    body = [
        ["steps; padded rows of a batch; with gradient", *(_sizes(each["dense"]) for each in found)],
        ["test loss before", *(f"{mean(_column(each['dense'], 'heldout_before')):.3f}" for each in found)],
        ["dense, after", *(_with_error(_column(each["dense"], "heldout_loss")) for each in found)],
        ["exact, apart from dense", *(f"at most {max(map(abs, _more(each, 'exact'))):.0e}" for each in found)],
        *([f"{name}, more than dense", *(_lost(each, name) for each in found)] for name in variants),
        *(
            [f"accuracy: {name}", *(_accuracy(each.get(name, each["dense"][:0])) for each in found)]
            for name in ("dense", "exact", *variants)
        ),
    ]
    table = markdown(["", *settings], body)
    return f"{table}\n\n{recorded(*(f'selection-quality-{model}' for model in SELECTED), libraries=('torch',))}"


def _sizes(dense: list[Row]) -> str:
    return f"{dense[0]['steps']}; {dense[0]['rows']}; {mean(_column(dense, 'active')):.0f}"


def _column(found: list[Row], name: str) -> list[float]:
    return [row[name] for row in found]


def _more(variants: dict[str, list[Row]], variant: str) -> list[float]:
    """How much more test loss a variant ends with than dense, by seed."""
    pairs = zip(_column(variants[variant], "heldout_loss"), _column(variants["dense"], "heldout_loss"), strict=True)
    return [loss - dense for loss, dense in pairs]


def _lost(variants: dict[str, list[Row]], variant: str) -> str:
    """Such as "+0.515 ± 0.026; lost 20 %; 48 % kept": nothing is lost where dense learns nothing."""
    if variant not in variants:
        return ""
    dense = variants["dense"]
    gain = mean(_column(dense, "heldout_before")) - mean(_column(dense, "heldout_loss"))
    parts = [_with_error(_more(variants, variant), "+.3f")]
    if gain > 0:
        parts.append(f"lost {100 * mean(_more(variants, variant)) / gain:.0f} %")
    if variants[variant][0]["kept"] is not None:
        parts.append(f"{100 * mean(_column(variants[variant], 'kept')):.0f} % kept")
    return "; ".join(parts)


def _accuracy(found: list[Row]) -> str:
    return "" if not found or found[0]["accuracy"] is None else _with_error(_column(found, "accuracy"))


def _with_error(values: list[float], form: str = ".3f") -> str:
    return f"{format(mean(values), form)} ± {stdev(values) / math.sqrt(len(values)):.3f}"


# ------------------------------------------------------------------------------------------------------------ DeepSpeed


def zero_offload() -> str:
    found, body, dense, slower = rows("zero-offload"), [], None, []
    for row in found:
        times = [f"{ms(row[f'{part}_ms'])} ms" for part in ("forward", "backward", "step")]
        if row["variant"] == "dense":
            dense = row
            case = f"{row['model']}, {row['texts']}, {row['batch_size']} x {row['context_length']}, dense"
        else:
            case, ratio = "DeepSpeed", row["backward_ms"] / dense["backward_ms"]
            slower.append(ratio)
            times[1] += f", {ratio:.1f} times as long"
        body.append([case, *times, f"{row['peak_gib']:.1f} GiB"])
    table = markdown(("", "forward", "backward", "step", "peak"), body)
    return f"{table}\n\nIts backward pass takes {between(slower)} times as long as dense.\n{recorded('zero-offload')}"


def selection_times() -> str:
    """A forward and a backward pass of each selection, and how many times as long as with exact rows it takes."""
    times: dict[str, dict[int, float]] = {}
    for row in rows("selection-times"):
        times.setdefault(row["variant"], {})[row["active"]] = row["ms"]
    exact = times["exact"]
    body = (
        [variant, *(f"{ms(time)} ms, {time / exact[active]:.2f}x" for active, time in found.items())]
        for variant, found in times.items()
    )
    head = ("rows", *(f"{active:,} of {rows('selection-times')[0]['rows']:,} rows carry gradient" for active in exact))
    return f"{markdown(head, body)}\n\n{recorded('selection-times')}"


TABLES: dict[str, Callable[[], str]] = {
    "decoder-gradients": decoder_gradients,
    "decoders": lambda: whole_models("decoders"),
    "encoder-gradients": encoder_gradients,
    "encoder-padding": encoder_padding,
    "encoders": lambda: whole_models("encoders"),
    "selection-quality": selection_quality,
    "selection-times": selection_times,
    "tiny-analysis": tiny_analysis,
    "zero-offload": zero_offload,
}
