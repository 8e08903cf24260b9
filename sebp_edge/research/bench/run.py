"""Runs the benchmark of `sebp-edge bench`: from a model and the lengths of texts to the figures of all variants."""

import importlib.metadata
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import psutil
import torch

from sebp_edge.errors import OptionError, RecipeError, TextsError
from sebp_edge.events import Notice, Sink, silent
from sebp_edge.machine import devices
from sebp_edge.memory.refusal import refuse_if_too_big
from sebp_edge.memory.shape_reader import read_shape
from sebp_edge.models.adaptation import Adaptation, attach, trainable
from sebp_edge.models.catalog import DEFAULT_MODEL, ModelReference, resolve_config
from sebp_edge.models.hub_cache import local_folder
from sebp_edge.models.loading import BaseModel, load_base_model, local_tokenizer, model_from_config
from sebp_edge.recipe import Recipe
from sebp_edge.research.bench.compare import compare
from sebp_edge.research.bench.result import BenchResult
from sebp_edge.research.bench.workload import Workload, built_in_examples, padded_length, pick_spread_lengths
from sebp_edge.texts.examples import Example, encode
from sebp_edge.texts.readers import read_texts

BATCH_SIZE = 4
# Share of the host's free memory to use; the rest is for other programs.
FREE_SHARE = 0.9


def run_bench(
    model: str | Path = DEFAULT_MODEL,
    texts=None,
    *,
    recipe: str | Path | Recipe = "notes",
    context_length: int | None = None,
    padding: float | None = None,
    batch_size: int = BATCH_SIZE,
    device: str | None = None,
    on_event: Sink = silent,
    on_progress: Callable[[str], None] = lambda state: None,
) -> BenchResult:
    """Times a training step of `model` in every variant, after checking each variant against an fp32 reference.

    Args:
        model: a known name, a folder, a Hub id, or a config.json. If its weights are not on this machine, random
            weights of its shape are used; weights are never downloaded.
        texts: what `read_texts` takes, used for their lengths; None for built-in lengths.
        recipe: sets the method, the rank and the default context length.
        context_length: tokens that examples are padded to; at most the model's limit.
        padding: share of padding in the padded batch; if given, it sets the context length.
        batch_size: the most examples in the batch.
        device: "cuda", "mps" or "cpu"; by default the best available one.
        on_event: receives notices.
        on_progress: called with a description of the next action.

    Raises:
        SebpEdgeError: a subclass of it, whose message says what to do.
    """
    on_progress("loading the model")
    reference, recipe, device = resolve_config(model), Recipe.load(recipe), devices.pick_device(device)
    if recipe.load_in_4bit or recipe.load_in_fp8:
        raise RecipeError(
            f"The recipe {recipe.name!r} loads models in {'FP8' if recipe.load_in_fp8 else '4 bits'}, which cannot be "
            "benchmarked; use another recipe."
        )
    longest = read_shape(reference).longest or math.inf
    if context_length is None:
        context_length = min(recipe.context_length, longest)
    recipe = recipe.replace(context_length=context_length)
    examples = _examples(texts, reference, recipe, batch_size)
    if padding is not None:
        context_length = padded_length(examples, padding)
    if context_length > longest:
        raise OptionError(
            f"The batch would be padded to {context_length} tokens, but {reference.name!r} takes at most {longest}; "
            "ask for less padding or a shorter context."
        )
    is_local = local_folder(reference) is not None
    refuse_if_too_big(reference, recipe, device)
    base = load_base_model(reference, recipe, device) if is_local else _make_base_model(reference, device)
    if not is_local:
        missing = f"The weights of {reference.name!r} are not on this machine"
        on_event(Notice(f"{missing}, so random weights of its shape are timed."))
    adaptation = _attach(base, recipe)
    workload = Workload.of(examples, context_length, base.model.config.get_text_config().vocab_size, device)
    with limited_host_memory(int(FREE_SHARE * devices.free_memory(device))) if device.type == "cpu" else nullcontext():
        measurements = compare(adaptation.model, workload.batch, on_progress=on_progress)
    return BenchResult(
        model=reference.name,
        weights="own" if is_local else "random",
        parameters=base.num_parameters,
        method=recipe.method,
        dtype=str(base.dtype).removeprefix("torch."),
        device=_describe(device),
        versions={name: importlib.metadata.version(name) for name in ("torch", "transformers", "peft")},
        lengths=workload.lengths,
        loss_tokens=workload.loss_tokens,
        context_length=workload.context_length,
        padding_share=workload.padding_share,
        measurements=measurements,
    )


@contextmanager
def limited_host_memory(size: int) -> Iterator[None]:
    """Lets this process take at most `size` more bytes of host memory within it; has no effect outside Linux.

    Running out raises an error then: Linux would kill the process silently.
    """
    if sys.platform != "linux":
        yield
        return
    import resource

    before, highest = resource.getrlimit(resource.RLIMIT_DATA)
    wanted = psutil.Process().memory_info().data + size
    limits = [wanted, *(limit for limit in (before, highest) if limit != resource.RLIM_INFINITY)]
    resource.setrlimit(resource.RLIMIT_DATA, (min(limits), highest))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (before, highest))


def _make_base_model(reference: ModelReference, device: torch.device) -> BaseModel:
    """Makes a model with random weights from its config alone; downloads nothing if the model is known by name."""
    dtype = devices.pick_dtype(device)
    with devices.forked_random_state(device):
        torch.manual_seed(0)
        model = model_from_config(reference, device, dtype)
    tokenizer = local_tokenizer(reference)
    return BaseModel(reference, model.eval(), tokenizer, device, dtype, fingerprint="random weights")


def _examples(texts, reference: ModelReference, recipe: Recipe, count: int) -> list[Example]:
    if texts is None:
        return built_in_examples(count)
    documents, tokenizer = read_texts(texts).documents, local_tokenizer(reference)
    examples, _ = encode(documents, tokenizer, recipe.context_length, chat_template=recipe.chat_template)
    if not examples:
        raise TextsError("These texts have no token to train on; give texts of two tokens or more.")
    return pick_spread_lengths(examples, count)


@torch.no_grad()
def _attach(base: BaseModel, recipe: Recipe) -> Adaptation:
    """Prepares the training; fills adapters at random, because a zero lora_B makes lora_A's gradients zero."""
    adaptation = attach(base, recipe, seed=0)
    if recipe.method == "lora":
        draw = torch.Generator(base.device).manual_seed(0)
        for parameter in trainable(adaptation):
            parameter.normal_(0.0, 0.02, generator=draw)
    return adaptation


def _describe(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "mps":
        return "an Apple GPU"
    threads = torch.get_num_threads()
    return f"{threads} {'thread' if threads == 1 else 'threads'} of the CPU"
