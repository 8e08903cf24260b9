"""What fits into a memory budget: plans are counted before anything is loaded, and the first that fits is chosen.

All plans give the same updates: a step is made of micro-batches, and a plan says how many rows one of them may have.
Fewer rows keep fewer activations, and read the weights more often.
"""

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import chain
from typing import NamedTuple

import torch

from sebp_edge.errors import MachineError
from sebp_edge.models import machine
from sebp_edge.models.shape import DecoderShape
from sebp_edge.recipe import Recipe
from sebp_edge.sparse.buckets import Bucket, choose_buckets
from sebp_edge.texts.batches import bucket_for, micro_batches, shuffled_steps
from sebp_edge.texts.dataset import Dataset
from sebp_edge.texts.examples import Example
from sebp_edge.texts.splits import Split, split_documents
from sebp_edge.training.footprint import Footprint, Machinery
from sebp_edge.training.losses import MAX_LOGITS, MAX_ROWS
from sebp_edge.units import gigabytes

_UNITS = {"": 1, "b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
# How much longer a training takes than its matrix products: a captured step on an H200, eager ones on CPUs.
OVERHEAD_GPU, OVERHEAD_CPU = 1.2, 2.0
# What a layer of a captured micro-batch takes however little it computes: of 9.9 ms for 128 tokens on an H200, what 28
# layers of a 3B model take beside reading their weights twice.
SECONDS_PER_LAYER = 0.25e-3


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
    def parse(cls, text: "str | int | MemoryBudget") -> "MemoryBudget":
        """Reads "8GB" (10^9 bytes each), "7.5 GiB" (2^30), "8000MB", or a number of bytes.

        Raises:
            MachineError: it is none of these, or not above zero.
        """
        if isinstance(text, MemoryBudget):
            return text
        is_number = isinstance(text, int) and not isinstance(text, bool)
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", str(text).lower(), re.ASCII)
        if isinstance(text, str | int) and (is_number or isinstance(text, str)) and found and found[2] in _UNITS:
            size = int(float(found[1]) * _UNITS[found[2]])
            if size > 0:
                return cls(size)
        raise MachineError(
            f"The memory budget is {text!r}, but must be a size above zero such as '8GB', '7.5GiB', '8000MB' or a "
            "number of bytes."
        )

    def within(self, free: int) -> "MemoryBudget":
        """No more than `free` bytes of it."""
        return self if self.size <= free else MemoryBudget(free, stated=self.size)

    def __str__(self) -> str:
        if self.stated is None:
            return gigabytes(self.size)
        return f"{gigabytes(self.stated)}, of which other programs leave {gigabytes(self.size)}"


class Alternative(NamedTuple):
    """A plan that was not chosen: rows of a micro-batch at most, predicted peak in bytes, seconds."""

    max_rows: int
    peak: int
    seconds: float


@dataclass(frozen=True)
class Plan:
    """The chosen way to train, and what it will take.

    Attributes:
        model, device, dtype, method: what is trained where, and how.
        budget: bytes that there are: what was asked for, or less if less is free.
        stated_budget: what was asked for in that case, else None.
        max_rows: most rows that one micro-batch may have; a single longer example stands alone.
        footprint: where the bytes go.
        seconds: about how long the training takes.
        dearer: the next faster plan, which needs more memory; None if the fastest was chosen.
        cheaper: the next plan that needs less; None if there is none.
    """

    model: str
    device: str
    dtype: str
    method: str
    budget: int
    stated_budget: int | None
    max_rows: int
    footprint: Footprint
    seconds: float
    dearer: Alternative | None
    cheaper: Alternative | None

    @property
    def peak(self) -> int:
        """The predicted peak, in bytes."""
        return self.footprint.total

    def to_dict(self) -> dict:
        """The plan as JSON-ready values."""
        alternatives = {
            name: None if plan is None else plan._asdict()
            for name, plan in (("dearer", self.dearer), ("cheaper", self.cheaper))
        }
        return asdict(self) | {"peak": self.peak} | alternatives


class _Candidate(NamedTuple):
    max_rows: int
    footprint: Footprint
    seconds: float

    def as_alternative(self) -> Alternative:
        return Alternative(self.max_rows, self.footprint.total, self.seconds)


def make_plan(
    shape: DecoderShape,
    dataset: Dataset,
    recipe: Recipe,
    seed: int,
    device: torch.device,
    budget: MemoryBudget,
    context: int,
) -> Plan:
    """The fastest plan that fits.

    Args:
        dataset: what will be trained on.
        context: bytes that the process holds outside torch's allocator.

    Raises:
        MachineError: none fits; it says what would.
        TextsError: too little text to train on.
    """
    splits = split_documents(dataset.examples, seed)
    if len(splits) > 1:
        # After the folds, one training on all.
        splits.append(Split(dataset.examples, [], []))
    dtype = machine.pick_dtype(device)
    machinery = Machinery.of(shape, recipe, device, dtype)
    rate = machine.matmul_rate(device, dtype)
    candidates = _without_useless(_candidates(machinery, dataset, splits, seed, rate, context))
    number = next((n for n, one in enumerate(candidates) if one.footprint.total <= budget.size), None)
    if number is None:
        raise _nothing_fits(machinery, candidates[-1].footprint, budget)
    chosen = candidates[number]
    dearer, cheaper = candidates[number - 1 : number], candidates[number + 1 : number + 2]
    return Plan(
        model=shape.name,
        device=device.type,
        dtype="nf4" if recipe.load_in_4bit else str(dtype).removeprefix("torch."),
        method=recipe.method,
        budget=budget.size,
        stated_budget=budget.stated,
        max_rows=chosen.max_rows,
        footprint=chosen.footprint,
        seconds=chosen.seconds,
        dearer=dearer[0].as_alternative() if dearer else None,
        cheaper=cheaper[0].as_alternative() if cheaper else None,
    )


def _candidates(
    machinery: Machinery, dataset: Dataset, splits: list[Split], seed: int, rate: float, context: int
) -> Iterator[_Candidate]:
    """All ways to train, the fastest first."""
    for max_rows in _limits(machinery, dataset):
        work = _Work.of(machinery.recipe, splits, seed, _Sizes(machinery, dataset.context_length, max_rows))
        footprint = machinery.footprint(work.trained, work.evaluated, context)
        passes = 4 if machinery.is_lora else 6  # 2 forward, 2 for the input's gradient, 2 for the weight's
        operations = machinery.shape.parameters * (passes * work.trained_tokens + 2 * work.evaluated_tokens)
        seconds = (OVERHEAD_GPU if machinery.on_gpu else OVERHEAD_CPU) * operations / rate
        if machinery.on_gpu:
            seconds = max(seconds, SECONDS_PER_LAYER * len(machinery.shape.blocks) * work.micro_batches)
        yield _Candidate(max_rows, footprint, seconds)


def _limits(machinery: Machinery, dataset: Dataset) -> Iterator[int]:
    """How many rows a micro-batch may have: halved down to the longest example, which cannot be cut."""
    rows, longest = MAX_ROWS, dataset.context_length
    if machinery.is_hoisted:
        longest = max(example.num_active_tokens for example in dataset.examples)
    else:
        rows = max(longest, min(rows, MAX_LOGITS // machinery.shape.vocabulary))
    while rows > longest:
        yield rows
        rows //= 2
    yield longest


def _without_useless(candidates: Iterator[_Candidate]) -> list[_Candidate]:
    """Without those that need no less memory than one that comes before them."""
    useful: list[_Candidate] = []
    for one in candidates:
        if not useful or one.footprint.total < useful[-1].footprint.total:
            useful.append(one)
    return useful


def _nothing_fits(machinery: Machinery, least: Footprint, budget: MemoryBudget) -> MachineError:
    shape, outside = machinery.shape, least.context
    enough = f"raise the budget to {least.total / 1e9 + 0.05:.1f} GB"
    would_do = "close other programs" if least.total <= (budget.stated or 0) else enough
    if budget.size > outside:
        share = (budget.size - outside) / (least.total - outside)
        would_do += f" or choose a model of at most about {share * shape.parameters / 1e9:.2g} billion parameters"
    return MachineError(
        f"{shape.name!r} has {shape.parameters / 1e9:.2f} billion parameters and needs about "
        f"{gigabytes(least.total)} to adapt with the recipe {machinery.recipe.name!r} even in the smallest "
        f"micro-batches, but the memory budget is {budget}; {would_do}."
    )


# ------------------------------------------------------------------------------------------- what there is to compute


@dataclass(frozen=True)
class _Work:
    """What a training computes: the sizes of its micro-batches, each once, and how many tokens' worth they are in all.

    `micro_batches` counts those with gradients. On a GPU they are filled up to buckets, whose costs count what a step
    costs whatever its tokens.
    """

    trained: list[Bucket]
    evaluated: list[Bucket]
    micro_batches: int
    trained_tokens: float
    evaluated_tokens: float

    @classmethod
    def of(cls, recipe: Recipe, splits: list[Split], seed: int, sizes: "_Sizes") -> "_Work":
        trained: list[Bucket] = []
        evaluated: list[Bucket] = []
        evaluated_tokens = 0.0
        for split in splits:
            steps = chain.from_iterable(shuffled_steps(split.train, recipe.batch_tokens, recipe.epochs, seed))
            trained += sizes.filled(list(chain.from_iterable(map(sizes.of, steps))))
            for part, times in ((split.select, recipe.epochs + 1), (split.judge, 2)):
                found = sizes.of(part)
                evaluated += found
                evaluated_tokens += times * sum(map(sizes.cost, found))
        return cls(
            trained=sorted(set(trained)),
            evaluated=sorted(set(evaluated)),
            micro_batches=len(trained),
            trained_tokens=sum(map(sizes.cost, trained)),
            evaluated_tokens=evaluated_tokens,
        )


class _Sizes:
    """The sizes of a training's micro-batches, as the training will cut them."""

    def __init__(self, machinery: Machinery, context_length: int, max_rows: int):
        self._hoisted, self._on_gpu = machinery.is_hoisted, machinery.on_gpu
        self._context_length, self._max_rows = context_length, max_rows

    def of(self, examples: list[Example]) -> list[Bucket]:
        return [self._size(group) for group in micro_batches(examples, self._max_rows, self._num_rows)]

    def filled(self, sizes: list[Bucket]) -> list[Bucket]:
        """Each in the bucket that it is filled up to."""
        if not (self._on_gpu and self._hoisted):
            return sizes
        buckets = choose_buckets(sizes)
        return [next(bucket for bucket in buckets if bucket.holds(own)) for own in sizes]

    def cost(self, sizes: Bucket) -> float:
        return sizes.cost if self._on_gpu else sizes.tokens

    def _num_rows(self, example: Example) -> int:
        return example.num_active_tokens if self._hoisted else self._context_length

    def _size(self, group: list[Example]) -> Bucket:
        if self._on_gpu and self._hoisted:
            return bucket_for(group)
        rows, losses = sum(map(self._num_rows, group)), sum(example.num_loss_tokens for example in group)
        return Bucket(rows, len(group), max(map(self._num_rows, group)), losses)
