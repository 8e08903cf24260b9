"""Row norms by block and position, binned for drawing.

Shapes: E examples, T positions, K blocks.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from sebp_edge.research.analysis.gradients import RowGradients

COLUMNS = 64


@dataclass(frozen=True)
class HeatMap:
    """Root mean square of row norms, by block and by bin of positions.

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
