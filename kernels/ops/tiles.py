"""Tiles: how a product is split into programs of a GPU, and whether these fit on it.

`measure` times the candidates; the others are safe defaults.
"""

from typing import NamedTuple


class Tiles(NamedTuple):
    """The tiles of a product kernel: [rows, columns] of the output, and `depth`, the step of the contraction.

    The contraction's `splits` run in parallel; summing them takes one more launch.
    """

    rows: int
    columns: int
    depth: int
    splits: int
    num_warps: int
    num_stages: int

    def fits(self, itemsize: int, shared_memory: int) -> bool:
        """Whether the operands' tiles in flight, and the output's, fit into a program's bytes of shared memory."""
        operands = self.num_stages * self.depth * (self.rows + self.columns) * itemsize
        return max(operands, self.rows * self.columns * itemsize) <= shared_memory


def with_splits(tiles: Tiles, *splits: int) -> list[Tiles]:
    return [tiles._replace(splits=number) for number in splits]


# Rows are active rows, columns inputs, depth outputs.
DX_CANDIDATES = [
    *with_splits(Tiles(16, 64, 128, 1, 4, 4), 4, 16),
    *with_splits(Tiles(64, 64, 64, 1, 4, 4), 1, 4, 8),
    *with_splits(Tiles(64, 128, 64, 1, 4, 4), 1, 2, 4),
    *with_splits(Tiles(128, 64, 64, 1, 4, 4), 1),
    *with_splits(Tiles(128, 128, 64, 1, 8, 3), 1, 2, 4),
    *with_splits(Tiles(128, 128, 64, 1, 4, 4), 1),
    *with_splits(Tiles(64, 256, 64, 1, 8, 3), 1),
    *with_splits(Tiles(128, 256, 64, 1, 8, 3), 1),
    *with_splits(Tiles(128, 256, 64, 1, 8, 4), 1),
]

# Rows are outputs, columns inputs, depth active rows.
DWEIGHT_CANDIDATES = [
    *with_splits(Tiles(64, 64, 64, 1, 4, 4), 1, 2, 4),
    *with_splits(Tiles(64, 128, 64, 1, 4, 3), 1, 2),
    *with_splits(Tiles(128, 64, 64, 1, 4, 3), 1, 2),
    *with_splits(Tiles(128, 128, 32, 1, 8, 4), 1),
    *with_splits(Tiles(128, 128, 64, 1, 8, 3), 1, 2, 4),
    *with_splits(Tiles(128, 128, 64, 1, 4, 3), 1),
    *with_splits(Tiles(128, 256, 64, 1, 8, 3), 1, 2),
    *with_splits(Tiles(256, 128, 64, 1, 8, 3), 1),
]

# From the fastest to the smallest, which fits everywhere.
SAFE_TILES = [Tiles(64, 128, 64, 1, 4, 3), Tiles(64, 64, 32, 1, 4, 3), Tiles(32, 32, 32, 1, 4, 2)]


def safe_tiles(itemsize: int, shared_memory: int) -> Tiles:
    """Tiles for a GPU without measurements."""
    for tiles in SAFE_TILES:
        if tiles.fits(itemsize, shared_memory):
            return tiles
    raise ValueError(f"No tile fits into {shared_memory} bytes of shared memory.")
