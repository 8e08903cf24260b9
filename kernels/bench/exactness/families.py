"""Checks the first steps of whole `adapt` runs of decoder families on a GPU against the dense model in fp32.

    python kernels/bench/exactness/families.py [--only NAME ...] [--record [FILE]]     on a GPU
    python kernels/bench/exactness/families.py --tiny [--only NAME ...]                narrow shapes on a CPU, to try it

Each family has its true width and a few layers; two families have all their layers. Weights are random, in bf16. Most
texts are short, and some are longer than the family's window. The loss and the gradient norm of each of the first steps
are recomputed by the dense model in fp32, on padded batches, with transformers' attention and PEFT's layers, from the
adapter as it was before the step, and with a teacher's targets where an example has a teacher. A step is wrong if its
error exceeds twice that of the dense model in bf16 plus 1e-3 for the loss or 1e-2 for the norm. A family is wrong if
one of these steps is, or if none of them trains a text longer than its window.
"""

import copy
import gc
import random
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from peft import get_peft_model
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig

sys.path.append(str(Path(__file__).parents[1]))

import evidence
from memory.budgets import write_texts
from models import SHAPES, published_sizes
from sebp_edge import Personalizer, Recipe, SebpEdgeError
from sebp_edge.engine.models.adaptation import snapshot
from sebp_edge.engine.models.architecture import head_size_of
from sebp_edge.engine.sparse.rows.batches import Collator
from sebp_edge.engine.sparse.rows.schedule import Group
from sebp_edge.engine.training.learner import Outcome
from sebp_edge.engine.training.recovery import RecoveringLearner
from sebp_edge.events import Event, GraphCaptured, Notice
from sebp_edge.values.example import Example
from speed.end_to_end import make_folder

STEPS = 6
SHORT_TEXTS, LONG_TEXTS, BATCH_TOKENS = 70, 12, 2048
# Long texts exceed the window by EXCESS_TOKENS. Without a window they exceed a length that is far beyond what our own
# attention kernels take (`backend.MAX_SHORT_LENGTH`), so that flash attention runs them.
EXCESS_TOKENS, LONGEST_WITHOUT_WINDOW = 200, 1500
# The most tokens, padding included, that the dense model computes at once.
MAX_PADDED = 2048
LOSS_TOLERANCE, NORM_TOLERANCE = 1e-3, 1e-2
NARROW = {
    "vocab_size": 8192,
    "pad_token_id": 0,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": 24,
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
}
FAMILIES = [name for name, shape in SHAPES.items() if "exactness" in shape]
SOURCES = (
    *evidence.STEP,
    *(f"sebp_edge/{part}" for part in ("engine/models", "lessons", "values", "personalizer.py", "recipe.py")),
    *(f"kernels/bench/{file}" for file in ("memory/budgets.py", "models.py", "shapes.toml", "speed/end_to_end.py")),
    __file__,
)


class Step(NamedTuple):
    """One training step: its examples, the trained parameters before it, and its outcome."""

    examples: list[Example]
    state: list[Tensor]
    outcome: Outcome


class Run(NamedTuple):
    """One `adapt` run: its first steps, its events, and the PEFT config of its adapter."""

    steps: list[Step]
    events: list[Event]
    peft_config: object


def main(arguments: list[str] | None = None) -> None:
    parser = evidence.parser(__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=FAMILIES)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args(arguments)
    if options.tiny and options.record:
        parser.error("--record is for GPU runs only; leave out --record or --tiny.")
    rows = []
    for family in FAMILIES:
        if not options.only or family in options.only:
            rows.append(evidence.show(measure(family, narrow=options.tiny)))
    evidence.record("families", SOURCES, rows, options.record)
    sys.exit(any(row["wrong"] for row in rows))


def make_config(family: str, *, narrow: bool) -> PretrainedConfig:
    """The config with the family's true width and a few layers; with everything small if `narrow`."""
    sizes = published_sizes(family) | SHAPES[family]["exactness"]
    if narrow:
        sizes |= {name: value for name, value in NARROW.items() if name in {*sizes, "pad_token_id"}}
        # A list of kinds of layers is short already.
        sizes["num_hidden_layers"] = min(sizes["num_hidden_layers"], len(sizes.get("layer_types", range(4))))
    return AutoConfig.for_model(**sizes)


