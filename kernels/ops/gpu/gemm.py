"""Products of whole matrices, by the fastest of the algorithms that cuBLASLt names for them.

torch takes the one that cuBLAS's heuristics name first. On an H100 that is mostly the fastest, but not for some hundred
rows: of those named for dX of a 3B Llama's gate and up projection at 832 rows (832 x 16384 x 3072), the first took
225 µs and another one 127. So while something is rehearsed that will run often, each product is timed once, by torch
and by all of them, and what was found is kept for this machine. Outside of that nothing is timed, and torch multiplies
what never was.
"""

import functools
import json
import logging
import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from sebp_edge.files import write_whole

from .. import choices
from . import cublaslt
from .cublaslt import Matmul, Product

logger = logging.getLogger(__name__)

# Times of one product differ by so much from one time to the next.
MARGIN = 0.03
ROUNDS, CALLS = 5, 2
# Longer than the launches of a round take the host, so that no product waits for its launch.
SLEEP_CYCLES = 1_000_000
# Times a product that is added to an output, it changes no element but those that are next to zero.
NOTHING = 2.0**-120


def multiply_(out_NM: Tensor, a_NK: Tensor, b_KM: Tensor) -> None:
    """out = A B."""
    _run(out_NM, a_NK, b_KM, accumulates=False)


def add_product_(out_NM: Tensor, a_NK: Tensor, b_KM: Tensor) -> None:
    """out += A B."""
    _run(out_NM, a_NK, b_KM, accumulates=True)


@contextmanager
def tuning(folder: str | Path) -> Iterator[None]:
    """Within it, products that were never timed on this machine are, those of all threads.

    Args:
        folder: where it is kept which algorithms are the fastest here. If nothing can be written there, the next
            process finds them anew.
    """
    folder, number = Path(folder), len(_chosen)
    _folders.append(folder)
    try:
        yield
    finally:
        _folders.remove(folder)
        if len(_chosen) > number:
            _keep(folder)


# Of a product on a GPU the place of its algorithm among those that are named; None for torch's way.
_chosen: dict[tuple[int, Product], int | None] = {}
# Of all threads that are tuning.
_folders: list[Path] = []


def _run(out: Tensor, a: Tensor, b: Tensor, *, accumulates: bool) -> None:
    folder = next(iter(_folders), None)
    product = None
    # Which algorithm is the fastest may be another one the next time.
    if (folder or _chosen) and not torch.are_deterministic_algorithms_enabled() and cublaslt.version():
        product = Product.of(out, a, b, accumulates=accumulates)
    if product is None:
        _by_torch(out, a, b, accumulates)
        return
    index = choices.index_of(out.device)
    with torch.cuda.device(index):
        choice = _choice(product, index, folder, out, a, b)
        if choice is not None:
            matmul = _matmul(product, index)
            try:
                matmul.run(matmul.algorithms[choice], out, a, b)
                return
            except RuntimeError as error:
                logger.warning(f"{error} From now on torch multiplies.")
                _chosen[index, product] = None
        _by_torch(out, a, b, accumulates)


def _choice(product: Product, index: int, folder: Path | None, out: Tensor, a: Tensor, b: Tensor) -> int | None:
    """The place of the algorithm to take; None for torch's way."""
    key = index, product
    if folder is not None:
        _read_once(folder, index)
    choice = _chosen.get(key)
    # A file may know of more algorithms than there are.
    is_known = key in _chosen and (choice is None or choice < len(_matmul(product, index).algorithms))
    if is_known or folder is None or torch.cuda.is_current_stream_capturing():
        return choice if is_known else None
    _chosen[key] = _fastest(product, index, out, a, b)
    return _chosen[key]


def _by_torch(out: Tensor, a: Tensor, b: Tensor, accumulates: bool, scale: float = 1.0) -> None:
    if accumulates:
        out.addmm_(a, b, alpha=scale)
    else:
        torch.mm(a, b, out=out)


@functools.cache
def _matmul(product: Product, index: int) -> Matmul:
    return Matmul(product, index)


