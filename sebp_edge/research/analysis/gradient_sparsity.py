"""How sparse the gradients of one loss are: counts of the rows and elements of dL/dY, by layer and projection.

Counts the rows that are exactly zero, those below the knee of the distribution of norms, and the fewest that hold 99 %
of the squared norm; and the elements below the paper's own threshold. Has counts, norms and positions, but no text.

Shapes: E examples, T positions, K blocks.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor

from sebp_edge.basics.units import percent
from sebp_edge.research.analysis.gradients import RowGradients
from sebp_edge.research.analysis.objectives import Objective
from sebp_edge.research.rules import row_rules
from sebp_edge.research.rules.histogram import LogHistogram


@dataclass(frozen=True)
class Elements:
    """The elements of dL/dY in all layers of the blocks, and the SEBP paper's threshold, which counts them as zero.

    One threshold, epsilon, for all layers: the knee of the cumulative distribution of log10 |g| over the non-zero
    elements in the blocks, in the gradient of each example's mean loss, as the paper's 3.98e-5 was found. The head does
    not count: its gradients are probabilities of words, most of them tiny.

    Attributes:
        epsilon: the threshold, in units of the gradient of an example's mean loss.
        histogram: of the absolute values: lower edge, as a power of 10, and number of elements of each bin.
        zero: share of elements that are exactly zero.
        below: share of elements that are zero or below epsilon.
        energy_below: share of the squared norm in these elements.
    """

    epsilon: float
    histogram: tuple[tuple[float, int], ...]
    zero: float
    below: float
    energy_below: float


def threshold_elements(gradients: list[RowGradients]) -> Elements:
    """Finds the threshold of the elements of all layers in the blocks."""
    in_blocks = [one for one in gradients if one.info.block is not None]
    merged, total = LogHistogram(torch.device("cpu")), sum(one.num_elements for one in in_blocks)
    for one in in_blocks:
        merged.merge(one.elements)
    # A max_lost of 1 gives the knee itself, however much energy is below it.
    epsilon = float(merged.epsilon(1))
    below, energy_below = share_below(merged, total, epsilon)
    zero = 1 - int(merged.counts_J.sum()) / total
    return Elements(epsilon, tuple(merged.bins()), zero, below, energy_below)


def share_below(histogram: LogHistogram, num_elements: int, epsilon: float) -> tuple[float, float]:
    """Returns the share of elements that are zero or below epsilon, and their share of the squared norm."""
    below, energy_below = histogram.below(epsilon)
    zeros = num_elements - int(histogram.counts_J.sum())
    return (zeros + below) / num_elements, energy_below


COLUMNS = 64


@dataclass(frozen=True)
class HeatMap:
    """Root mean square of row norms, by block and by bin of positions, for drawing.

    Attributes:
        title: the name of the projection, or a description of the example.
        blocks: indices of the blocks.
        positions: positions per bin; the last bin may have fewer.
        norms: by block, then by bin; 0 means exactly zero.
    """

    title: str
    blocks: tuple[int, ...]
    positions: int
    norms: tuple[tuple[float, ...], ...]


def map_projections(gradients: list[RowGradients]) -> Iterator[HeatMap]:
    """One heat map per projection, over all examples."""
    in_blocks = [one for one in gradients if one.info.block is not None]
    for projection in dict.fromkeys(one.info.projection for one in in_blocks):
        layers = {one.info.block: one.energy_ET for one in in_blocks if one.info.projection == projection}
        yield _heat_map(projection, list(layers), torch.stack(list(layers.values()), dim=1).mean(0))


def map_examples(gradients: list[RowGradients], lengths: list[int]) -> Iterator[HeatMap]:
    """Heat maps of the longest and of the shortest example, with the norm over all projections of each block."""
    blocks = sorted({one.info.block for one in gradients if one.info.block is not None})
    for word, length in (("longest", max(lengths)), ("shortest", min(lengths))):
        example = lengths.index(length)
        energy_KT = torch.stack(
            [sum(one.energy_ET[example] for one in gradients if one.info.block == block) for block in blocks]
        )
        yield _heat_map(f"the {word} example, {length} tokens", blocks, energy_KT)


def _heat_map(title: str, blocks: list[int], energy_KT: Tensor) -> HeatMap:
    positions = -(-energy_KT.shape[1] // COLUMNS)
    norms_K = torch.stack([part.mean(1).sqrt() for part in energy_KT.split(positions, dim=1)], dim=1).tolist()
    return HeatMap(title, tuple(blocks), positions, tuple(map(tuple, norms_K)))


ENERGY_SHARE = 0.99


@dataclass(frozen=True)
class LayerRows:
    """Counts of the rows of dL/dY of one linear layer, over all examples, padding included.

    Attributes:
        block: index of its block, from 0; None for the head.
        projection: its name within the block.
        rows: all rows.
        zero: rows whose elements are all exactly zero.
        computed: rows that SEBP computes in the backward pass; they follow from the labels.
        below_knee: rows with a norm below the knee, zero rows included.
        top_rows: the fewest rows that hold 99 % of the squared norm.
        knee: the knee of the distribution of norms, relative to the median norm of the non-zero rows.
        energy_below_knee: share of the squared norm in the rows below the knee.
        below_epsilon: share of its elements that are zero or below the paper's threshold (see `Elements`).
        energy_below_epsilon: share of the squared norm in these elements.
    """

    block: int | None
    projection: str
    rows: int
    zero: int
    computed: int
    below_knee: int
    top_rows: int
    knee: float
    energy_below_knee: float
    below_epsilon: float
    energy_below_epsilon: float


@dataclass(frozen=True)
class GroupShares:
    """Means over several layers of one projection: shares of rows, of squared norm below the knee, and of elements."""

    projection: str
    zero: float
    below_knee: float
    energy_below_knee: float
    top_rows: float
    below_epsilon: float
    energy_below_epsilon: float

    @classmethod
    def of(cls, projection: str, layers: list[LayerRows]) -> "GroupShares":
        """Averages over `layers`."""
        return cls(
            projection,
            zero=fmean(layer.zero / layer.rows for layer in layers),
            below_knee=fmean(layer.below_knee / layer.rows for layer in layers),
            energy_below_knee=fmean(layer.energy_below_knee for layer in layers),
            top_rows=fmean(layer.top_rows / layer.rows for layer in layers),
            below_epsilon=fmean(layer.below_epsilon for layer in layers),
            energy_below_epsilon=fmean(layer.energy_below_epsilon for layer in layers),
        )


@dataclass(frozen=True)
class GradientSparsity:
    """How sparse the gradients of one loss are.

    Attributes:
        loss: what has a loss: "every token" or "trained tokens" (an assistant's turns, completions) of a decoder;
            "random classes" of an encoder.
        rows: rows of each layer over all examples, padding included.
        loss_rows: rows whose next token has a loss; the first rows of an encoder's sequences.
        computed_share: share of a dense backward pass's work in linear layers that SEBP does.
        layers: in the model's order.
        knee: knee of the norms in all layers, each layer's norms relative to their median.
        histogram: of the same norms: lower edge, as a power of 10, and number of rows of each bin.
        elements: the paper's threshold on elements.
        examples: heat maps of the longest and of the shortest example, over all projections of a block.
        projections: one heat map per projection, over all examples.
    """

    loss: str
    rows: int
    loss_rows: int
    computed_share: float
    layers: tuple[LayerRows, ...]
    knee: float
    histogram: tuple[tuple[float, int], ...]
    elements: Elements
    examples: tuple[HeatMap, ...]
    projections: tuple[HeatMap, ...]

    @property
    def zero_share(self) -> float:
        """Share of the rows of all layers that are exactly zero."""
        return sum(layer.zero for layer in self.layers) / (self.rows * len(self.layers))

    @property
    def top_rows_share(self) -> float:
        """Share of the non-zero rows that hold 99 % of the squared norm; mean over layers."""
        return fmean(layer.top_rows / max(1, layer.rows - layer.zero) for layer in self.layers)

    @property
    def energy_below_knee(self) -> float:
        """Share of the squared norm in rows below their layer's knee; mean over layers."""
        return fmean(layer.energy_below_knee for layer in self.layers)

    @property
    def summary(self) -> tuple[str, str, str]:
        """Three paragraphs: what exact sparsity saves, and what dropping small rows or small elements would lose."""
        return (
            f"{percent(self.zero_share)} of the rows are exactly zero. SEBP does "
            f"{percent(self.computed_share)} of the work of a dense backward pass in the linear layers, "
            f"{1 / self.computed_share:.1f} times less, and loses nothing.",
            f"{percent(self.top_rows_share)} of the non-zero rows hold {percent(ENERGY_SHARE, 0)} of the squared norm. "
            f"Dropping the rows below the knee would lose {percent(self.energy_below_knee)} of it (means over layers).",
            f"The paper's own procedure, on elements, gives epsilon = {self.elements.epsilon:.2e}: it makes the share "
            f"of zeros {percent(self.elements.below)} instead of {percent(self.elements.zero)}, and the elements "
            f"below it hold {percent(self.elements.energy_below)} of the squared norm.",
        )

    def grouped(self) -> dict[str, list[GroupShares]]:
        """Shares by group of layers (lower half, upper half, last block, head) and projection."""
        last = max(layer.block for layer in self.layers if layer.block is not None)
        groups: dict[tuple[int, str], dict[str, list[LayerRows]]] = {}
        for layer in self.layers:
            groups.setdefault(_group(layer.block, last), {}).setdefault(layer.projection, []).append(layer)
        return {
            name: [GroupShares.of(projection, layers) for projection, layers in projections.items()]
            for (_, name), projections in sorted(groups.items(), key=lambda group: group[0])
        }


def _group(block: int | None, last: int) -> tuple[int, str]:
    """The group of a block: its position among the groups, and its name."""
    if block is None:
        return 3, "head"
    if block == last:
        return 2, f"{last} (last)"
    half = (last + 1) // 2
    first, end = (0, half - 1) if block < half else (half, last - 1)
    return int(block >= half), f"{first}" if first == end else f"{first} to {end}"


def sparsity_of(objective: Objective, gradients: list[RowGradients]) -> GradientSparsity:
    """Counts what is sparse in the gradients of a loss."""
    batches = objective.batches
    num_active = sum(len(batch.plan.active_rows) for batch in batches)
    num_loss = sum(len(batch.plan.loss_rows) for batch in batches)
    elements = threshold_elements(gradients)
    layers = tuple(
        _layer_rows(one, num_loss if one.info.after_attention else num_active, elements.epsilon) for one in gradients
    )
    num_weights = [one.info.num_weights for one in gradients]
    computed = sum(layer.computed * size for layer, size in zip(layers, num_weights, strict=True))
    histogram = row_rules.NormHistogram(torch.device("cpu"))
    for one in gradients:
        histogram.add(one.energy_ET.flatten())
    return GradientSparsity(
        loss=objective.name,
        rows=layers[0].rows,
        loss_rows=num_loss,
        computed_share=computed / (layers[0].rows * sum(num_weights)),
        layers=layers,
        knee=float(histogram.epsilon(1)),
        histogram=tuple(histogram.bins()),
        elements=elements,
        examples=tuple(map_examples(gradients, [int(batch.attention_mask.sum()) for batch in batches])),
        projections=tuple(map_projections(gradients)),
    )


def _layer_rows(one: RowGradients, computed: int, epsilon: float) -> LayerRows:
    energy_N = one.energy_ET.flatten()
    histogram = row_rules.NormHistogram(energy_N.device)
    histogram.add(energy_N)
    # A max_lost of 1 gives the knee itself, however much energy is below it.
    knee = histogram.epsilon(1)
    keep_N = row_rules.above_threshold(energy_N, knee, 1)
    below_epsilon, energy_below_epsilon = share_below(one.elements, one.num_elements, epsilon)
    return LayerRows(
        block=one.info.block,
        projection=one.info.projection,
        rows=len(energy_N),
        zero=int(one.is_zero_ET.sum()),
        computed=computed,
        below_knee=int((~keep_N).sum()),
        top_rows=int(row_rules.num_top_rows(energy_N, ENERGY_SHARE)),
        knee=float(knee),
        energy_below_knee=float(row_rules.lost_share(energy_N, keep_N)),
        below_epsilon=below_epsilon,
        energy_below_epsilon=energy_below_epsilon,
    )
