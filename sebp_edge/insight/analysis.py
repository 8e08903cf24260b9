"""How sparse the gradients of a model on its owner's texts really are, by layer and projection.

What is counted are rows of dL/dY: those that are exactly zero, those below the knee of the distribution of norms, and
how few of them hold 99 % of the squared norm. Nothing in an analysis is text: it has counts, norms and positions.
"""

import random
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from statistics import fmean

import torch

from sebp_edge.errors import TextsError
from sebp_edge.events import ExampleAnalyzed, Sink
from sebp_edge.insight.gradients import RowGradients, row_gradients
from sebp_edge.insight.heat_maps import HeatMap, of_examples, of_projections
from sebp_edge.insight.report import draw
from sebp_edge.models.loading import BaseModel
from sebp_edge.rows import row_rules
from sebp_edge.texts.batches import Batch, Collator
from sebp_edge.texts.dataset import Dataset
from sebp_edge.texts.examples import Example

HELD = 0.99
EVERY_TOKEN, LEARNT_TOKENS = "every token", "learnt tokens"


@dataclass(frozen=True)
class Lengths:
    """Tokens of examples, and what part of them is padding if each is padded to the context length."""

    examples: int
    tokens: int
    mean: float
    longest: int
    shortest: int
    padding_share: float

    @classmethod
    def of(cls, examples: list[Example], context_length: int) -> "Lengths":
        """Counts them."""
        lengths = [len(example.input_ids) for example in examples]
        padding_share = 1 - sum(lengths) / (len(lengths) * context_length)
        return cls(len(lengths), sum(lengths), fmean(lengths), max(lengths), min(lengths), padding_share)


@dataclass(frozen=True)
class LayerRows:
    """The rows of dL/dY of one linear layer, all examples together, padding included.

    Attributes:
        block: the number of its block, from 0; None for the head.
        projection: its name within the block.
        rows: all of them.
        zero: those whose elements are all exactly zero.
        computed: those that SEBP computes in the backward pass: read off the labels, before it begins.
        below_knee: those with a norm below the knee; the zero ones are among them.
        holding: the fewest that hold 99 % of the squared norm.
        knee: where the distribution of norms has its knee, relative to the median norm of the rows that are not zero.
        energy_below_knee: the share of the squared norm in the rows below the knee.
    """

    block: int | None
    projection: str
    rows: int
    zero: int
    computed: int
    below_knee: int
    holding: int
    knee: float
    energy_below_knee: float


@dataclass(frozen=True)
class GroupShares:
    """One projection in several layers: the means of their shares of rows, and of squared norm below the knee."""

    projection: str
    zero: float
    below_knee: float
    energy_below_knee: float
    holding: float

    @classmethod
    def of(cls, projection: str, layers: list[LayerRows]) -> "GroupShares":
        """Takes the means."""
        zero, below, holding = (
            fmean(getattr(layer, name) / layer.rows for layer in layers) for name in ("zero", "below_knee", "holding")
        )
        return cls(projection, zero, below, fmean(layer.energy_below_knee for layer in layers), holding)


@dataclass(frozen=True)
class Sparsity:
    """How sparse the gradients of one loss are.

    Attributes:
        loss: what has a loss, "every token" or "learnt tokens": an assistant's turns, completions.
        rows: of each layer, all examples together, padding included.
        loss_rows: those whose next token has a loss.
        computed_share: the part of a dense backward pass's work in linear layers that SEBP does.
        layers: in the model's order.
        knee: of the norms in all layers together, each layer's relative to their median.
        histogram: of these norms: where each bin begins, as a power of 10, and how many rows are in it.
        examples: heat maps of the longest and of the shortest example, a block's projections together.
        projections: a heat map of each projection, all examples together.
    """

    loss: str
    rows: int
    loss_rows: int
    computed_share: float
    layers: tuple[LayerRows, ...]
    knee: float
    histogram: tuple[tuple[float, int], ...]
    examples: tuple[HeatMap, ...]
    projections: tuple[HeatMap, ...]

    @property
    def zero_share(self) -> float:
        """The share of rows that are exactly zero, over all layers."""
        return sum(layer.zero for layer in self.layers) / (self.rows * len(self.layers))

    @property
    def holding_share(self) -> float:
        """The share of the rows that are not zero which holds 99 % of the squared norm; the mean over layers."""
        return fmean(layer.holding / max(1, layer.rows - layer.zero) for layer in self.layers)

    @property
    def energy_below_knee(self) -> float:
        """The share of the squared norm in rows below their layer's knee; the mean over layers."""
        return fmean(layer.energy_below_knee for layer in self.layers)

    @property
    def summary(self) -> tuple[str, str]:
        """In two sentences, what is sparse and what is not."""
        return (
            f"{self.zero_share:.1%} of the rows are exactly zero. By the sizes of the layers, SEBP does "
            f"{self.computed_share:.1%} of the work that a dense backward pass has in them, "
            f"{1 / self.computed_share:.1f} times less, and loses nothing.",
            f"Of the rows that are not zero, {self.holding_share:.1%} hold {HELD:.0%} of the squared norm, and those "
            f"below the knee hold {self.energy_below_knee:.1%} of it (means over layers): what is lost if they are "
            "dropped.",
        )

    def grouped(self) -> dict[str, list[GroupShares]]:
        """By groups of layers (the lower half, the upper half, the last one, the head) and projection."""
        last = max(layer.block for layer in self.layers if layer.block is not None)
        groups: dict[tuple[int, str], dict[str, list[LayerRows]]] = {}
        for layer in self.layers:
            groups.setdefault(_group(layer.block, last), {}).setdefault(layer.projection, []).append(layer)
        return {
            name: [GroupShares.of(projection, layers) for projection, layers in projections.items()]
            for (_, name), projections in sorted(groups.items(), key=lambda group: group[0])
        }


