"""Times the captured steps of three trainings side by side beside one, as folds make them.

    python kernels/bench/speed/folds.py [--record [FILE]]     the shape of Llama-3.2-3B on a GPU
    python kernels/bench/speed/folds.py --tiny                a small shape on the CPU, to try it

Random bf16 weights, LoRA r = 16 on all linear layers with fp32 adapters, AdamW, one text for each training. Exits if a
training's loss or gradient norm differs from its own alone by more than 1 %. Milliseconds are medians over turns.
"""

import sys
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import torch
from transformers import LlamaConfig

sys.path.append(str(Path(__file__).parents[1]))

import evidence
from models import TINY, known_config, make_model
from sebp_edge.events import silent
from sebp_edge.memory.options import FASTEST
from sebp_edge.models.training_hook import TrainingHook
from sebp_edge.recipe import Recipe
from sebp_edge.research.bench.timer import seconds
from sebp_edge.texts.batches import Collator
from sebp_edge.texts.examples import Example
from sebp_edge.texts.schedule import Schedule
from sebp_edge.training.recovery import RecoveringLearner
from sebp_edge.training.side_by_side import SideBySide
from speed.beginnings import with_adapter

NUMBER, TOKENS, WARM_UPS, TURNS, STEPS_PER_TURN = 3, (80, 512), 1, 9, 4
RECIPE = Recipe(name="bench", description="")
SOURCES = (*evidence.STEP, "sebp_edge/models", "sebp_edge/training", "kernels/bench/models.py", __file__)


def main(arguments: list[str] | None = None) -> None:
    parser = evidence.parser(__doc__)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args(arguments)
    if options.tiny and options.record:
        parser.error("--record is for GPU runs only; leave out --record or --tiny.")
    config = LlamaConfig(vocab_size=320, **TINY) if options.tiny else known_config("llama-3.2-3b")
    torch.manual_seed(0)
    model = with_adapter(make_model(config, torch.device("cpu" if options.tiny else "cuda")))
    adapted = SimpleNamespace(model=model, training_hook=TrainingHook)
    rows = [evidence.show(measure(adapted, config.vocab_size, tokens)) for tokens in TOKENS]
    evidence.record("folds", SOURCES, rows, options.record)


def measure(adapted: SimpleNamespace, vocabulary: int, tokens: int) -> dict:
    """The milliseconds of a step of one training, and of three; no update changes the weights."""
    ids = torch.randint(10, min(vocabulary, 128000), (NUMBER, tokens)).tolist()
    examples = [Example(each, each, number) for number, each in enumerate(ids)]
    with RecoveringLearner(adapted, RECIPE, examples, Collator(tokens, 2), silent) as learner:
        schedules = [Schedule([[[example.outline(number)]]]) for number, example in enumerate(examples)]
        learner.prepare(schedules[0], schedules[1:])
        steps = [schedule.epochs[0][0] for schedule in schedules]
        truths = [learner.step(step, 0.0) for step in steps]
        one = median_ms(lambda: learner.step(steps[0], 0.0), learner.device)
        with SideBySide(learner, RECIPE, FASTEST, NUMBER) as together:
            together.prepare(schedules, [0] * NUMBER)
            run = dict(enumerate((step, 0.0) for step in steps))
            found = together.run(run).values()
            errors = [
                abs(float(a / b) - 1) for own in zip(found, truths, strict=True) for a, b in zip(*own, strict=True)
            ]
            if not max(errors) <= 0.01:
                raise SystemExit(f"A training side by side differs from its own alone by {max(errors):.2g}.")
            three = median_ms(lambda: together.run(run), learner.device)
    return {"tokens": tokens, "largest_error": max(errors), "one_ms": one, "three_ms": three, "times": three / one}


def median_ms(step, device: torch.device) -> float:
    def steps() -> None:
        for _ in range(STEPS_PER_TURN):
            step()

    return median([1e3 * seconds(steps, device) / STEPS_PER_TURN for _ in range(WARM_UPS + TURNS)][WARM_UPS:])


if __name__ == "__main__":
    main()
