"""Chooses how to train within a memory budget: predicts memory and time of choices, and takes the first that fits.

Nothing is loaded for that. The first choices trade time for memory: smaller micro-batches, which read the weights more
often, or recomputed activations, whichever fits and is faster. Their updates are the same. Later choices reduce
precision or capacity: 8-bit moments, a base model in 4 bits, a lower rank. Values that the recipe states never change.
The last choices stream the blocks' frozen weights from host memory, at the recipe's own rank again. What the choice
leaves of the budget holds dequantised copies of 4-bit weights, of as many blocks as fit, or blocks that need not be
streamed. Without a budget nothing is chosen, and a part of the free memory holds dequantised copies.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice

from sebp_edge.basics.units import parameters, percent, sizes_apart
from sebp_edge.engine.memory.amount_of_work import AmountOfWork
from sebp_edge.engine.memory.budget import MemoryBudget
from sebp_edge.engine.memory.memory_options import MAX_PADDED_LOGITS, MAX_ROWS, MemoryOptions
from sebp_edge.engine.memory.memory_plan import Choice, Plan
from sebp_edge.engine.memory.prediction import host_bytes, predict_footprint
from sebp_edge.engine.memory.seconds import estimate_seconds
from sebp_edge.engine.memory.setup import TrainingSetup
from sebp_edge.engine.memory.target import ASSUMED_RATE, Target
from sebp_edge.engine.models.four_bits import INSTALL_4_BITS, takes_4_bits
from sebp_edge.engine.models.shape import DecoderShape, max_decoded
from sebp_edge.engine.sparse.rows.schedule import RowLimit, Schedule
from sebp_edge.errors import MachineError
from sebp_edge.recipe import Recipe
from sebp_edge.values.dataset import Dataset
from sebp_edge.values.preparation_progress import SILENT, Progress

# Ranks that a plan may lower an adapter to.
LOWER_RANKS = (8, 4)
# Without a budget: the part of what a training leaves of the free memory that holds dequantised weights. The rest is
# for other programs, and for errors of the count.
PART_OF_FREE = 0.5
# The part of the rows that texts begin with in common from which a plan says how these are computed.
MIN_REPEATED = 0.01


def make_plan(
    shape: DecoderShape,
    dataset: Dataset,
    schedules: list[Schedule],
    recipe: Recipe,
    target: Target,
    budget: MemoryBudget,
    progress: Progress = SILENT,
) -> Plan:
    """Returns a plan with the first choice that fits, in order from the fastest to the one with the least memory.

    The schedules stay laid out for the smallest micro-batches of all choices.
    """
    candidates = _Candidates(shape, dataset, schedules, recipe, target, progress)
    larger = chosen = smaller = None
    fitting_host = (choice for choice in candidates.for_recipe(recipe) if choice.host_memory <= target.host)
    for choice in _ever_smaller(fitting_host):
        if chosen is not None:
            smaller = choice
            break
        if choice.peak <= budget.size:
            chosen = choice
        else:
            larger = choice
    if chosen is None and larger is None:
        raise _host_is_full(candidates, recipe)
    if chosen is None:
        raise _nothing_fits(candidates, larger, budget)
    chosen = candidates.filling_budget(chosen, budget.size)
    may_be_full = recipe.is_plain_lora
    fulls = candidates.for_recipe(recipe.replace(method="full")) if may_be_full else []
    full = next((each for each in fulls if each.peak <= budget.size and each.host_memory <= target.host), None)
    if target.rate is None:
        chosen, larger, smaller, full = (
            each and replace(each, seconds=None) for each in (chosen, larger, smaller, full)
        )
    return Plan(
        model=shape.name,
        device=target.device,
        budget=budget.size,
        requested_budget=budget.requested,
        chosen=chosen,
        larger=larger,
        smaller=smaller,
        full=full,
        gpu=target.gpu,
    )


def fill_free_memory(
    shape: DecoderShape, dataset: Dataset, schedules: list[Schedule], recipe: Recipe, target: Target, free: int
) -> Choice:
    """Returns the fastest choice, which may not fit, with dequantised blocks in a part of what it leaves free.

    The recipe has a base model in 4 bits; `free` are the bytes of memory that this process uses or may use.
    """
    candidates = _Candidates(shape, dataset, schedules, recipe, target, num_limits=1)
    fastest = candidates.fastest(recipe)
    if not shape.is_hoisted:
        return fastest
    return candidates.filled(fastest, fastest.peak + int(PART_OF_FREE * max(0, free - fastest.peak)))


class _Candidates:
    """Enumerates all choices for training on one dataset, with all row limits or only the largest."""

    def __init__(
        self,
        shape: DecoderShape,
        dataset: Dataset,
        schedules: list[Schedule],
        recipe: Recipe,
        target: Target,
        progress: Progress = SILENT,
        num_limits: int | None = None,
    ):
        self.shape, self.target = shape, target
        self.takes_4_bits = takes_4_bits(
            target.device, (linear.inputs for block in shape.blocks for linear in block.linears.values())
        )
        self._num_trainings = len(schedules)
        num_judged = sum(not schedule.trains_on_all for schedule in schedules)
        self._judged = f"judged in {num_judged} folds" if num_judged > 1 else ""
        # The layout depends on the row limit only, so the schedules are laid out once for each.
        setup = self._setup(recipe)
        padded_to = None if setup.is_hoisted else dataset.context_length
        self._work_by_max_rows: dict[int, AmountOfWork] = {}
        limits = list(islice(_limits(setup, dataset), num_limits))

        def count_work() -> Iterator[int]:
            """Yields the number of epochs that were laid out."""
            for max_rows in limits:
                limit = RowLimit.on(target.device, max_rows, padded_to)
                for schedule in schedules:
                    schedule.lay_out(limit)
                    yield schedule.last_epoch
                limit = limit.evaluating_like(schedules)
                for schedule in schedules:
                    schedule.cut_evaluations(limit)
                self._work_by_max_rows[max_rows] = AmountOfWork.of(
                    schedules,
                    dataset.all_examples,
                    on_gpu=setup.on_gpu,
                    has_graphs=setup.on_gpu and setup.is_hoisted,
                    shares_prefixes=setup.shares_prefixes,
                )

        progress.begin("planning", len(limits) * sum(schedule.last_epoch for schedule in schedules))
        for epochs in progress.watch(count_work()):
            progress.advance(epochs)
        progress.end()

    def for_recipe(self, recipe: Recipe) -> Iterator[Choice]:
        """Yields all choices, the fastest first; then those with less precision or a lower rank, step by step."""
        stated, recipe = recipe, recipe.with_defaults().for_size(self.shape.parameters)
        recipes = [recipe]
        yield from self._all_options(recipe, in_8_bits=False)
        is_lora = recipe.method == "lora"
        if is_lora and stated.load_in_4bit is None and self.takes_4_bits and self.target.has_bitsandbytes:
            recipes.append(recipe.replace(load_in_4bit=True))
        if is_lora and stated.r is None:
            # Keeps the scale of the adapter's product, lora_alpha / r.
            recipes += [
                recipes[-1].replace(r=r, lora_alpha=max(1, recipe.lora_alpha * r // recipe.r)) for r in LOWER_RANKS
            ]
        for each in recipes:
            yield from self._all_options(each, in_8_bits=True)
        if not (is_lora and self.target.on_gpu and self.shape.is_hoisted):
            return
        for each in recipes:
            if each.load_in_4bit == recipes[-1].load_in_4bit:
                for in_8_bits in (False, True):
                    yield from self._all_options(each, in_8_bits=in_8_bits, streamed=len(self.shape.blocks))

    def filling_budget(self, chosen: Choice, budget: int) -> Choice:
        """Returns the fastest choice of the same precision if each is `filled`."""
        streamed = chosen.options.streamed_blocks
        if not ((chosen.recipe.load_in_4bit or streamed) and self.shape.is_hoisted):
            return chosen
        alike = self._all_options(chosen.recipe, in_8_bits=chosen.options.moments_in_8_bits, streamed=streamed)
        fitting = [each for each in alike if each.peak <= budget and each.host_memory <= self.target.host]
        return min((self.filled(each, budget) for each in fitting), key=lambda choice: choice.seconds)

    def fastest(self, recipe: Recipe) -> Choice:
        """Returns the fastest choice of the recipe's own precision."""
        options = MemoryOptions(max_rows=next(iter(self._work_by_max_rows)))
        return self._choice(replace(self._setup(recipe), options=options))

    def filled(self, choice: Choice, budget: int) -> Choice:
        """Returns a choice that fits with as many blocks as fit not streamed, or dequantised too."""
        setup, streamed = self._setup(choice.recipe), choice.options.streamed_blocks

        def with_blocks(number: int) -> Choice:
            changed = {"streamed_blocks": streamed - number} if streamed else {"dequantised_blocks": number}
            return self._choice(replace(setup, options=replace(choice.options, **changed)))

        numbers = range(1, len(self.shape.blocks) + 1)
        return with_blocks(bisect_right(numbers, budget, key=lambda number: with_blocks(number).peak))

    def _all_options(self, recipe: Recipe, *, in_8_bits: bool, streamed: int = 0) -> list[Choice]:
        """Returns all choices with the same recipe, precision and number of streamed blocks, the fastest first."""
        setup = self._setup(recipe)
        max_checkpoints = len(self.shape.blocks) - 1 if setup.is_hoisted else 0
        alternatives = [{"checkpoints": each} for each in sorted({round(max_checkpoints * n / 4) for n in range(5)})]
        if setup.on_gpu and max_checkpoints:
            offloaded = alternatives[-1] | {"offload": True}
            alternatives += [offloaded, offloaded | {"chunked_blocks": True}]
        fixed = {"moments_in_8_bits": in_8_bits, "streamed_blocks": streamed}
        all_options = [MemoryOptions(max_rows=next(iter(self._work_by_max_rows)), **fixed)]
        all_options += [
            MemoryOptions(max_rows=max_rows, small_buffers=True, **fixed, **alternative)
            for max_rows in self._work_by_max_rows
            for alternative in alternatives
        ]
        # If each micro-batch is a step, choices with few micro-batches come first, closest to the recipe's steps.
        cuts_steps = setup.updates_in_backward

        def order(choice: Choice) -> tuple[int, float]:
            return cuts_steps and self._work_by_max_rows[choice.options.max_rows].micro_batches, choice.seconds

        return sorted((self._choice(replace(setup, options=options)) for options in all_options), key=order)

    def _choice(self, setup: TrainingSetup) -> Choice:
        work, recipe = self._work_by_max_rows[setup.options.max_rows], setup.recipe
        footprint = predict_footprint(
            setup, work.trained, work.evaluated, self.target.context, num_trainings=self._num_trainings
        )
        dtype = "nf4" if recipe.load_in_4bit else self.target.dtype
        host_memory = host_bytes(setup, work.trained, num_trainings=self._num_trainings)
        seconds = estimate_seconds(setup, work, self.target.rate or ASSUMED_RATE, self.target.bus)
        words = self._kept(setup), _common(setup, work), self._judged
        decoding = sum(setup.streamed_bytes) / self.target.bus, max_decoded(has_states=self.shape.has_states)
        return Choice(recipe, dtype, setup.options, footprint, host_memory, seconds, *words, *decoding)

    def _kept(self, setup: TrainingSetup) -> str:
        """Returns which weights are in host memory, or are held dequantised beside 4 bits, in words."""
        number, blocks = setup.options.dequantised_blocks, len(self.shape.blocks)
        tables = "lookup tables in host memory" if setup.embeddings_on_host else ""
        if streamed := setup.options.streamed_blocks:
            embeddings = " and of the embeddings" if setup.embeddings_on_host else ""
            return f"weights of {streamed} of {blocks} blocks{embeddings} in host memory, copied for each pass"
        if not setup.recipe.load_in_4bit:
            return tables
        dtype = "bf16" if self.target.itemsize == 2 else "fp32"
        words = f"{number} of {blocks} blocks kept in {dtype}"
        if not number:
            words = f"no block kept in {dtype}: every pass dequantises all {blocks}"
        return ", ".join(filter(None, [tables, words]))

    def _setup(self, recipe: Recipe) -> TrainingSetup:
        target = self.target
        return TrainingSetup(self.shape, recipe.with_defaults(), target.on_gpu, target.has_kernels, target.itemsize)


