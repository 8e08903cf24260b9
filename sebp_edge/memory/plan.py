"""What fits into a memory budget: plans are counted before anything is loaded, and the first that fits is chosen.

First time is given up: a step is made of smaller micro-batches, which read the weights more often, or activations are
computed again; the faster of the two that fits. The updates stay the same. Then what little it costs to learn with
less: moments in 8 bits, a base model in 4 bits, a lower rank. What the recipe states is never given up.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace

from sebp_edge.errors import MachineError
from sebp_edge.memory.footprint import Footprint, host_bytes
from sebp_edge.memory.options import MAX_PADDED_LOGITS, MAX_ROWS, MemoryOptions
from sebp_edge.memory.setup import TrainingSetup
from sebp_edge.memory.target import Target
from sebp_edge.memory.work import Work
from sebp_edge.models.loading import INSTALL_4_BITS, takes_4_bits
from sebp_edge.models.shape import DecoderShape
from sebp_edge.patches.mlp_pieces import ROWS
from sebp_edge.recipe import Recipe
from sebp_edge.texts.dataset import Dataset
from sebp_edge.texts.schedule import RowLimit, Schedule
from sebp_edge.units import gigabytes

_UNITS = {"": 1, "b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
# How much longer a training takes than its matrix products: a captured step on an H200, eager ones on CPUs.
OVERHEAD_GPU, OVERHEAD_CPU = 1.2, 2.0
# What a layer of a captured micro-batch takes however little it computes: of 9.9 ms for 128 tokens on an H200, what 28
# layers of a 3B model take beside reading their weights twice.
SECONDS_PER_LAYER = 0.25e-3
# What loss and gradients in pieces add to a step, at most: a head that is read more often, a kernel for each gradient.
IN_PIECES = 1.03
# What blocks in pieces add, whose products have fewer rows: 193 -> 212 ms with all blocks of a 3B model in checkpoints,
# when a piece had 512.
BLOCKS_IN_PIECES = 1.1
# What dequantising the weights in every pass takes, in tokens: 2.5 bytes moved for a weight that a token takes 2
# floating-point operations of, on GPUs that make some 200 of these in the time of a byte.
TOKENS_PER_DEQUANTISATION = 250
# Bytes a second to the host or back, by PCI Express with 16 lanes of its fourth generation; an H100's fifth gives 55e9.
HOST_RATE = 24e9
# What the rank may be lowered to.
LOWER_RANKS = (8, 4)


@dataclass(frozen=True)
class MemoryBudget:
    """How much memory an adaptation may take, in bytes: of the GPU's, or of the process on the CPU.

    Attributes:
        size: what it may take.
        stated: what was asked for, if less is free.
    """

    size: int
    stated: int | None = None

    @classmethod
    def parse(cls, text: "str | int | MemoryBudget", what: str = "memory budget") -> "MemoryBudget":
        """Reads "8GB" (10^9 bytes each), "7.5 GiB" (2^30), "8000MB", or a number of bytes.

        Args:
            what: it is called in an error.

        Raises:
            MachineError: it is none of these, or not above zero.
        """
        if isinstance(text, MemoryBudget):
            return text
        is_number = isinstance(text, int) and not isinstance(text, bool)
        found = re.fullmatch(r"\s*(\d{1,30}(?:\.\d{1,30})?)\s*([a-z]*)\s*", str(text).lower(), re.ASCII)
        if isinstance(text, str | int) and (is_number or isinstance(text, str)) and found and found[2] in _UNITS:
            size = int(float(found[1]) * _UNITS[found[2]])
            if size > 0:
                return cls(size)
        raise MachineError(
            f"The {what} is {text!r}, but must be a size above zero such as '8GB', '7.5GiB', '8000MB' or a "
            "number of bytes."
        )

    def within(self, free: int) -> "MemoryBudget":
        """No more than `free` bytes of it."""
        return self if self.size <= free else MemoryBudget(free, stated=self.size)

    def __str__(self) -> str:
        if self.stated is None:
            return gigabytes(self.size)
        return f"{gigabytes(self.stated)}, of which other programs leave {gigabytes(self.size)}"


@dataclass(frozen=True)
class Choice:
    """One way to train, and what it would take.

    Attributes:
        recipe: with everything settled that it leaves to the memory budget.
        dtype: the base model's; "nf4" if its linear layers are in 4 bits.
        options: what is held in memory at once.
        footprint: where the bytes go.
        on_host: bytes of the host's memory besides, where a GPU trains.
        seconds: about how long the training takes; None where that is not known.
    """

    recipe: Recipe
    dtype: str
    options: MemoryOptions
    footprint: Footprint
    on_host: int
    seconds: float | None

    @property
    def peak(self) -> int:
        """The predicted peak, in bytes."""
        return self.footprint.total

    @property
    def how(self) -> str:
        """What it does, in words."""
        options = self.options
        adapter = f"LoRA of rank {self.recipe.r} on {self.dtype}" if self.recipe.method == "lora" else "all weights"
        words = [adapter, f"{options.max_rows:,} tokens at a time"]
        if options.checkpoints:
            plural = "s" * (options.checkpoints > 1)
            words.append(f"activations of {options.checkpoints} block{plural} computed again")
        elif options.in_pieces:
            words.append("the loss in smaller chunks")
        if options.offload:
            words.append("their inputs in the host's memory")
        if options.blocks_in_pieces:
            words.append("blocks in pieces")
        if options.moments_in_8_bits:
            words.append("moments in 8 bits")
        return ", ".join(words)

    def to_dict(self) -> dict:
        """JSON-ready values."""
        chosen = {"method": self.recipe.method, "r": self.recipe.r, "dtype": self.dtype, **asdict(self.options)}
        figures = {"peak": self.peak, "on_host": self.on_host, "seconds": self.seconds}
        return chosen | figures | {"footprint": asdict(self.footprint)}


@dataclass(frozen=True)
class Plan:
    """The chosen way to train, and what it will take.

    Attributes:
        model, device: what is trained where.
        budget: bytes that there are: what was asked for, or less if less is free.
        stated_budget: what was asked for in that case, else None.
        chosen: how.
        dearer: the next plan of the same recipe that is faster or learns more, and needs more memory; None if there is
            none.
        cheaper: the next plan that needs less; None if there is none.
        full: how all weights could be trained within the budget instead of an adapter; None if they cannot.
        gpu: bytes of the GPU that it is for, if that is not here; None for this machine.
    """

    model: str
    device: str
    budget: int
    stated_budget: int | None
    chosen: Choice
    dearer: Choice | None
    cheaper: Choice | None
    full: Choice | None
    gpu: int | None = None

    def to_dict(self) -> dict:
        """The plan as JSON-ready values."""
        others = {name: getattr(self, name) for name in ("dearer", "cheaper", "full")}
        place = {"model": self.model, "device": self.device, "gpu": self.gpu, "budget": self.budget}
        return (
            place
            | self.chosen.to_dict()
            | {name: None if other is None else other.to_dict() for name, other in others.items()}
        )


def make_plan(
    shape: DecoderShape,
    dataset: Dataset,
    schedules: list[Schedule],
    recipe: Recipe,
    target: Target,
    budget: MemoryBudget,
) -> Plan:
    """The first plan that fits, of all from the fastest to the one that needs least.

    Args:
        dataset: what will be trained on.
        schedules: of its trainings; they are laid out in the end for the smallest micro-batches that were counted.
        recipe: what it states stands; what it leaves out may be chosen.
        target: what it is trained on.

    Raises:
        MachineError: none fits; it says what would.
    """
    candidates = _Candidates(shape, dataset, schedules, recipe, target)
    dearer = chosen = cheaper = None
    for one in _useful(one for one in candidates.of(recipe) if one.on_host <= target.host):
        if chosen is not None:
            cheaper = one
            break
        if one.peak <= budget.size:
            chosen = one
        else:
            dearer = one
    if chosen is None and dearer is None:
        raise _host_is_full(candidates, recipe)
    if chosen is None:
        raise _nothing_fits(candidates, dearer, budget)
    may_be_full = recipe.method == "lora" and not recipe.load_in_4bit
    fulls = candidates.of(recipe.replace(method="full")) if may_be_full else []
    full = next((one for one in fulls if one.peak <= budget.size and one.on_host <= target.host), None)
    chosen, dearer, cheaper, full = (_as_known(one, target) for one in (chosen, dearer, cheaper, full))
    return Plan(
        model=shape.name,
        device=target.device.type,
        budget=budget.size,
        stated_budget=budget.stated,
        chosen=chosen,
        dearer=dearer,
        cheaper=cheaper,
        full=full,
        gpu=target.gpu,
    )


def _as_known(one: Choice | None, target: Target) -> Choice | None:
    """The choice without its time, where nobody knows how fast the target is."""
    return one if one is None or target.gpu is None else replace(one, seconds=None)


class _Candidates:
    """All ways to train on one dataset."""

    def __init__(
        self, shape: DecoderShape, dataset: Dataset, schedules: list[Schedule], recipe: Recipe, target: Target
    ):
        self.shape, self.target = shape, target
        self.takes_4_bits = takes_4_bits(
            target.device, (linear.inputs for block in shape.blocks for linear in block.linears.values())
        )
        self._has_folds = len(schedules) > 1
        # In what order and sizes texts are trained on does not depend on what else is chosen.
        setup = self._setup(recipe)
        padded_to = None if setup.is_hoisted else dataset.context_length
        self._works: dict[int, Work] = {}
        for max_rows in _limits(setup, dataset):
            limit = RowLimit.on(target.device, max_rows, padded_to)
            for schedule in schedules:
                schedule.lay_out(limit)
            self._works[max_rows] = Work.of(schedules, on_gpu=setup.on_gpu, in_graphs=setup.on_gpu and setup.is_hoisted)

    def of(self, recipe: Recipe) -> Iterator[Choice]:
        """The fastest first; what is learnt is given up last, a little at a time."""
        settled = recipe.settled()
        recipes = [settled]
        yield from self._all_options(settled, in_8_bits=False)
        if (
            settled.method == "lora"
            and recipe.load_in_4bit is None
            and self.takes_4_bits
            and self.target.has_bitsandbytes
        ):
            recipes.append(settled.replace(load_in_4bit=True))
        if settled.method == "lora" and recipe.r is None:
            # The adapter's product is scaled as before.
            recipes += [
                recipes[-1].replace(r=r, lora_alpha=max(1, settled.lora_alpha * r // settled.r)) for r in LOWER_RANKS
            ]
        for one in recipes:
            yield from self._all_options(one, in_8_bits=True)

    def _all_options(self, recipe: Recipe, *, in_8_bits: bool) -> list[Choice]:
        """All that learn the same, the fastest first."""
        setup = self._setup(recipe)
        most = len(self.shape.blocks) - 1 if setup.is_hoisted else 0
        ways = [{"checkpoints": checkpoints} for checkpoints in _shares(most)]
        if setup.on_gpu and most:
            offloaded = ways[-1] | {"offload": True}
            ways += [offloaded, offloaded | {"blocks_in_pieces": True}]
        all_options = [MemoryOptions(max_rows=next(iter(self._works)), moments_in_8_bits=in_8_bits)]
        all_options += [
            MemoryOptions(max_rows=max_rows, in_pieces=True, moments_in_8_bits=in_8_bits, **way)
            for max_rows in self._works
            for way in ways
        ]
        # Where each micro-batch is a step, they should be as few as the recipe asks for.
        cuts_steps = setup.updates_in_backward
        choices = [self._choice(replace(setup, options=options)) for options in all_options]
        return sorted(
            choices, key=lambda one: (cuts_steps and self._works[one.options.max_rows].micro_batches, one.seconds)
        )

    def _choice(self, setup: TrainingSetup) -> Choice:
        work, recipe = self._works[setup.options.max_rows], setup.recipe
        footprint = Footprint.of(setup, work.trained, work.evaluated, self.target.context, has_folds=self._has_folds)
        dtype = "nf4" if recipe.load_in_4bit else str(self.target.dtype).removeprefix("torch.")
        on_host = host_bytes(setup, work.trained, has_folds=self._has_folds)
        return Choice(recipe, dtype, setup.options, footprint, on_host, _seconds(setup, work, self.target.rate))

    def _setup(self, recipe: Recipe) -> TrainingSetup:
        target = self.target
        return TrainingSetup(self.shape, recipe.settled(), target.on_gpu, target.has_kernels, target.dtype.itemsize)


def _seconds(setup: TrainingSetup, work: Work, rate: float) -> float:
    """About how long the work takes, at `rate` floating-point operations a second.

    A token takes 2 for each parameter forward, 2 for the input's gradient, 2 for the weight's if that is trained, and 2
    for what is computed again.
    """
    parameters, again = setup.shape.parameters, setup.computed_again
    passes = (2 if setup.is_lora else 3) * parameters + again
    tokens = work.trained_tokens
    if setup.recipe.load_in_4bit:
        times = -(-setup.options.max_rows // ROWS) if setup.options.blocks_in_pieces else 1
        tokens += TOKENS_PER_DEQUANTISATION * work.micro_batches * times
    if setup.options.in_pieces:
        tokens *= IN_PIECES
    if setup.options.blocks_in_pieces:
        tokens *= BLOCKS_IN_PIECES
    operations = 2 * (passes * tokens + parameters * work.evaluated_tokens)
    seconds = (OVERHEAD_GPU if setup.on_gpu else OVERHEAD_CPU) * operations / rate
    if setup.on_gpu:
        layers = len(setup.shape.blocks) * (1 + again / parameters / 2)
        seconds = max(seconds, SECONDS_PER_LAYER * layers * work.micro_batches)
    copies = setup.offloaded_per_token * work.trained_tokens / HOST_RATE
    # To the host in the forward pass, a third of the work, and back in the backward pass.
    return max(seconds / 3, copies) + max(2 * seconds / 3, copies)


def _shares(number: int) -> list[int]:
    """None of so many, a quarter of them, half, three quarters, and all."""
    return sorted({round(number * share / 4) for share in range(5)})


def _limits(setup: TrainingSetup, dataset: Dataset) -> Iterator[int]:
    """How many rows a micro-batch may have: two in each halving, down to the longest example, which cannot be cut."""
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


def _useful(choices: Iterable[Choice]) -> Iterator[Choice]:
    """Those that need less memory than all that come before them."""
    least = None
    for one in choices:
        if least is None or one.peak < least:
            least = one.peak
            yield one


def _host_is_full(candidates: _Candidates, recipe: Recipe) -> MachineError:
    needed = min(one.on_host for one in candidates.of(recipe))
    adapter = ", or train an adapter" if recipe.method == "full" else ""
    return MachineError(
        f"To adapt {candidates.shape.name!r} with the recipe {recipe.name!r} takes about {gigabytes(needed)} of the "
        f"host's memory beside the GPU's, and {gigabytes(candidates.target.host)} are free; close other "
        f"programs{adapter}."
    )


def _nothing_fits(candidates: _Candidates, least: Choice, budget: MemoryBudget) -> MachineError:
    shape, target, recipe, outside = candidates.shape, candidates.target, least.recipe, least.footprint.context
    limit = "the GPU has" if target.gpu == budget.size else "the memory budget is"
    needs_another = target.gpu is not None and least.peak > target.gpu
    enough = f"{'take a GPU with' if needs_another else 'raise the budget to'} {least.peak / 1e9 + 0.05:.1f} GB"
    ways = ["close other programs" if least.peak <= (budget.stated or 0) else enough]
    if budget.size > outside:
        share = (budget.size - outside) / (least.peak - outside)
        ways.append(f"choose a model of at most about {share * shape.parameters / 1e9:.2g} billion parameters")
    if recipe.method == "lora" and not recipe.load_in_4bit:
        in_4_bits = candidates.of(recipe.replace(load_in_4bit=True))
        if candidates.takes_4_bits and any(one.peak <= budget.size for one in in_4_bits):
            install = "" if target.has_bitsandbytes else f", after {INSTALL_4_BITS}"
            ways.append(f"load the model in 4 bits{install}")
    *but_last, last = ways
    return MachineError(
        f"{shape.name!r} has {shape.parameters / 1e9:.2f} billion parameters and needs about "
        f"{gigabytes(least.peak)} to adapt with the recipe {recipe.name!r} even with as little memory as it can, "
        f"but {limit} {budget}; {', '.join(but_last)}{' or ' if but_last else ''}{last}."
    )