# -------------------------------------------------------------------------------------------------------------- timing


def _fastest(product: Product, index: int, out: Tensor, a: Tensor, b: Tensor) -> int | None:
    """The place of the fastest algorithm, None for torch's way; out is not to be added to by it, or is A B."""
    matmul, scale = _matmul(product, index), NOTHING if product.accumulates else 1.0
    ways: dict[int | None, Callable[[], None]] = {
        choice: functools.partial(matmul.run, algorithm, out, a, b, scale)
        for choice, algorithm in enumerate(matmul.algorithms)
    }
    for choice, way in list(ways.items()):
        # Also what is loaded on first use is loaded now.
        try:
            way()
        except RuntimeError as error:
            logger.info(f"{error} This algorithm is left out.")
            del ways[choice]
    if not ways:
        return None
    ways[None] = functools.partial(_by_torch, out, a, b, product.accumulates, scale)
    ways[None]()
    return best(_times(ways))


def best(times: Mapping[int | None, float]) -> int | None:
    """The fastest way; torch's, None, unless another one is clearly faster."""
    choice = min(times, key=times.get)
    return choice if times[choice] < (1 - MARGIN) * times[None] else None


def _times(ways: dict[int | None, Callable[[], None]]) -> dict[int | None, float]:
    """Median milliseconds of each way, in turns, so that the GPU's clock is the same for all."""
    rounds = []
    for _ in range(ROUNDS):
        events = {choice: [torch.cuda.Event(enable_timing=True) for _ in range(2)] for choice in ways}
        torch.cuda._sleep(SLEEP_CYCLES)
        for choice, way in ways.items():
            events[choice][0].record()
            for _ in range(CALLS):
                way()
            events[choice][1].record()
        torch.cuda.current_stream().synchronize()
        rounds.append({choice: begin.elapsed_time(end) / CALLS for choice, (begin, end) in events.items()})
    return {choice: statistics.median(times[choice] for times in rounds) for choice in ways}


# --------------------------------------------------------------------------------------------------------------- files


@functools.cache
def _read_once(folder: Path, index: int) -> None:
    for product, choice in read(_file(folder, index)).items():
        _chosen.setdefault((index, product), choice)


def _keep(folder: Path) -> None:
    chosen = dict(_chosen)
    for index in {index for index, _ in chosen}:
        try:
            write(_file(folder, index), {product: choice for (own, product), choice in chosen.items() if own == index})
        except OSError as error:
            _warn_once(f"Which products are the fastest cannot be kept in {folder} ({error.strerror}).")


@functools.cache
def _warn_once(message: str) -> None:
    logger.warning(message)


def _file(folder: Path, index: int) -> Path:
    return choices.file_for(folder, choices.machine(index) | {"cublasLt": cublaslt.version()}, "products")


def read(path: Path) -> dict[Product, int | None]:
    """The places in a file; none if there is no file, and none, with a warning, if it cannot be read."""
    try:
        return dict(map(_entry, json.loads(path.read_text(encoding="utf-8"))))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, TypeError, RecursionError) as error:
        _warn_once(f"{path} does not say which products are the fastest ({error!r}).")
        return {}


def _entry(record: list) -> tuple[Product, int | None]:
    dtype, *sizes, strides, transposed, accumulates, choice = record
    numbers = [*sizes, *strides, 0 if choice is None else choice]
    has_numbers = len(sizes) == len(strides) == 3 and all(type(one) is int and one >= 0 for one in numbers)
    if not (has_numbers and dtype in cublaslt.TYPES and type(transposed) is type(accumulates) is bool):
        raise ValueError(f"{record} is no product")
    return Product(dtype, *sizes, tuple(strides), transposed, accumulates), choice


def write(path: Path, found: Mapping[Product, int | None]) -> None:
    """Adds these to a file, whole or not at all."""
    before = read(path)
    if (together := before | dict(found)) == before:
        return
    records = sorted(json.dumps([*product, choice]) for product, choice in together.items())
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, "[" + ",\n".join(records) + "]\n")
