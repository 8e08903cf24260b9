"""Products of whole matrices, by the fastest of cuBLASLt's algorithms.

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

from sebp_edge.ops import choices
from sebp_edge.ops.gpu import cublaslt
from sebp_edge.ops.gpu.cublaslt import Plan, Product

logger = logging.getLogger(__name__)

# Times of one product differ by so much from one time to the next.
MARGIN = 0.03
ROUNDS, CALLS = 5, 2
# Longer than the launches of a round take the host, so that no product waits for its launch.
SLEEP_CYCLES = 1_000_000
# Added to an output so often as it is timed, a product must not change it.
NOTHING = 2.0**-120


def multiply_(out_NM: Tensor, a_NK: Tensor, b_KM: Tensor) -> None:
    """out = A B."""
    _run(out_NM, a_NK, b_KM, accumulates=False)


def add_product_(out_NM: Tensor, a_NK: Tensor, b_KM: Tensor) -> None:
    """out += A B."""
    _run(out_NM, a_NK, b_KM, accumulates=True)


@contextmanager
def tuning(folder: str | Path) -> Iterator[None]:
    """Within it, products that were never timed on this machine are, all threads' alike.

    Args:
        folder: where it is kept which algorithms are the fastest here. If nothing can be written there, the next
            process finds them anew.
    """
    global _folder
    before, _folder = _folder, Path(folder)
    number = len(_chosen)
    try:
        yield
    finally:
        _folder = before
        if len(_chosen) > number:
            _keep(Path(folder))


# Of a product on a GPU the place of its algorithm among those that are named; None for torch's way.
_chosen: dict[tuple[int, Product], int | None] = {}
_folder: Path | None = None


def _run(out: Tensor, a: Tensor, b: Tensor, *, accumulates: bool) -> None:
    looks = _folder is not None or bool(_chosen)
    product = Product.of(out, a, b, accumulates=accumulates) if looks else None
    if product is None:
        _by_torch(out, a, b, accumulates)
        return
    index = choices.index_of(out.device)
    if _folder is not None:
        _read_once(_folder, index)
        if (index, product) not in _chosen and not torch.cuda.is_current_stream_capturing():
            _chosen[index, product] = _fastest(product, index, out, a, b)
    choice = _chosen.get((index, product))
    if choice is None:
        _by_torch(out, a, b, accumulates)
    else:
        plan = _plan(product, index)
        plan.run(plan.algorithms[choice], out, a, b)


def _by_torch(out: Tensor, a: Tensor, b: Tensor, accumulates: bool, scale: float = 1.0) -> None:
    torch.addmm(out, a, b, beta=float(accumulates), alpha=scale, out=out)


@functools.cache
def _plan(product: Product, index: int) -> Plan:
    return Plan(product, index)


# -------------------------------------------------------------------------------------------------------------- timing


def _fastest(product: Product, index: int, out: Tensor, a: Tensor, b: Tensor) -> int | None:
    """The place of the fastest algorithm; out stays what it is, or is A B."""
    plan, scale = _plan(product, index), NOTHING if product.accumulates else 1.0
    ways: dict[int | None, Callable[[], None]] = {
        choice: functools.partial(plan.run, algorithm, out, a, b, scale)
        for choice, algorithm in enumerate(plan.algorithms)
    }
    if not ways:
        return None
    ways[None] = functools.partial(_by_torch, out, a, b, product.accumulates, scale)
    with torch.cuda.device(index):
        return best(_times(ways))


def best(times: Mapping[int | None, float]) -> int | None:
    """The fastest way; torch's, None, unless another one is clearly faster."""
    choice = min(times, key=times.get)
    return choice if times[choice] < (1 - MARGIN) * times[None] else None


def _times(ways: dict[int | None, Callable[[], None]]) -> dict[int | None, float]:
    """Median milliseconds of each way, in turns, so that the GPU's clock is the same for all."""
    for way in ways.values():
        way()
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
        if choice is None or choice < len(_plan(product, index).algorithms):
            _chosen.setdefault((index, product), choice)


def _keep(folder: Path) -> None:
    for index in {index for index, _ in _chosen}:
        path = _file(folder, index)
        found = {product: choice for (own, product), choice in _chosen.items() if own == index}
        try:
            write(path, found)
        except OSError as error:
            logger.warning(f"Which products are the fastest cannot be kept in {folder} ({error.strerror}).")


def _file(folder: Path, index: int) -> Path:
    return choices.file_for(folder, choices.machine(index) | {"cublasLt": cublaslt.version()}, "products")


def read(path: Path) -> dict[Product, int | None]:
    """The places in a file; none if there is no file, and none, with a warning, if it cannot be read."""
    try:
        return dict(map(_entry, json.loads(path.read_text(encoding="utf-8"))))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError, IndexError) as error:
        logger.warning(f"{path} does not say which products are the fastest ({error!r}); it is made anew.")
        return {}


def _entry(record: list) -> tuple[Product, int | None]:
    *sizes, strides, transposed, accumulates, choice = record
    if not (choice is None or (isinstance(choice, int) and choice >= 0)):
        raise ValueError(f"{choice!r} is no place")
    return Product(*sizes, tuple(strides), transposed, accumulates), choice


def write(path: Path, found: Mapping[Product, int | None]) -> None:
    """Adds these to a file, whole or not at all."""
    before = read(path)
    if (together := before | dict(found)) == before:
        return
    records = sorted(json.dumps([*product, choice]) for product, choice in together.items())
    choices.write_whole(path, "[" + ",\n".join(records) + "]\n")
