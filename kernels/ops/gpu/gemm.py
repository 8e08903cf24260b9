"""Products of whole matrices, by the fastest of cuBLASLt's algorithms.

torch takes the algorithm that cuBLAS's heuristics rank first. On an H100 that is mostly the fastest, but not for a few
hundred rows: for dX of a 3B Llama's gate and up projection at 832 rows (832 x 16384 x 3072) the first took 225 µs and
another one 127. So within `tuning`, around the warm-up of work that will run often, each new product is timed once, by
torch and by every algorithm, and the choice is saved for this machine. Nothing is timed outside of it, and torch
computes products that were never timed.
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

from sebp_edge.basics.files import write_atomically

from .. import choices
from . import cublaslt
from .cublaslt import Matmul, Product

logger = logging.getLogger(__name__)

# Repeated timings of one product differ by this share.
MARGIN = 0.03
ROUNDS, CALLS = 5, 2
# Longer than the host takes to launch a round, so that no product waits for its launch.
SLEEP_CYCLES = 1_000_000
# The scale of an accumulating product while it is timed: it changes only elements next to zero.
NEGLIGIBLE_SCALE = 2.0**-120


def multiply(a_NK: Tensor, b_KM: Tensor) -> Tensor:
    out_NM = a_NK.new_empty(a_NK.shape[0], b_KM.shape[1])
    multiply_(out_NM, a_NK, b_KM)
    return out_NM


def multiply_(out_NM: Tensor, a_NK: Tensor, b_KM: Tensor) -> None:
    _run(out_NM, a_NK, b_KM, accumulates=False)


def add_product_(out_NM: Tensor, a_NK: Tensor, b_KM: Tensor) -> None:
    _run(out_NM, a_NK, b_KM, accumulates=True)


@contextmanager
def tuning(folder: str | Path) -> Iterator[None]:
    """Times products that were never timed on this machine, in all threads, while this context is open.

    The folder keeps the fastest algorithms. If it cannot be written to, the next process times products again.
    """
    folder, number = Path(folder), len(_chosen)
    _folders.append(folder)
    try:
        yield
    finally:
        _folders.remove(folder)
        if len(_chosen) > number:
            _save(folder)


# Index of the algorithm chosen for a product on a GPU; None for torch's own.
_chosen: dict[tuple[int, Product], int | None] = {}
# The folders of all open `tuning` contexts.
_folders: list[Path] = []


def _run(out: Tensor, a: Tensor, b: Tensor, *, accumulates: bool) -> None:
    folder = next(iter(_folders), None)
    product = None
    # Timing may choose another algorithm in the next run.
    if (folder or _chosen) and not torch.are_deterministic_algorithms_enabled() and cublaslt.version():
        product = Product.of(out, a, b, accumulates=accumulates)
    if product is None:
        _multiply_by_torch(out, a, b, accumulates)
        return
    index = choices.device_index(out.device)
    with torch.cuda.device(index):
        choice = _choice(product, index, folder, out, a, b)
        if choice is not None:
            matmul = _matmul(product, index)
            try:
                matmul.run(matmul.algorithms[choice], out, a, b)
                return
            except RuntimeError as error:
                logger.warning(f"{error} From now on torch computes this product.")
                _chosen[index, product] = None
        _multiply_by_torch(out, a, b, accumulates)


def _choice(product: Product, index: int, folder: Path | None, out: Tensor, a: Tensor, b: Tensor) -> int | None:
    """The index of the algorithm to take; None for torch's own."""
    key = index, product
    if folder is not None:
        _read_once(folder, index)
    choice = _chosen.get(key)
    # A file may name an algorithm that is not offered here.
    is_known = key in _chosen and (choice is None or choice < len(_matmul(product, index).algorithms))
    if is_known or folder is None or torch.cuda.is_current_stream_capturing():
        return choice if is_known else None
    _chosen[key] = _time_and_pick(product, index, out, a, b)
    return _chosen[key]


def _multiply_by_torch(out: Tensor, a: Tensor, b: Tensor, accumulates: bool, scale: float = 1.0) -> None:
    if accumulates:
        out.addmm_(a, b, alpha=scale)
    else:
        torch.mm(a, b, out=out)


@functools.cache
def _matmul(product: Product, index: int) -> Matmul:
    return Matmul(product, index)


