"""Times a training step of one model in six variants: dense padded, drop-in, dynamic padding, packed, hoisted, graph.

    python kernels/bench/speed/steps.py [PATH...]                   texts as long as yours; by default four short ones
    python kernels/bench/speed/steps.py --model llama-3.2-3b --padding 0.9
    python kernels/bench/speed/steps.py --device cpu --threads 1 --recipe notes --recipe full --record

Only the lengths of your texts are used; tokens are random, since no time depends on them. If the model's weights are
not on this machine, random weights of its shape are used; nothing is downloaded. A variant whose loss or gradients
differ from the fp32 reference is not timed. The others take turns, so that ratios also hold on a busy machine.
"""

import argparse
import math
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import NormalDist

import torch
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parents[1]))

import evidence
from models import resolve_config
from sebp_edge.basics.out_of_memory import ran_out_of_memory
from sebp_edge.engine.memory.refusal import refuse_if_too_big
from sebp_edge.engine.memory.shape_reader import read_shape
from sebp_edge.engine.models.adaptation import attach
from sebp_edge.engine.models.architecture import head_size_of
from sebp_edge.engine.models.catalog import DEFAULT_MODEL
from sebp_edge.engine.models.hub_cache import local_folder
from sebp_edge.engine.models.loading import BaseModel, load_base_model, local_tokenizer, model_from_config
from sebp_edge.engine.models.lora import without_adapter
from sebp_edge.engine.sparse.hoist import ATTENTION
from sebp_edge.engine.sparse.rows.batches import Batch
from sebp_edge.engine.sparse.rows.row_plan import IGNORE
from sebp_edge.engine.training.learner import AutogradQueue
from sebp_edge.errors import OptionError, RecipeError, SebpEdgeError, TextsError
from sebp_edge.lessons.examples import encode
from sebp_edge.machine.devices import clear_frames, pick_device, pick_dtype, release_memory
from sebp_edge.ops import runs_flash_attention
from sebp_edge.reading.readers import read_texts
from sebp_edge.recipe import Recipe
from sebp_edge.values.example import Example
from sebp_edge.values.model_reference import ModelReference
from speed.trainers.reference import loss_and_gradients, references
from speed.trainers.steps import Variant, trained
from speed.trainers.timer import Times, medians, running, time_steps
from speed.trainers.variants import DROP_IN, DYNAMICALLY_PADDED, HOISTED, OUR_STEP, PADDED, packed
from speed.trainers.work import fill, padded_batch

# In bf16, the loss of a dense 3B model with random weights was 6e-3 off.
LOSS_TOLERANCE = 2e-2
ROUNDS, STEPS_PER_ROUND = 3, 2
# Tokens of a paragraph of real notes: the median and the 90th percentile.
MEDIAN_LENGTH, NINETIETH_LENGTH = 30, 90
SOURCES = (*evidence.STEP, "sebp_edge/engine/models", "kernels/bench/speed/trainers", __file__)