def measure(family: str, *, narrow: bool) -> dict:
    """Runs one family and returns its errors; on a CPU if `narrow`."""
    config, device = make_config(family, narrow=narrow), torch.device("cpu" if narrow else "cuda")
    with tempfile.TemporaryDirectory() as folder:
        model, texts = Path(folder, "model"), Path(folder, "texts.jsonl")
        make_folder(model, config)
        window = _window(config)
        longest = (window or LONGEST_WITHOUT_WINDOW if not narrow else 40) + EXCESS_TOKENS
        write_texts(texts, _lengths(longest), AutoTokenizer.from_pretrained(model))
        try:
            run = adapt(model, texts, longest + 8, device, Path(folder, "store"))
        except SebpEdgeError as error:
            return {"family": family, "layers": config.num_hidden_layers, "wrong": True, "notices": str(error)}
        ours = torch.tensor([[step.outcome.loss, step.outcome.grad_norm] for step in run.steps], dtype=torch.float64)
        exact, low = (dense_steps(model, run, device, dtype) for dtype in (torch.float32, torch.bfloat16))
    error, dense_error = ((found / exact - 1).abs() for found in (ours, low))
    allowed = 2 * dense_error + torch.tensor([LOSS_TOLERANCE, NORM_TOLERANCE])
    trained = max(len(example.input_ids) for step in run.steps for example in step.examples)
    wrong = not bool((error <= allowed).all()) or trained <= (window or 0)
    notices = [event.message for event in run.events if isinstance(event, Notice)]
    return {
        "family": family,
        "model_type": config.model_type,
        "layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "heads": f"{config.num_attention_heads}/{config.num_key_value_heads}",
        "head_size": head_size_of(config),
        "vocabulary": config.vocab_size,
        "window": window or "",
        "longest_text": trained,
        "hoisted": not any("padded batches" in notice for notice in notices),
        "graphs": sum(isinstance(event, GraphCaptured) for event in run.events),
        "steps": len(run.steps),
        "loss_error": float(error[:, 0].max()),
        "norm_error": float(error[:, 1].max()),
        "dense_bf16_loss_error": float(dense_error[:, 0].max()),
        "dense_bf16_norm_error": float(dense_error[:, 1].max()),
        "wrong": wrong,
        "notices": " ".join(notices),
    }


def adapt(model: Path, texts: Path, context_length: int, device: torch.device, store: Path) -> Run:
    """Runs a whole `adapt` of one epoch and keeps its first steps."""
    events: list[Event] = []
    recipe = Recipe.load("notes").replace(epochs=1, context_length=context_length, batch_tokens=BATCH_TOKENS)
    personalizer = Personalizer(model, recipe=recipe, device=device.type, store=store, on_event=events.append)
    with _first_steps() as (steps, configs):
        personalizer.adapt(texts)
    run = Run(steps, events, configs[0])
    del personalizer
    _free()
    return run


@contextmanager
def _first_steps() -> Iterator[tuple[list[Step], list]]:
    """Records the first steps of a training within it, and the config of the adapter."""
    original_step, steps, configs = RecoveringLearner.step, [], []

    def step(learner: RecoveringLearner, group: Group, learning_rate: float) -> Outcome:
        if len(steps) == STEPS:
            return original_step(learner, group, learning_rate)
        configs.append(copy.deepcopy(learner.adaptation.model.peft_config["default"]))
        state = snapshot(learner.adaptation)
        outcome = original_step(learner, group, learning_rate)
        examples = [learner.row_losses.examples[outline.number] for outline in group.examples]
        steps.append(Step(examples, state, outcome))
        return outcome

    RecoveringLearner.step = step
    try:
        yield steps, configs
    finally:
        RecoveringLearner.step = original_step


def dense_steps(folder: Path, run: Run, device: torch.device, dtype: torch.dtype) -> Tensor:
    """The loss and the gradient norm of each step, computed by transformers and PEFT alone; fp64 [steps, 2]."""
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device)
    model = get_peft_model(base, copy.deepcopy(run.peft_config))
    found = torch.tensor([_dense_step(model, step) for step in run.steps], dtype=torch.float64)
    del base, model
    _free()
    return found


def _dense_step(model: nn.Module, step: Step) -> tuple[float, float]:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter, value in zip(parameters, step.state, strict=True):
        parameter.data.copy_(value)
        parameter.grad = None
    examples, losses = sorted(step.examples, key=lambda example: -len(example.input_ids)), []
    while examples:
        # What transformers' state spaces take grows with the square of a text, for each head.
        number = max(1, MAX_PADDED // len(examples[0].input_ids))
        losses_C = _dense_losses(model, examples[:number], parameters[0].device)
        losses_C.sum().backward()
        losses.append(losses_C.detach())
        examples = examples[number:]
    loss_rows = torch.cat(losses)
    norm = nn.utils.get_total_norm([parameter.grad for parameter in parameters])
    return float(loss_rows.mean()), float(norm) / len(loss_rows)


def _dense_losses(model: nn.Module, examples: list[Example], device: torch.device) -> Tensor:
    """The loss of each row of a padded batch."""
    batch = Collator(len(examples[0].input_ids), pad_token_id=0)(examples)
    mask = batch.attention_mask.to(device)
    logits_BTV = model(input_ids=batch.input_ids.to(device), attention_mask=mask, use_cache=False).logits
    plan = batch.plan.to(device)
    logs_CV = logits_BTV.flatten(0, 1).index_select(0, plan.loss_rows).float().log_softmax(-1)
    losses_C = -logs_CV.gather(1, plan.targets[:, None]).squeeze(1)
    if plan.soft_targets is None:
        return losses_C
    # Examples with a teacher: the target has what its other tokens leave of 1.
    ids_CK, shares_CK = plan.soft_targets
    return losses_C * (1 - shares_CK.sum(1)) - (logs_CV.gather(1, ids_CK) * shares_CK).sum(1)


def _window(config: PretrainedConfig) -> int | None:
    uses_window = getattr(config, "use_sliding_window", True)
    return getattr(config, "sliding_window", None) if uses_window else None


def _lengths(longest: int) -> list[int]:
    draw = random.Random(0)
    short = [draw.randint(5, 120) for _ in range(SHORT_TEXTS)]
    return draw.sample(short + [longest] * LONG_TEXTS, SHORT_TEXTS + LONG_TEXTS)


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
