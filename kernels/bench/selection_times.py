"""Times approximate selections of rows beside the exact ones, over a sweep: does dropping active rows pay?

    python kernels/bench/selection_times.py [--record [FILE]]   the shape of Llama-3.2-3B on a GPU, rows of 4096 tokens
    python kernels/bench/selection_times.py --tiny              a small shape on the CPU, to try it

One text of the mean length of WikiText-2, padded, and one that fills the context; all weights trained, random weights.
"top n" keeps a share of the active rows, so its time depends on n alone; what `Threshold` and `Energy` keep in real
models is in selection_quality.py. Milliseconds of a forward and a backward pass, medians after the first pass.
"""

import argparse
import statistics
from collections.abc import Callable, Iterator

import torch
from torch import nn
from transformers import LlamaConfig

import evidence
from models import TINY, known_config, make_model, text_lengths
from safety_net import PASSES, measure_time_and_peak
from sebp_edge import sparsify
from sebp_edge.insight.bench.timer import seconds
from sebp_edge.machine.devices import release_memory
from sebp_edge.rows.active_tokens import ActiveTokens
from sebp_edge.rows.row_plan import IGNORE, RowPlan
from sebp_edge.rows.selection import Energy, Threshold, TopN
from sebp_edge.sparse.hoist import Hoisted
from sebp_edge.texts.batches import Batch

SHARES = (0.1, 0.25, 0.5, 0.75, 1.0)
SOURCES = (
    *evidence.STEP,
    "sebp_edge/insight/bench/timer.py",
    "kernels/bench/models.py",
    "kernels/bench/safety_net.py",
    __file__,
)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true")
    evidence.add_record_option(parser)
    options = parser.parse_args(arguments)
    if options.tiny and options.record:
        parser.error("--record is for GPU runs only; leave out --record or --tiny.")
    device, context = torch.device("cpu" if options.tiny else "cuda"), 128 if options.tiny else 4096
    config = LlamaConfig(vocab_size=320, **TINY) if options.tiny else known_config("llama-3.2-3b")
    model, found = make_model(config, device).train(), []
    for active in (min(int(text_lengths("WikiText-2", 1)), context // 2), context):
        batch = make_batch(config.vocab_size, active, context, device)
        for name, ms, peak in measured(model, batch, active, device):
            found.append({"active": active, "rows": context, "variant": name, "ms": ms, "peak_gib": peak})
            print(f"{active:>6} of {context} {name:16}{ms:>10.1f} ms{peak or 0:>8.1f} GiB", flush=True)
    if options.record:
        evidence.record("selection-times", SOURCES, found, options.record)


def make_batch(vocab_size: int, active: int, context: int, device: torch.device) -> Batch:
    """One text of this many random tokens, right-padded."""
    is_real_1T = torch.arange(context)[None] < active
    input_ids_1T = torch.randint(10, vocab_size, (1, context)) * is_real_1T
    labels_1T = input_ids_1T.masked_fill(~is_real_1T, IGNORE)
    return Batch(input_ids_1T.to(device), is_real_1T.long().to(device), labels_1T.to(device), plan=None)


def measured(
    model: nn.Module, batch: Batch, active: int, device: torch.device
) -> Iterator[tuple[str, float, float | None]]:
    """Times every variant; yields its name, milliseconds and peak in GiB."""
    yield "dense", *_later_passes(model, batch, device)
    for name, rows in selections(active).items():
        release_memory(device)
        with sparsify(model, rows=rows):
            yield name, *_later_passes(model, batch, device)
    release_memory(device)
    with Hoisted(model) as hoisted:
        tokens = ActiveTokens.gather(batch.input_ids.cpu(), RowPlan.from_labels(batch.labels)).to(device)
        yield "hoisted", *_timed(lambda: hoisted.row_losses(tokens).mean().backward(), model, device)


def selections(active: int) -> dict[str, object]:
    """The values of `rows` by their names."""
    top = {f"top n, {share:.0%}": TopN(max(1, round(share * active))) for share in SHARES}
    rules = {"threshold": Threshold(epsilon=0.1), "energy, 1 %": Energy(0.01), "energy, 10 %": Energy(0.1)}
    return {"exact": "exact", "detect": "detect", **top, **rules}


def _later_passes(model: nn.Module, batch: Batch, device: torch.device) -> tuple[float, float | None]:
    """The median of the passes after the first, which verifies the rows."""
    measure_time_and_peak(model, batch, device, 1)
    times, peak = measure_time_and_peak(model, batch, device, PASSES)
    return statistics.median(times), peak


def _timed(step: Callable[[], None], model: nn.Module, device: torch.device) -> tuple[float, float | None]:
    times = []
    for _ in range(PASSES + 1):
        model.zero_grad()
        times.append(1e3 * seconds(step, device))
    return statistics.median(times[1:]), None


if __name__ == "__main__":
    main()
