"""Times steps on questions that begin with the same system prompt, with it computed once and for each question.

    python kernels/bench/shared_prefixes.py [--model FOLDER] [--batch-rows 512] [--micro-batches 20] [--rounds 3]
                                            [--record [FILE]]

The questions are those that the recipe know makes of an invented person's 20 notes, in micro-batches of so many tokens,
drawn at random. A step is the forward and backward pass with a LoRA adapter of the recipe's rank, in fp32 on a CPU.
Losses and gradients of a first micro-batch must be equal, or nothing is measured. Rounds of the two take turns; times
are medians.

Predicted: the time falls as the number of rows does.
"""

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

import evidence
import know_people
from sebp_edge import Personalizer
from sebp_edge.events import silent
from sebp_edge.models.adaptation import attach, trainable
from sebp_edge.rows.shared_prefixes import share_prefixes
from sebp_edge.stopping import StopSignal
from sebp_edge.texts.batches import Collator, pack
from sebp_edge.texts.examples import Example
from sebp_edge.training.losses import RowLosses

SOURCES = (*evidence.STEP, "sebp_edge", "recipes/know.toml", know_people.TUNING, know_people.__file__, __file__)
COLUMNS = {"rows": "d", "seconds": ".2f", "times_faster": ".2f"}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--batch-rows", type=int, default=512)
    parser.add_argument("--micro-batches", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    evidence.add_record_option(parser)
    options = parser.parse_args(arguments)
    rows = list(measure(options.model, options.batch_rows, options.micro_batches, options.rounds))
    print(f"{'system prompt':>20}", *(f"{name:>14}" for name in COLUMNS))
    for row in rows:
        print(f"{row['computed']:>20}", *(f"{row[column]:>14{form}}" for column, form in COLUMNS.items()))
    if options.record:
        evidence.record("shared-prefixes", SOURCES, rows, options.record, on_cpu=True)


def measure(model: str, batch_rows: int, num: int, rounds: int) -> Iterator[dict]:
    """One row for each of the two."""
    with tempfile.TemporaryDirectory() as folder:
        know_people.person(0, 20).write(Path(folder))
        personalizer = Personalizer(model, recipe="know", device="cpu", store=Path(folder) / "store")
        preparation = personalizer._preparation(StopSignal())
        recipe = personalizer.recipe.with_defaults()
        base = personalizer.in_use.load(silent, recipe)
        dataset = preparation.encode(preparation.read(Path(folder)), base)
    micro_batches = list(drawn(dataset.asked.trained, batch_rows))[:num]
    collator = Collator(dataset.context_length, base.pad_token_id)
    parameters = trainable(attach(base, recipe, personalizer.seed))
    for parameter in parameters:  # half of them are zeros, which have no effect on the others' gradients
        torch.nn.init.normal_(parameter, std=0.02)
    with RowLosses(base.model, micro_batches[0], collator, base.device, silent) as row_losses:
        check(row_losses, parameters, micro_batches[0])
        seconds = {shares: [] for shares in (False, True)}
        for _ in range(rounds):
            for shares, own in seconds.items():
                own.append(timed(row_losses, parameters, micro_batches, shares=shares))
    alone = statistics.median(seconds[False])
    for shares, own in seconds.items():
        yield {
            "model": Path(model).name,
            "computed": "once" if shares else "for each question",
            "rows": sum(num_rows(each, shares=shares) for each in micro_batches),
            "questions": sum(map(len, micro_batches)),
            "seconds": statistics.median(own),
            "times_faster": alone / statistics.median(own),
        }


def num_rows(examples: list[Example], *, shares: bool) -> int:
    """The rows that a micro-batch computes."""
    tokens = pack(examples)
    return len((share_prefixes(tokens) if shares else tokens).input_ids)


def drawn(examples: list[Example], batch_rows: int) -> Iterator[list[Example]]:
    """Cuts the examples, in random order, into micro-batches of at most so many tokens."""
    some, rows = [], 0
    for example in random.Random(0).sample(examples, len(examples)):
        if some and rows + len(example.input_ids) > batch_rows:
            yield some
            some, rows = [], 0
        some.append(example)
        rows += len(example.input_ids)
    yield some


def check(row_losses: RowLosses, parameters: list[torch.Tensor], examples: list[Example]) -> None:
    """Raises a RuntimeError unless losses and gradients are the same up to rounding."""
    found = []
    for shares in (False, True):
        losses = step(row_losses, parameters, examples, shares=shares)
        found.append([losses, *(parameter.grad.clone() for parameter in parameters)])
    for alone, shared in zip(*found, strict=True):
        if (shared - alone).norm() > 1e-4 * alone.norm() + 1e-6:
            raise RuntimeError("losses or gradients differ")


def timed(
    row_losses: RowLosses, parameters: list[torch.Tensor], micro_batches: list[list[Example]], *, shares: bool
) -> float:
    """The seconds that all micro-batches take."""
    begin = time.perf_counter()
    for examples in micro_batches:
        step(row_losses, parameters, examples, shares=shares)
    return time.perf_counter() - begin


def step(
    row_losses: RowLosses, parameters: list[torch.Tensor], examples: list[Example], *, shares: bool
) -> torch.Tensor:
    """The losses of a micro-batch, whose gradients are in the parameters then."""
    for parameter in parameters:
        parameter.grad = None
    row_losses.shares_prefixes = shares
    losses, _ = row_losses(examples)
    losses.mean().backward()
    return losses.detach()


if __name__ == "__main__":
    main()
