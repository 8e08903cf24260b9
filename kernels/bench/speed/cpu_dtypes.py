"""Times a LoRA step on the CPU with a base model in fp32 and in bf16, in turns, and measures its gradients' error.

    python kernels/bench/speed/cpu_dtypes.py NOTES --model FOLDER... [--tokens 64 256] [--threads 2] [--record [FILE]]

A batch has up to four beginnings of Markdown files of NOTES, so many tokens together. Errors are those of all gradients
beside fp32's, also of the dense model in bf16.
"""

import statistics
import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[1]))

import evidence
from models import resolve_config
from sebp_edge.engine.models.adaptation import attach
from sebp_edge.engine.models.loading import load_base_model
from sebp_edge.machine import devices
from sebp_edge.recipe import Recipe
from sebp_edge.values.example import Example
from speed.trainers.reference import loss_and_gradients, references
from speed.trainers.steps import trained
from speed.trainers.timer import running, time_steps
from speed.trainers.variants import HOISTED, PADDED
from speed.trainers.work import padded_batch

SOURCES = (*evidence.STEP, "sebp_edge/machine/devices.py", "kernels/bench/speed/trainers", __file__)
CPU, ROUNDS, STEPS = torch.device("cpu"), 3, 2
LONGEST = 512


def main(arguments: list[str] | None = None) -> None:
    parser = evidence.parser(__doc__)
    parser.add_argument("notes", type=Path)
    parser.add_argument("--model", nargs="+", required=True)
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    rows = []
    for model in options.model:
        for row in measure(model, options.notes, options.tokens):
            rows.append(evidence.show(row))
            evidence.record("cpu-dtypes", SOURCES, rows, options.record, on_cpu=True)


def measure(name: str, notes: Path, sizes: list[int]):
    """Yields a row for each number of tokens."""
    models = {"fp32": attached(name, False), "bf16": attached(name, True)}
    (tokenizer, exact), (_, rounded) = models.values()
    texts = [tokenizer(path.read_text(errors="replace")).input_ids for path in sorted(notes.rglob("*.md"))]
    for tokens in sizes:
        count = max(1, min(4, tokens // 32))
        length = tokens // count
        chosen = [ids[:length] for ids in texts if len(ids) >= length][:count]
        batch = padded_batch([Example(ids, ids, number) for number, ids in enumerate(chosen)], length, 0, CPU)
        for _, model in models.values():
            fill(model)
        expected, row = references(exact, batch, [count], 1.0)[count], {"model": Path(name).name, "tokens": tokens}
        for label, model, variant in (("bf16", rounded, HOISTED), ("dense_bf16", rounded, PADDED)):
            with running(model, batch, variant) as step:
                row[f"error_{label}"] = expected.deviation(*loss_and_gradients(step, model)).gradient_error
        times = {label: [] for label in models}
        for _ in range(ROUNDS):
            for label, (_, model) in models.items():
                with running(model, batch, HOISTED) as step:
                    times[label] += [each.step for each in time_steps(step, CPU, warm_ups=1, repeats=STEPS)]
        row |= {f"{label}_ms": 1000 * statistics.median(each) for label, each in times.items()}
        yield row | {"ratio": row["bf16_ms"] / row["fp32_ms"]}


def attached(name: str, in_bf16: bool) -> tuple:
    """The tokenizer, and the model with an adapter."""
    devices.multiplies_bf16 = lambda: in_bf16
    recipe = Recipe.load("notes").replace(context_length=LONGEST)
    base = load_base_model(resolve_config(name), recipe, CPU)
    return base.tokenizer, attach(base, recipe, seed=0).model


def fill(model: torch.nn.Module) -> None:
    """Gives the adapter random weights, as large as after some steps, the same each time."""
    draw = torch.Generator().manual_seed(0)
    for number, parameter in enumerate(trained(model)):
        parameter.data.normal_(0, 0.005 if number % 2 else 0.02, generator=draw)


if __name__ == "__main__":
    main()
