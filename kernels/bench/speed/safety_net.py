"""Measures what the drop-in's safety net and the trials at attach cost: the first pass beside later ones.

    python kernels/bench/speed/safety_net.py [--record [FILE]]   the shape of Llama-3.2-3B on a GPU, 1 x 4096
    python kernels/bench/speed/safety_net.py --tiny                a small shape on the CPU, to try it

The first pass of a kind of call detects the active rows in every layer, compares them with the predicted rows, and
keeps all inputs. Later passes compute the predicted rows, and check the gradients of the outputs and of the embeddings.
"detect" detects the rows in every pass. Each figure is the median over rounds, in milliseconds. Each round measures the
first pass on a new handle, with the trials that a handle runs once.
"""

import statistics
import sys
from pathlib import Path

import torch
from torch import nn
from transformers import LlamaConfig

sys.path.append(str(Path(__file__).parents[1]))

import evidence
from models import TINY, known_config, make_model
from sebp_edge import sparsify
from sebp_edge.engine.sparse import copy_trial
from sebp_edge.engine.sparse.rows.batches import Batch
from sebp_edge.engine.sparse.rows.row_plan import IGNORE
from sebp_edge.machine.devices import release_memory
from speed.trainers.timer import peak_bytes, seconds

ROUNDS, PASSES, TEXT_TOKENS = 3, 5, 26
HANDLES = {
    "drop-in": {},
    "drop-in, logits returned": {"keep_logits": True},
    "detect": {"rows": "detect"},
}
SOURCES = (
    *evidence.STEP,
    "kernels/bench/speed/trainers/timer.py",
    "sebp_edge/engine/models",
    "kernels/bench/models.py",
    __file__,
)


def try_anew(model: nn.Module) -> str | None:
    """Tries a copy, whether or not one has passed."""
    copy_trial._try_copy.cache_clear()
    return copy_trial.copy_mismatch(model)


def main(arguments: list[str] | None = None) -> None:
    parser = evidence.parser(__doc__)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args(arguments)
    if options.tiny and options.record:
        parser.error("--record is for GPU runs only; leave out --record or --tiny.")
    device = torch.device("cpu" if options.tiny else "cuda")
    config = LlamaConfig(vocab_size=320, **TINY) if options.tiny else known_config("llama-3.2-3b")
    model = make_model(config, device).train()
    batch = padded_text(config, 512 if options.tiny else 4096, device)
    rows = [{"case": "trial on a small copy", "ms": 1e3 * seconds(lambda: try_anew(model), device)}]
    rows.append({"case": "dense", "ms": statistics.median(steps(model, batch, device, PASSES))})
    for name, settings in HANDLES.items():
        rounds = [passes(model, batch, device, settings) for _ in range(ROUNDS)]
        for part, found in zip(("first pass", "later passes"), zip(*rounds, strict=True), strict=True):
            middle = statistics.median(ms for ms, _ in found)
            rows.append({"case": f"{name}, {part}", "ms": middle, "peak_gib": found[0][1]})
    for row in rows:
        evidence.show(row)
    evidence.record("safety-net", SOURCES, rows, options.record)


def padded_text(config: LlamaConfig, context_length: int, device: torch.device) -> Batch:
    """One text of random tokens, as long as PTB's are on average, padded on the right, which needs no mask."""
    is_text_BT = torch.arange(context_length)[None] < TEXT_TOKENS
    input_ids_BT = torch.randint(10, config.vocab_size, is_text_BT.shape) * is_text_BT
    labels_BT = input_ids_BT.masked_fill(~is_text_BT, IGNORE)
    return Batch(input_ids_BT.to(device), None, labels_BT.to(device), plan=None)


def passes(model: nn.Module, batch: Batch, device: torch.device, settings: dict) -> list[tuple[float, float | None]]:
    """Milliseconds and the peak in GiB of a new handle's first pass, trials included, and of later ones (median)."""
    release_memory(device)
    found = []
    with sparsify(model, **settings):
        for number in (1, PASSES):
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            times, peak = steps(model, batch, device, number), peak_bytes(device)
            found.append((statistics.median(times), None if peak is None else peak / 2**30))
    return found


def steps(model: nn.Module, batch: Batch, device: torch.device, number: int) -> list[float]:
    """Milliseconds of each of `number` forward and backward passes."""

    def step() -> None:
        model(input_ids=batch.input_ids, labels=batch.labels, use_cache=False).loss.backward()

    times = []
    for _ in range(number):
        model.zero_grad()
        times.append(1e3 * seconds(step, device))
    return times


if __name__ == "__main__":
    main()