def _group(block: int | None, last: int) -> tuple[int, str]:
    """The group that a block belongs to: its place among the groups, and its name."""
    if block is None:
        return 3, "head"
    if block == last:
        return 2, f"{last} (last)"
    half = (last + 1) // 2
    first, end = (0, half - 1) if block < half else (half, last - 1)
    return int(block >= half), f"{first}" if first == end else f"{first} to {end}"


@dataclass(frozen=True)
class Analysis:
    """How sparse the gradients of a base model are on its owner's texts, before any training.

    Attributes:
        model: its public name.
        dtype, device: what it ran in, and on.
        context_length: what each example was padded to.
        seed: which drew the examples that were looked at.
        texts: all examples that the texts give.
        looked_at: those whose gradients were looked at.
        losses: with a loss on every token, and, if that is not the same, on the learnt tokens only.
    """

    model: str
    dtype: str
    device: str
    context_length: int
    seed: int
    texts: Lengths
    looked_at: Lengths
    losses: tuple[Sparsity, ...]

    def to_dict(self) -> dict:
        """The analysis as JSON-ready values, without its heat maps."""
        values = asdict(self)
        for loss, sparsity in zip(values["losses"], self.losses, strict=True):
            del loss["examples"], loss["projections"]
            loss |= {name: getattr(sparsity, name) for name in ("zero_share", "holding_share", "energy_below_knee")}
        return {"event": "analysis", **values}

    def to_html(self) -> str:
        """One page that holds all of it, drawn, and loads nothing."""
        return draw(self)


def analyze(base: BaseModel, dataset: Dataset, examples: int, seed: int, on_event: Sink) -> Analysis:
    """Looks at the gradients of some examples.

    Args:
        base: as it is; its weights and what of them requires a gradient are left so.
        dataset: what the texts give.
        examples: how many to look at, at most.
        seed: which ones.

    Raises:
        TextsError: there are none.
        ModelError: the model's gradients cannot be looked at by row.
    """
    if not isinstance(examples, int) or examples < 1:
        raise TextsError(f"examples={examples!r}; expected how many examples to look at, 1 or more.")
    if not dataset.examples:
        raise TextsError(
            "Nothing in these texts can be learnt, so there are no gradients to look at; give other texts."
        )
    chosen = random.Random(seed).sample(dataset.examples, min(examples, len(dataset.examples)))
    losses = {EVERY_TOKEN: [Example(one.input_ids, one.input_ids, one.document) for one in chosen]}
    # The first token has nothing before it that could predict it.
    if any(one.labels[1:] != one.input_ids[1:] for one in chosen):
        losses[LEARNT_TOKENS] = chosen
    collator = Collator(dataset.context_length, base.pad_token_id)
    done, total = iter(range(1, len(losses) * len(chosen) + 1)), len(losses) * len(chosen)
    found = []
    for loss, learnt in losses.items():
        batches = [collator([one]) for one in learnt]
        gradients = row_gradients(base.model, batches, lambda: on_event(ExampleAnalyzed(next(done), total)))
        found.append(_sparsity(loss, batches, gradients))
    return Analysis(
        model=base.reference.public_name,
        dtype=str(base.dtype).removeprefix("torch."),
        device=base.device.type,
        context_length=dataset.context_length,
        seed=seed,
        texts=Lengths.of(dataset.examples, dataset.context_length),
        looked_at=Lengths.of(chosen, dataset.context_length),
        losses=tuple(found),
    )


def _sparsity(loss: str, batches: list[Batch], gradients: list[RowGradients]) -> Sparsity:
    num_active = sum(len(batch.plan.active_rows) for batch in batches)
    num_loss = sum(len(batch.plan.loss_rows) for batch in batches)
    layers = tuple(_layer_rows(one, num_loss if one.place.behind_attention else num_active) for one in gradients)
    weights = [one.place.weights for one in gradients]
    computed = sum(layer.computed * size for layer, size in zip(layers, weights, strict=True))
    histogram = row_rules.NormHistogram(torch.device("cpu"))
    for one in gradients:
        histogram.add(one.energy_ET.flatten())
    return Sparsity(
        loss=loss,
        rows=layers[0].rows,
        loss_rows=num_loss,
        computed_share=computed / (layers[0].rows * sum(weights)),
        layers=layers,
        knee=float(histogram.epsilon(1)),
        histogram=tuple(_bins(histogram)),
        examples=tuple(of_examples(gradients, [int(batch.attention_mask.sum()) for batch in batches])),
        projections=tuple(of_projections(gradients)),
    )


def _layer_rows(one: RowGradients, computed: int) -> LayerRows:
    energy_N = one.energy_ET.flatten()
    histogram = row_rules.NormHistogram(energy_N.device)
    histogram.add(energy_N)
    # The knee itself, however much is below it.
    knee = histogram.epsilon(1)
    keep_N, _ = row_rules.above(energy_N, knee, 1)
    return LayerRows(
        block=one.place.block,
        projection=one.place.projection,
        rows=len(energy_N),
        zero=int(one.is_zero_ET.sum()),
        computed=computed,
        below_knee=int((~keep_N).sum()),
        holding=int(row_rules.holding(energy_N, HELD)),
        knee=float(knee),
        energy_below_knee=float(row_rules.lost_share(energy_N, keep_N)),
    )


def _bins(histogram: row_rules.NormHistogram) -> Iterable[tuple[float, int]]:
    """The bins from the first to the last one that has rows."""
    counts = histogram.counts_J.tolist()
    filled = [place for place, count in enumerate(counts) if count]
    for place in range(filled[0], filled[-1] + 1):
        yield round(histogram.LOWEST + place / histogram.BINS_PER_DECADE, 1), counts[place]
