"""Measures how sparse dL/dY is in a real model, as the SEBP paper counts it (Tables 1, 2 and 11, Figure 3).

    python kernels/bench/gradient_sparsity.py --model FOLDER --texts NAME=FILE... [--padding-loss] [--record [FILE]]
    python kernels/bench/gradient_sparsity.py --model FOLDER --glue FOLDER [--tasks rte cola] [--record [FILE]]

A decoder has a loss on every token, an encoder on a class of each text, drawn at random. With --padding-loss, a decoder
is also measured with a loss on every token of the padding, as in the scripts published with the paper. It runs on the
CPU, in fp32. Each row of the result is one half of the MLPs ("intermediate" or "output") on one set of texts: means
over its layers, and of zeros the largest and the smallest layer's share.
"""

import argparse
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from transformers.utils import logging

import evidence
from glue_texts import TASKS, read_task
from sebp_edge import Personalizer
from sebp_edge.events import silent
from sebp_edge.insight import paper
from sebp_edge.insight.analysis import LayerRows, Lengths, Sparsity, sparsity_of
from sebp_edge.insight.gradients import row_gradients
from sebp_edge.insight.objectives import Objective, next_token_loss, objectives_of
from sebp_edge.models.loading import BaseModel
from sebp_edge.rows.row_plan import RowPlan
from sebp_edge.texts.batches import Batch, Collator
from sebp_edge.texts.examples import Example, encode
from sebp_edge.texts.readers import read_texts

PADDING_LOSS = "every token and padding"
HALVES = {"intermediate": paper.INTERMEDIATE, "output": paper.OUTPUT}
SOURCES = (
    *(f"sebp_edge/insight/{name}.py" for name in ("analysis", "elements", "gradients", "objectives")),
    *(f"sebp_edge/rows/{name}.py" for name in ("histogram", "row_plan", "row_rules")),
    "sebp_edge/models",
    "sebp_edge/texts/examples.py",
    "kernels/bench/glue_texts.py",
    __file__,
)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="a name that sebp-edge knows, or a folder")
    texts = parser.add_mutually_exclusive_group(required=True)
    texts.add_argument("--texts", nargs="+", metavar="NAME=FILE")
    texts.add_argument("--glue", type=Path)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--examples", type=int, default=32)
    parser.add_argument("--contexts", type=int, nargs="+", default=[512])
    parser.add_argument("--padding-loss", action="store_true")
    evidence.add_record_option(parser)
    options = parser.parse_args(arguments)
    logging.disable_progress_bar()
    personalizer = Personalizer(options.model, device="cpu")
    base = personalizer.in_use.load_analyzed(silent, personalizer.seed)
    found = []
    for context in options.contexts:
        for name, examples in sets_of_texts(options, base, context):
            chosen = random.Random(0).sample(examples, min(options.examples, len(examples)))
            for row in measure(base, name, chosen, context, options.padding_loss):
                print(", ".join(f"{key} {value}" for key, value in row.items()), flush=True)
                found.append(row)
    if options.record:
        evidence.record(f"gradients-{base.reference.name}", SOURCES, found, options.record, on_cpu=True)


def sets_of_texts(options: argparse.Namespace, base: BaseModel, context: int) -> Iterator[tuple[str, list[Example]]]:
    """The examples of each set by its name; a pair of texts of a GLUE task is one sequence."""
    if options.texts:
        for name, _, path in (each.partition("=") for each in options.texts):
            yield name, encode(read_texts(Path(path)).documents, base.tokenizer, context)[0]
        return
    for task in options.tasks:
        sequences = (
            base.tokenizer(*each.texts, truncation=True, max_length=context)["input_ids"]
            for each in read_task(options.glue, task).heldout
        )
        yield task, [Example(ids, ids, number) for number, ids in enumerate(sequences)]


def measure(base: BaseModel, texts: str, examples: list[Example], context: int, padding_loss: bool) -> Iterator[dict]:
    """The rows of the result on these examples."""
    lengths = Lengths.of(examples, context)
    objectives = objectives_of(base.model, examples, Collator(context, base.pad_token_id), seed=0)[:1]
    if padding_loss:
        objectives.append(with_padding_loss(objectives[0]))
    for objective in objectives:
        sparsity = sparsity_of(objective, row_gradients(base.model, objective, lambda: None))
        for half, names in HALVES.items():
            layers = [layer for layer in sparsity.layers if layer.projection in names]
            yield {
                "texts": texts,
                "context": context,
                "examples": lengths.examples,
                "mean_tokens": round(lengths.mean, 1),
                "padding": round(lengths.padding_share, 4),
                "loss": objective.name,
                "layers": half,
                **_shares(sparsity, layers),
            }


def with_padding_loss(objective: Objective) -> Objective:
    """The loss on every position of the same batches; padding attends as any token does, since it follows."""

    def labelled(batch: Batch) -> Batch:
        return replace(batch, labels=batch.input_ids, plan=RowPlan.from_labels(batch.input_ids))

    return Objective(PADDING_LOSS, [labelled(batch) for batch in objective.batches], next_token_loss)


def _shares(sparsity: Sparsity, layers: list[LayerRows]) -> dict[str, float]:
    zero = [layer.zero / layer.rows for layer in layers]
    below = [layer.below_epsilon for layer in layers]
    shares = {
        "zero": fmean(zero),
        "zero_max": max(zero),
        "zero_min": min(zero),
        "holding_99": fmean(layer.top_rows / max(1, layer.rows - layer.zero) for layer in layers),
        "zero_or_below_knee": fmean(layer.below_knee / layer.rows for layer in layers),
        "energy_below_knee": fmean(layer.energy_below_knee for layer in layers),
        "below_epsilon": fmean(below),
        "below_epsilon_max": max(below),
        "below_epsilon_min": min(below),
        "energy_below_epsilon": fmean(layer.energy_below_epsilon for layer in layers),
    }
    return {"epsilon": float(f"{sparsity.elements.epsilon:.3g}")} | {
        name: round(value, 4) for name, value in shares.items()
    }


if __name__ == "__main__":
    main()
