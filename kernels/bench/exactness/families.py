"""Checks the first steps of whole `adapt` runs of decoder families on a GPU against the dense model in fp32.

    python kernels/bench/exactness/families.py [--only NAME ...] [--record [FILE]]     on a GPU
    python kernels/bench/exactness/families.py --tiny [--only NAME ...]                narrow shapes on a CPU, to try it

Each family has its true width and a few layers; two families have all their layers. Weights are random, in bf16. Most
texts are short, and some are longer than the family's window. The loss and the gradient norm of each of the first steps
are recomputed by the dense model in fp32, on padded batches, with transformers' attention and PEFT's layers, from the
adapter as it was before the step. A step is wrong if its error exceeds twice that of the dense model in bf16 plus 1e-3
for the loss or 1e-2 for the norm. A family is wrong if one of these steps is, or if none of them trains a text longer
than its window.
"""

import argparse
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
import torch.nn.functional as F
from peft import get_peft_model
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig

sys.path.append(str(Path(__file__).parents[1]))

import evidence
from memory.budgets import write_texts
from sebp_edge import Personalizer, Recipe, SebpEdgeError
from sebp_edge.events import Event, GraphCaptured, Notice
from sebp_edge.models.adaptation import snapshot
from sebp_edge.models.architecture import head_size_of
from sebp_edge.sparse.rows.row_plan import IGNORE
from sebp_edge.texts.batches import Collator
from sebp_edge.texts.examples import Example
from sebp_edge.texts.schedule import Group
from sebp_edge.training.learner import Outcome
from sebp_edge.training.recovery import RecoveringLearner
from speed.end_to_end import make_folder

STEPS = 6
SHORT_TEXTS, LONG_TEXTS, BATCH_TOKENS = 70, 12, 2048
# Long texts exceed the window by EXCESS_TOKENS. Without a window they exceed a length that is far beyond what our own
# attention kernels take (`backend.MAX_SHORT_LENGTH`), so that flash attention runs them.
EXCESS_TOKENS, LONGEST_WITHOUT_WINDOW = 200, 1500
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
}


class Family(NamedTuple):
    """One family's published sizes.

    Attributes:
        layers: number of layers used, which covers all kinds of layers.
        sizes: keyword arguments of its config.
    """

    name: str
    model_type: str
    layers: int
    sizes: dict

    def config(self, *, narrow: bool) -> PretrainedConfig:
        sizes = {**self.sizes, "num_hidden_layers": self.layers}
        if narrow:
            sizes |= {name: value for name, value in NARROW.items() if name in {*self.sizes, "pad_token_id"}}
            sizes["num_hidden_layers"] = min(self.layers, 4)
        return AutoConfig.for_model(self.model_type, **sizes)


def _sizes(vocab_size: int, hidden_size: int, intermediate_size: int, heads: int, kv_heads: int, **others) -> dict:
    return {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 32768,
    } | others


def _windows(num_sliding: int, num_full: int = 1) -> dict:
    return {"layer_types": ["sliding_attention"] * num_sliding + ["full_attention"] * num_full}


