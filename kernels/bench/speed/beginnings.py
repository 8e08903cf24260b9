"""Times a captured training step on questions about notes, which share their note, beside the same step unshared.

    python kernels/bench/speed/beginnings.py [--record [FILE]]    the shape of Llama-3.2-3B on a GPU
    python kernels/bench/speed/beginnings.py --tiny               a small shape on the CPU, to try it

Ten questions about each note of 200 tokens; a question has 12 tokens and its answer, which has the loss, 16. Random
bf16 weights, LoRA r = 16 on all linear layers with fp32 adapters, AdamW: the step that `Personalizer` makes. Before
anything is timed, the loss and the gradients of both steps are compared with fp32's: the shared step may err at most
twice as much as the unshared one. Milliseconds are medians over steps that take turns in one process.
"""

import sys
from functools import partial
from pathlib import Path
from statistics import median

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import LlamaConfig

sys.path.append(str(Path(__file__).parents[1]))

import evidence
from models import TINY, known_config, make_model
from sebp_edge.engine.sparse.hoist import Hoisted
from sebp_edge.engine.sparse.rows.active_tokens import ActiveTokens
from sebp_edge.engine.sparse.rows.batches import pack
from sebp_edge.engine.sparse.rows.row_plan import IGNORE
from sebp_edge.engine.sparse.rows.share_beginnings import share_beginnings
from sebp_edge.engine.training.graphs import GRADIENTS, GraphPool, MicroBatchGraphs
from sebp_edge.engine.training.update import Update
from sebp_edge.events import silent
from sebp_edge.ops.measure import relative_error
from sebp_edge.recipe import Recipe
from sebp_edge.values.example import Example
from speed.trainers.timer import seconds

NOTE_TOKENS, QUESTIONS, QUESTION_TOKENS, ANSWER_TOKENS = 200, 10, 12, 16
NOTES, WARM_UPS, TURNS, STEPS_PER_TURN = (1, 2, 4), 1, 9, 4
# No update changes the weights, which the gradients of other batches are compared at.
LEARNING_RATE = 0.0
SOURCES = (*evidence.STEP, "sebp_edge/engine/models", "kernels/bench/models.py", __file__)


def main(arguments: list[str] | None = None) -> None:
    parser = evidence.parser(__doc__)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args(arguments)
    if options.tiny and options.record:
        parser.error("--record is for GPU runs only; leave out --record or --tiny.")
    device = torch.device("cpu" if options.tiny else "cuda")
    config = LlamaConfig(vocab_size=320, **TINY) if options.tiny else known_config("llama-3.2-3b")
    torch.manual_seed(0)
    model = with_adapter(make_model(config, device))
    # One note and one step in each turn show that it runs.
    notes_of_batches, turns, steps = ((1,), 1, 1) if options.tiny else (NOTES, TURNS, STEPS_PER_TURN)
    batches = {notes: pack(questions_about(notes, config.vocab_size)) for notes in notes_of_batches}
    truths = {notes: gradients(model.float(), tokens) for notes, tokens in batches.items()}
    for parameter in model.parameters():
        if not parameter.requires_grad and not options.tiny:
            parameter.data = parameter.data.bfloat16()
    rows = [
        evidence.show(measure(model, tokens, notes, truths[notes], turns, steps)) for notes, tokens in batches.items()
    ]
    evidence.record("beginnings", SOURCES, rows, options.record)


def with_adapter(model: nn.Module) -> nn.Module:
    """The model with an adapter of which no matrix is zero, so that every one has a gradient."""
    config = LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    return get_peft_model(model, config).eval()


def questions_about(notes: int, vocabulary: int) -> list[Example]:
    """Questions with answers about each of some notes, all of random tokens."""
    draw = torch.Generator().manual_seed(notes)

    def tokens(number: int) -> list[int]:
        return torch.randint(10, min(vocabulary, 128000), (number,), generator=draw).tolist()

    texts = [tokens(NOTE_TOKENS) for _ in range(notes)]
    asked = [text + tokens(QUESTION_TOKENS) for text in texts for _ in range(QUESTIONS)]
    answers = [tokens(ANSWER_TOKENS) for _ in asked]
    return [
        Example(ids + answer, [IGNORE] * len(ids) + answer, number)
        for number, (ids, answer) in enumerate(zip(asked, answers, strict=True))
    ]