def main(arguments: list[str] | None = None) -> None:
    parser = evidence.parser(__doc__)
    parser.add_argument("paths", type=Path, nargs="*", metavar="PATH", help="files or folders with texts")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="name, folder, Hub id or config.json")
    parser.add_argument("--recipe", action="append", help="name or TOML file; may be repeated; by default notes")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--padding", type=float, metavar="SHARE", help="of the batch, such as 0.9")
    length.add_argument("--context", type=int, metavar="TOKENS", help="that each text is padded to")
    parser.add_argument("--batch", type=int, default=4, metavar="TEXTS", help="in the batch, at most")
    parser.add_argument("--device", help="cuda, mps or cpu; by default the best available one")
    parser.add_argument("--threads", type=int, help="of the CPU")
    options = parser.parse_args(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    try:
        device = pick_device(options.device)
        rows = [row for recipe in options.recipe or ["notes"] for row in measure(recipe, options, device)]
    except SebpEdgeError as error:
        parser.error(str(error))
    evidence.record(f"{device.type}-steps", SOURCES, rows, options.record, on_cpu=device.type == "cpu")


def measure(recipe: str, options: argparse.Namespace, device: torch.device) -> list[dict]:
    """One row per variant."""
    reference, recipe = resolve_config(options.model), Recipe.load(recipe)
    if recipe.load_in_4bit:
        raise RecipeError(f"The recipe {recipe.name!r} quantises the model, which has no fp32 reference; use another.")
    longest = read_shape(reference).longest or math.inf
    context_length = options.context or min(recipe.context_length, longest)
    recipe = recipe.replace(context_length=context_length)
    examples = read_examples(options.paths, reference, recipe, options.batch)
    if options.padding is not None:
        context_length = padded_length(examples, options.padding)
    if context_length > longest:
        raise OptionError(f"The batch would be padded to {context_length} tokens; {reference.name!r} takes {longest}.")
    refuse_if_too_big(reference, recipe, device)
    base = load(reference, recipe, device)
    model = attach(base, recipe, seed=0).model
    if recipe.method == "lora":
        # A zero lora_B would make lora_A's gradients zero.
        fill(trained(model))
    batch = random_batch(examples, context_length, base.model.config.get_text_config().vocab_size, device)
    tokens = int(batch.attention_mask.sum())
    about = {"model": reference.name, "trained": recipe.method, "tokens": tokens}
    about |= {"padding_share": 1 - tokens / batch.input_ids.numel()}
    return [evidence.show(about | row) for row in compare(model, batch)]


def load(reference: ModelReference, recipe: Recipe, device: torch.device) -> BaseModel:
    """The base model, with random weights if its own are not on this machine."""
    if local_folder(reference) is not None:
        return load_base_model(reference, recipe, device)
    print(f"The weights of {reference.name!r} are not on this machine, so random weights of its shape are timed.")
    torch.manual_seed(0)
    dtype = pick_dtype(device)
    model = model_from_config(reference, device, dtype).eval()
    return BaseModel(reference, model, local_tokenizer(reference), device, dtype, fingerprint="random weights")


# -------------------------------------------------------------------------------------------------------------- texts


def read_examples(paths: list[Path], reference: ModelReference, recipe: Recipe, count: int) -> list[Example]:
    """At most `count` examples, evenly spaced when sorted by length, or with built-in lengths without paths."""
    if not paths:
        return [Example([0] * length, [0] * length, number) for number, length in enumerate(built_in_lengths(count))]
    documents, tokenizer = read_texts(paths).documents, local_tokenizer(reference)
    examples, _ = encode(documents, tokenizer, recipe.context_length, chat_template=recipe.chat_template)
    if not examples:
        raise TextsError("These texts have no token to train on; give texts of two tokens or more.")
    by_length, count = sorted(examples, key=lambda example: len(example.input_ids)), min(count, len(examples))
    return [by_length[int((number + 0.5) * len(by_length) / count)] for number in range(count)]


def built_in_lengths(count: int) -> list[int]:
    """Token counts of `count` short texts: evenly spaced quantiles of the log-normal with these two percentiles."""
    spread = math.log(NINETIETH_LENGTH / MEDIAN_LENGTH) / NormalDist().inv_cdf(0.9)
    quantiles = (NormalDist().inv_cdf((number + 0.5) / count) for number in range(count))
    return [max(2, round(MEDIAN_LENGTH * math.exp(spread * quantile))) for quantile in quantiles]


def padded_length(examples: list[Example], share: float) -> int:
    """The smallest context length at which at least `share` of the padded batch is padding."""
    lengths = [len(example.input_ids) for example in examples]
    least = 1 - sum(lengths) / len(lengths) / max(lengths)
    if not 0 <= share < 1:
        raise OptionError(f"The padding is a share of the batch below 1, such as 0.9, and not {share}.")
    context_length = math.ceil(sum(lengths) / len(lengths) / (1 - share) - 1e-9)
    if context_length < max(lengths):
        raise OptionError(f"A batch of these texts has at least {least:.2f} padding; ask for that or more.")
    return context_length


def random_batch(examples: list[Example], context_length: int, vocabulary: int, device: torch.device) -> Batch:
    """The examples, cut to the context length, with random tokens, which are the same each time."""
    draw, filled = torch.Generator().manual_seed(0), []
    for example in sorted(examples, key=lambda example: len(example.input_ids)):
        labels = example.labels[:context_length]
        ids = torch.randint(0, vocabulary, (len(labels),), generator=draw).tolist()
        with_loss = [token if label != IGNORE else IGNORE for token, label in zip(ids, labels, strict=True)]
        filled.append(Example(ids, with_loss, example.document))
    return padded_batch(filled, context_length, 0, device)


# ----------------------------------------------------------------------------------------------------------- variants


@contextmanager
def varlen_if_supported(model: nn.Module) -> Iterator[nn.Module]:
    """Gives the model variable-length attention over packed texts, if flash attention runs its head size here."""
    decoder = without_adapter(model)
    config, before = decoder.config.get_text_config(), decoder.config._attn_implementation
    if runs_flash_attention(decoder.get_input_embeddings().weight.new_empty(0, head_size_of(config))):
        decoder.set_attn_implementation(ATTENTION)
    try:
        yield model
    finally:
        decoder.set_attn_implementation(before)


def packed_loss(model: nn.Module, row: dict) -> Tensor:
    if without_adapter(model).config._attn_implementation != ATTENTION:
        # From the position ids alone, transformers builds a block-diagonal mask.
        row = {name: row[name] for name in ("input_ids", "labels", "position_ids")}
    return PADDED.loss(model, row)


PACKED = Variant("packed", varlen_if_supported, packed_loss, packed)
VARIANTS = (PADDED, DROP_IN, DYNAMICALLY_PADDED, PACKED, HOISTED, OUR_STEP)


def compare(model: nn.Module, batch: Batch, variants: Iterable[Variant] = VARIANTS, rounds: int = ROUNDS) -> list[dict]:
    """One row per variant: `status` is "ok", or the reason why there is no time.

    Args:
        model: a decoder on its device; its trained parameters require gradients, and the timed steps update them.
        batch: right-padded, on the model's device.
    """
    device, count = batch.input_ids.device, len(batch.input_ids)
    attempt = _Attempts(model, device)
    expected = references(model, batch, [count], LOSS_TOLERANCE)[count]
    found: dict[Variant, tuple[dict, list[Times]]] = {}
    for variant in variants:
        row = {"variant": variant.name, "status": variant.unsupported_reason(device) or "ok"}
        found[variant] = row, []
        if row["status"] == "ok":
            with attempt(row), running(model, batch, variant) as step:
                deviation = expected.deviation(*loss_and_gradients(step, model))
                row |= vars(deviation)
                wrong = expected.describe_error(deviation)
                row |= {"status": f"wrong: {wrong}"} if wrong else {}
    for _ in range(rounds):
        for variant, (row, times) in found.items():
            if row["status"] == "ok":
                # The first step has the costs that a training has only once.
                with attempt(row), running(model, batch, variant) as step:
                    times += time_steps(step, device, warm_ups=1, repeats=STEPS_PER_ROUND)
    return [row | figures(medians(times)) if row["status"] == "ok" else row for row, times in found.values()]


def figures(times: Times) -> dict:
    """Milliseconds of each part that can be told apart, and the peak."""
    seconds = {"forward": times.forward, "backward": times.backward, "step": times.step}
    found = {f"{part}_ms": 1e3 * each for part, each in seconds.items() if each is not None}
    return found if times.peak_bytes is None else found | {"peak_gib": times.peak_bytes / 2**30}


class _Attempts:
    """Writes into a row why its variant failed, and frees the memory that the failure left behind."""

    def __init__(self, model: nn.Module, device: torch.device):
        self._model, self._device, self._autograd_queue = model, device, AutogradQueue(device)

    @contextmanager
    def __call__(self, row: dict) -> Iterator[None]:
        try:
            yield
            return
        except (SebpEdgeError, RuntimeError, MemoryError, TypeError, ValueError, KeyError) as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            row["status"] = "out of memory" if ran_out_of_memory(error) else reason
            # Its frames keep computed tensors alive.
            clear_frames(error)
        self._model.zero_grad()
        self._autograd_queue.clear()
        release_memory(self._device)


if __name__ == "__main__":
    main()