def _common(setup: TrainingSetup, work: AmountOfWork) -> str:
    """Returns how what texts begin with in common is computed, in words; "" if that is next to nothing."""
    if work.repeated < MIN_REPEATED:
        return ""
    if setup.shares_prefixes:
        return f"common beginnings computed once, which saves {percent(work.repeated)} of the rows"
    return "common beginnings computed again for each text"


def _limits(setup: TrainingSetup, dataset: Dataset) -> Iterator[int]:
    """Yields row limits for micro-batches, two per halving, down to the longest example, which cannot be cut."""
    rows, longest = MAX_ROWS, dataset.context_length
    if setup.is_hoisted:
        longest = max(example.num_active_tokens for example in dataset.examples)
    else:
        rows = max(longest, min(rows, MAX_PADDED_LOGITS // setup.shape.vocabulary))
    while rows > longest:
        yield rows
        if 3 * rows // 4 > longest:
            yield 3 * rows // 4
        rows //= 2
    yield longest


def _ever_smaller(choices: Iterable[Choice]) -> Iterator[Choice]:
    """Yields the choices that need less memory than all before them."""
    smallest = None
    for choice in choices:
        if smallest is None or choice.peak < smallest:
            smallest = choice.peak
            yield choice


def _host_is_full(candidates: _Candidates, recipe: Recipe) -> MachineError:
    least = min(choice.host_memory for choice in candidates.for_recipe(recipe))
    needed, free = sizes_apart(least, candidates.target.host)
    adapter = " or train an adapter" if recipe.method == "full" else ""
    return MachineError(
        f"Adapting {candidates.shape.name!r} with the recipe {recipe.name!r} needs about {needed} of host "
        f"memory in addition to GPU memory, but {free} are free; close other "
        f"programs{adapter}."
    )


def _nothing_fits(candidates: _Candidates, smallest: Choice, budget: MemoryBudget) -> MachineError:
    shape, target, recipe, outside = candidates.shape, candidates.target, smallest.recipe, smallest.footprint.context
    needed, size, requested = sizes_apart(smallest.peak, budget.size, budget.requested or budget.size)
    left = f"{requested}, of which other programs leave {size}" if budget.requested else size
    limit = "the GPU has" if target.gpu == budget.size else "the memory budget is"
    needs_another = target.gpu is not None and smallest.peak > target.gpu
    enough = f"{'take a GPU with' if needs_another else 'raise the budget to'} {smallest.peak / 1e9 + 0.05:.1f} GB"
    alternatives = ["close other programs" if smallest.peak <= (budget.requested or 0) else enough]
    if budget.size > outside:
        share = (budget.size - outside) / (smallest.peak - outside)
        alternatives.append(f"choose a model of at most about {parameters(share * shape.parameters)} parameters")
    if recipe.is_plain_lora:
        in_4_bits = candidates.for_recipe(recipe.replace(load_in_4bit=True))
        if candidates.takes_4_bits and any(choice.peak <= budget.size for choice in in_4_bits):
            install = "" if target.has_bitsandbytes else f", after {INSTALL_4_BITS}"
            alternatives.append(f"load the model in 4 bits{install}")
    streamed = (each for each in candidates.for_recipe(recipe) if each.options.streamed_blocks)
    if least := min((each.host_memory for each in streamed if each.peak <= budget.size), default=0):
        needed_on_host, free_on_host = sizes_apart(least, target.host)
        alternatives.append(f"free host memory, where its blocks need {needed_on_host} but {free_on_host} are free")
    *but_last, last = alternatives
    return MachineError(
        f"{shape.name!r} has {parameters(shape.parameters)} parameters and needs at least about "
        f"{needed} to adapt with the recipe {recipe.name!r}, but {limit} {left}; "
        f"{', '.join(but_last)}{' or ' if but_last else ''}{last}."
    )