def measure(
    model: nn.Module, tokens: ActiveTokens, notes: int, truth: list[Tensor], turns: int, steps_per_turn: int
) -> dict:
    """The rows, errors and milliseconds of both steps; exits if the shared step is wrong."""
    device = next(model.parameters()).device
    shared = share_beginnings(tokens, on_gpu=True)
    with Hoisted(model) as hoisted:
        if not hoisted.attends_to_prefixes:
            raise SystemExit("Attention takes no prefixes here, so there is nothing to compare.")
        with CapturedOrEager(model, hoisted) as training:
            unshared_error, shared_error = (
                max(map(relative_error, training.gradients(each), truth)) for each in (tokens, shared)
            )
            if not shared_error <= 2 * unshared_error + 1e-4:
                raise SystemExit(
                    f"The shared step errs by {shared_error:.2g}, the unshared one by {unshared_error:.2g}."
                )
            times = {"unshared": [], "shared": []}
            for _ in range(WARM_UPS + turns):
                for name, each in (("unshared", tokens), ("shared", shared)):
                    steps = partial(training.steps, each, steps_per_turn)
                    times[name].append(1e3 * seconds(steps, device) / steps_per_turn)
    unshared_ms, shared_ms = (median(times[name][WARM_UPS:]) for name in ("unshared", "shared"))
    return {
        "notes": notes,
        "questions": notes * QUESTIONS,
        "rows": len(tokens.input_ids),
        "shared_rows": len(shared.input_ids),
        "unshared_error": unshared_error,
        "shared_error": shared_error,
        "unshared_ms": unshared_ms,
        "shared_ms": shared_ms,
        "times_as_fast": unshared_ms / shared_ms,
    }


class CapturedOrEager:
    """The steps of a training, captured on a GPU; a context manager that frees what the updates hold."""

    def __init__(self, model: nn.Module, hoisted: Hoisted):
        self._parameters, self._hoisted = [each for each in model.parameters() if each.requires_grad], hoisted
        device = self._parameters[0].device
        self._update = Update(self._parameters, Recipe(name="bench", description=""))
        self._loss, self._graphs = torch.zeros((), device=device), None
        if device.type == "cuda":
            self._update.capture(GraphPool(device, silent))
            self._graphs = MicroBatchGraphs(GraphPool(device, silent), hoisted, {GRADIENTS: self._update}, self._loss)

    def steps(self, tokens: ActiveTokens, number: int) -> None:
        """Makes steps on the same tokens, without waiting for the device between them."""
        for _ in range(number):
            self._update.begin(LEARNING_RATE)
            self._accumulate(tokens)
            self._update.finish()

    def gradients(self, tokens: ActiveTokens) -> list[Tensor]:
        """The loss and all gradients as two vectors; changes nothing."""
        self._accumulate(tokens)
        found = [self._loss.clone(), torch.cat([parameter.grad.flatten() for parameter in self._parameters])]
        self._update.zero_gradients()
        return found

    def _accumulate(self, tokens: ActiveTokens) -> None:
        self._loss.zero_()
        if self._graphs is not None:
            self._graphs.accumulate(tokens, len(tokens.targets))
            return
        loss = self._hoisted.row_losses(tokens).mean()
        self._update.take_gradients(loss)
        self._loss.add_(loss.detach())

    def __enter__(self) -> "CapturedOrEager":
        return self

    def __exit__(self, *exception) -> None:
        self._graphs = None
        self._update.release()


def gradients(model: nn.Module, tokens: ActiveTokens) -> list[Tensor]:
    """The loss and all gradients as two vectors, by the eager unshared step, with little memory."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with Hoisted(model, checkpoints=model.config.num_hidden_layers - 1) as hoisted:
        loss = hoisted.row_losses(tokens.to(parameters[0].device)).mean()
        found = torch.autograd.grad(loss, parameters)
    return [loss.detach(), torch.cat([gradient.flatten() for gradient in found])]


if __name__ == "__main__":
    main()