GEMMA_3_1B = _sizes(262144, 1152, 6912, 4, 1, head_dim=256, sliding_window=512, query_pre_attn_scalar=256)
QWEN3_06B = _sizes(151936, 1024, 3072, 16, 8, head_dim=128, tie_word_embeddings=True)
FAMILIES = [
    Family("gemma-3-1b", "gemma3_text", 26, GEMMA_3_1B),
    Family("llama-3.2-1b", "llama", 3, _sizes(128256, 2048, 8192, 32, 8, head_dim=64, tie_word_embeddings=True)),
    Family("qwen2.5-1.5b", "qwen2", 3, _sizes(151936, 1536, 8960, 12, 2, tie_word_embeddings=True)),
    Family("qwen3-0.6b", "qwen3", 28, QWEN3_06B),
    Family("mistral-7b", "mistral", 2, _sizes(32000, 4096, 14336, 32, 8, head_dim=128, sliding_window=4096)),
    Family(
        "ministral-8b",
        "ministral",
        3,
        _sizes(131072, 4096, 12288, 32, 8, head_dim=128, sliding_window=1024) | _windows(2),
    ),
    Family("gemma-2b", "gemma", 3, _sizes(256000, 2048, 16384, 8, 1, head_dim=256)),
    Family("gemma-2-2b", "gemma2", 2, _sizes(256000, 2304, 9216, 8, 4, head_dim=256, sliding_window=1024)),
    Family("phi-3-mini", "phi3", 3, _sizes(32064, 3072, 8192, 32, 32, sliding_window=2047)),
    Family("smollm3-3b", "smollm3", 4, _sizes(128256, 2048, 11008, 16, 4)),
    Family("olmo-2-1b", "olmo2", 3, _sizes(100352, 2048, 8192, 16, 16)),
    Family("olmo-3-7b", "olmo3", 4, _sizes(100278, 4096, 11008, 32, 32, sliding_window=1024) | _windows(3)),
    Family(
        "granite-3.1-2b",
        "granite",
        3,
        _sizes(
            49155,
            2048,
            8192,
            32,
            8,
            embedding_multiplier=12.0,
            logits_scaling=8.0,
            residual_multiplier=0.22,
            attention_multiplier=0.015625,
            tie_word_embeddings=True,
        ),
    ),
    Family("glm-4-9b", "glm4", 2, _sizes(151552, 4096, 13696, 32, 2, head_dim=128, partial_rotary_factor=0.5)),
    Family("starcoder2-3b", "starcoder2", 3, _sizes(49152, 3072, 12288, 24, 2, sliding_window=1024)),
    Family("stablelm-2-1.6b", "stablelm", 3, _sizes(100352, 2048, 5632, 32, 32, partial_rotary_factor=0.25)),
    Family("cohere2-7b", "cohere2", 4, _sizes(256000, 4096, 14336, 32, 8, sliding_window=1024, logit_scale=0.25)),
    Family("exaone-4-1.2b", "exaone4", 4, _sizes(102400, 2048, 4096, 32, 8, sliding_window=1024) | _windows(3)),
    Family("ernie-4.5-0.3b", "ernie4_5", 3, _sizes(103424, 1024, 3072, 16, 2, head_dim=128, tie_word_embeddings=True)),
    Family("seed-oss", "seed_oss", 2, _sizes(155136, 5120, 27648, 80, 8, head_dim=128)),
]
SOURCES = (
    *evidence.STEP,
    *(f"sebp_edge/{part}" for part in ("models", "texts", "personalizer.py", "recipe.py")),
    *(f"kernels/bench/{file}" for file in ("speed/end_to_end.py", "memory/budgets.py", "models.py")),
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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=[family.name for family in FAMILIES])
    parser.add_argument("--tiny", action="store_true")
    evidence.add_record_option(parser)
    options = parser.parse_args(arguments)
    if options.tiny and options.record:
        parser.error("--record is for GPU runs only; leave out --record or --tiny.")
    rows = []
    for family in FAMILIES:
        if not options.only or family.name in options.only:
            rows.append(measure(family, narrow=options.tiny))
            show(rows[-1])
    if options.record:
        evidence.record("families", SOURCES, rows, options.record)
    sys.exit(any(row["wrong"] for row in rows))


def measure(family: Family, *, narrow: bool) -> dict:
    """Runs one family and returns its errors; on a CPU if `narrow`."""
    config, device = family.config(narrow=narrow), torch.device("cpu" if narrow else "cuda")
    with tempfile.TemporaryDirectory() as folder:
        model, texts = Path(folder, "model"), Path(folder, "texts.jsonl")
        make_folder(model, config)
        window = _window(config)
        longest = (window or LONGEST_WITHOUT_WINDOW if not narrow else 40) + EXCESS_TOKENS
        write_texts(texts, _lengths(longest), AutoTokenizer.from_pretrained(model))
        try:
            run = adapt(model, texts, longest + 8, device, Path(folder, "store"))
        except SebpEdgeError as error:
            return {"family": family.name, "layers": family.layers, "wrong": True, "notices": str(error)}
        ours = torch.tensor([[step.outcome.loss, step.outcome.grad_norm] for step in run.steps], dtype=torch.float64)
        exact, low = (dense_steps(model, run, device, dtype) for dtype in (torch.float32, torch.bfloat16))
    error, dense_error = ((found / exact - 1).abs() for found in (ours, low))
    allowed = 2 * dense_error + torch.tensor([LOSS_TOLERANCE, NORM_TOLERANCE])
    trained = max(len(example.input_ids) for step in run.steps for example in step.examples)
    wrong = not bool((error <= allowed).all()) or trained <= (window or 0)
    notices = [event.message for event in run.events if isinstance(event, Notice)]
    return {
        "family": family.name,
        "model_type": family.model_type,
        "layers": family.layers,
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
        steps.append(Step(group.examples, state, outcome))
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
    longest = max(len(example.input_ids) for example in step.examples)
    batch, device = Collator(longest, pad_token_id=0)(step.examples), parameters[0].device
    mask = batch.attention_mask.to(device)
    logits_BTV = model(input_ids=batch.input_ids.to(device), attention_mask=mask, use_cache=False).logits
    labels = batch.labels[:, 1:].to(device)
    loss = F.cross_entropy(logits_BTV[:, :-1].flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORE)
    del logits_BTV
    loss.backward()
    return float(loss), float(nn.utils.get_total_norm([parameter.grad for parameter in parameters]))


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


def show(row: dict) -> None:
    if "steps" not in row:
        print(f"{row['family']:18}{row['layers']:>3} layers, WRONG: {row['notices']}", flush=True)
        return
    print(
        f"{row['family']:18}{row['layers']:>3} layers, head {row['head_size']}, window {row['window'] or 'none'}, "
        f"longest {row['longest_text']}: loss {row['loss_error']:.1e} (dense bf16 {row['dense_bf16_loss_error']:.1e}), "
        f"norm {row['norm_error']:.1e} ({row['dense_bf16_norm_error']:.1e}), {row['graphs']} graphs"
        f"{'' if row['hoisted'] else ', on padded batches'}{', WRONG' if row['wrong'] else ''} {row['notices']}",
        flush=True,
    )


if __name__ == "__main__":
    main()