# -------------------------------------------------------------------------------------------------------------- timing


def _time_and_pick(product: Product, index: int, out: Tensor, a: Tensor, b: Tensor) -> int | None:
    """The index of the fastest algorithm, None for torch's own. Writes A B to `out`, unless the product accumulates."""
    matmul, scale = _matmul(product, index), NEGLIGIBLE_SCALE if product.accumulates else 1.0
    candidates: dict[int | None, Callable[[], None]] = {
        choice: functools.partial(matmul.run, algorithm, out, a, b, scale)
        for choice, algorithm in enumerate(matmul.algorithms)
    }
    for choice, multiply_once in list(candidates.items()):
        # The first call loads the algorithm's code.
        try:
            multiply_once()
        except RuntimeError as error:
            logger.info(f"{error} This algorithm is left out.")
            del candidates[choice]
    if not candidates:
        return None
    candidates[None] = functools.partial(_multiply_by_torch, out, a, b, product.accumulates, scale)
    candidates[None]()
    return pick_fastest(_time_candidates(candidates))


def pick_fastest(times: Mapping[int | None, float]) -> int | None:
    """The fastest algorithm; torch's own, None, unless another one is clearly faster."""
    choice = min(times, key=times.get)
    return choice if times[choice] < (1 - MARGIN) * times[None] else None


def _time_candidates(candidates: dict[int | None, Callable[[], None]]) -> dict[int | None, float]:
    """Median milliseconds of each algorithm, timed in turns so that the GPU's clock is the same for all."""
    rounds = []
    for _ in range(ROUNDS):
        events = {choice: [torch.cuda.Event(enable_timing=True) for _ in range(2)] for choice in candidates}
        torch.cuda._sleep(SLEEP_CYCLES)
        for choice, multiply_once in candidates.items():
            events[choice][0].record()
            for _ in range(CALLS):
                multiply_once()
            events[choice][1].record()
        torch.cuda.current_stream().synchronize()
        rounds.append({choice: begin.elapsed_time(end) / CALLS for choice, (begin, end) in events.items()})
    return {choice: statistics.median(times[choice] for times in rounds) for choice in candidates}


# --------------------------------------------------------------------------------------------------------------- files


@functools.cache
def _read_once(folder: Path, index: int) -> None:
    for product, choice in read(_file(folder, index)).items():
        _chosen.setdefault((index, product), choice)


def _save(folder: Path) -> None:
    chosen = dict(_chosen)
    for index in {index for index, _ in chosen}:
        try:
            write(_file(folder, index), {product: choice for (gpu, product), choice in chosen.items() if gpu == index})
        except OSError as error:
            _warn_once(f"The fastest algorithms cannot be saved in {folder}: {error.strerror}.")


@functools.cache
def _warn_once(message: str) -> None:
    logger.warning(message)


def _file(folder: Path, index: int) -> Path:
    return choices.choices_file(folder, choices.machine(index) | {"cublasLt": cublaslt.version()}, "products")


def read(path: Path) -> dict[Product, int | None]:
    """The choices in a file; none if there is no file, and none, with a warning, if it cannot be read."""
    try:
        return dict(map(_entry, json.loads(path.read_text(encoding="utf-8"))))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, TypeError, RecursionError) as error:
        _warn_once(f"{path} is not a valid file of algorithms and is ignored ({error!r}).")
        return {}


def _entry(record: list) -> tuple[Product, int | None]:
    dtype, *sizes, strides, transposed, accumulates, choice = record
    numbers = [*sizes, *strides, 0 if choice is None else choice]
    has_numbers = len(sizes) == len(strides) == 3 and all(type(one) is int and one >= 0 for one in numbers)
    if not (has_numbers and dtype in cublaslt.TYPES and type(transposed) is type(accumulates) is bool):
        raise ValueError(f"{record} does not describe a product")
    return Product(dtype, *sizes, tuple(strides), transposed, accumulates), choice


def write(path: Path, found: Mapping[Product, int | None]) -> None:
    """Adds these choices to a file, atomically."""
    before = read(path)
    if (together := before | dict(found)) == before:
        return
    records = sorted(json.dumps([*product, choice]) for product, choice in together.items())
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_atomically(path, "[" + ",\n".join(records) + "]\n")
