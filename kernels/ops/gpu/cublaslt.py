"""Binds torch's copy of cuBLASLt: asks its heuristics for algorithms and multiplies by one of them.

cuBLASLt is column-major and our matrices are row-major, so it computes outᵀ = Bᵀ Aᵀ. Algorithms must need no workspace,
so they take no memory but for their code. Descriptors live as long as the process; there are a few per shape.

Names and numbers are those of NVIDIA's header, cublasLt.h.
"""

import ctypes
import functools
import logging
from ctypes import byref, c_float, c_int, c_int64, c_size_t, c_uint64, c_void_p
from typing import NamedTuple

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

TYPES = {"bfloat16": 14, "float16": 2}  # CUDA_R_16BF, CUDA_R_16F
_FP32, _COMPUTE_FP32 = 0, 68
_TRANSPOSE_FIRST = 3  # an attribute of a product
_MAX_WORKSPACE, _REDUCTIONS, _MIN_ALIGNMENTS = 1, 3, (5, 6, 7, 8)  # attributes of a preference
_REDUCED_IN_FP32 = 2  # split sums are not rounded in between
_ALIGNMENT = 16
_MAX_ALGORITHMS = 8


class Product(NamedTuple):
    """One kind of product, by all that an algorithm depends on: out = A B, or out += A B."""

    dtype: str  # of all three, "bfloat16" or "float16"
    # A has num_rows x num_inner elements, B num_inner x num_columns.
    num_rows: int
    num_inner: int
    num_columns: int
    strides: tuple[int, int, int]  # elements between rows, of A, of B (between columns, if transposed) and of out
    transposed: bool  # whether B's columns are contiguous instead of its rows
    accumulates: bool  # whether the product is added to out

    @classmethod
    def of(cls, out: Tensor, a: Tensor, b: Tensor, *, accumulates: bool) -> "Product | None":
        """None if only torch can multiply these matrices, or refuse them: other dtypes, empty or unaligned ones."""
        fits = out.shape == (a.shape[0], b.shape[1]) and a.shape[1] == b.shape[0]
        if not (fits and out.dtype == a.dtype == b.dtype and out.device == a.device == b.device):
            return None
        dtype = str(out.dtype).removeprefix("torch.")
        transposed = b.stride(0) == 1 and b.stride(1) != 1
        strides = a.stride(0), b.stride(int(transposed)), out.stride(0)
        contiguous = a.stride(1) == out.stride(1) == b.stride(int(not transposed)) == 1
        widths = a.shape[1], b.shape[int(not transposed)], out.shape[1]
        if dtype not in TYPES or not contiguous or 0 in (*out.shape, a.shape[1]):
            return None
        if any(stride < width or stride % 8 for stride, width in zip(strides, widths, strict=True)):
            return None
        if any(matrix.data_ptr() % _ALIGNMENT for matrix in (out, a, b)):
            return None
        return cls(dtype, *a.shape, b.shape[1], strides, transposed, accumulates)


class _Algorithm(ctypes.Structure):
    _fields_ = (("data", c_uint64 * 8),)


class _HeuristicResult(ctypes.Structure):
    _fields_ = (
        ("algorithm", _Algorithm),
        ("workspace", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


class Matmul:
    """A product's descriptors on one GPU, and its algorithms in the order of the heuristics.

    There are none if cuBLASLt is missing, fails or knows none.
    """

    def __init__(self, product: Product, index: int):
        self._index, self._accumulates = index, product.accumulates
        self.algorithms: list[_Algorithm] = []
        if _library() is None:
            return
        try:
            self._describe(product)
            self.algorithms = self._find_algorithms()
        except RuntimeError as error:
            logger.info(f"{error} Torch computes this product.")

    def _describe(self, product: Product) -> None:
        dtype, (stride_a, stride_b, stride_out) = TYPES[product.dtype], product.strides
        rows, inner, columns = product[1:4]
        rows_b, columns_b = (inner, columns) if product.transposed else (columns, inner)
        self._descriptor, transposed = c_void_p(), c_int(product.transposed)
        _call("cublasLtMatmulDescCreate", byref(self._descriptor), _COMPUTE_FP32, _FP32)
        _set("cublasLtMatmulDescSetAttribute", self._descriptor, _TRANSPOSE_FIRST, transposed)
        self._layouts = [
            _layout(dtype, rows_b, columns_b, stride_b),
            _layout(dtype, inner, rows, stride_a),
            _layout(dtype, columns, rows, stride_out),
        ]

    def run(self, algorithm: _Algorithm, out: Tensor, a: Tensor, b: Tensor, scale: float = 1.0) -> None:
        """out = scale A B, or out += scale A B, on the current stream; a RuntimeError if cuBLASLt refuses that."""
        beta, out_ptr = c_float(float(self._accumulates)), c_void_p(out.data_ptr())
        layout_b, layout_a, layout_out = self._layouts
        _call(
            "cublasLtMatmul",
            _handle(self._index),
            self._descriptor,
            byref(c_float(scale)),
            c_void_p(b.data_ptr()),
            layout_b,
            c_void_p(a.data_ptr()),
            layout_a,
            byref(beta),
            out_ptr,
            layout_out,
            out_ptr,
            layout_out,
            byref(algorithm),
            None,
            c_size_t(0),
            c_void_p(torch.cuda.current_stream(self._index).cuda_stream),
        )

    def _find_algorithms(self) -> list[_Algorithm]:
        preference, number, found = c_void_p(), c_int(), (_HeuristicResult * _MAX_ALGORITHMS)()
        _call("cublasLtMatmulPreferenceCreate", byref(preference))
        try:
            _set("cublasLtMatmulPreferenceSetAttribute", preference, _MAX_WORKSPACE, c_size_t(0))
            _set("cublasLtMatmulPreferenceSetAttribute", preference, _REDUCTIONS, ctypes.c_uint32(_REDUCED_IN_FP32))
            for alignment in _MIN_ALIGNMENTS:
                _set("cublasLtMatmulPreferenceSetAttribute", preference, alignment, ctypes.c_uint32(_ALIGNMENT))
            # It fails if there is no algorithm.
            failed = _library().cublasLtMatmulAlgoGetHeuristic(
                _handle(self._index),
                self._descriptor,
                *self._layouts,
                self._layouts[2],
                preference,
                _MAX_ALGORITHMS,
                found,
                byref(number),
            )
        finally:
            _call("cublasLtMatmulPreferenceDestroy", preference)
        return [] if failed else [one.algorithm for one in found[: number.value] if one.state == 0]


@functools.cache
def version() -> str:
    """The version of cuBLASLt; empty if it is missing."""
    if _library() is None:
        return ""
    _library().cublasLtGetVersion.restype = c_size_t
    return str(_library().cublasLtGetVersion())


@functools.cache
def _library() -> ctypes.CDLL | None:
    # torch has loaded it.
    name = f"libcublasLt.so.{(torch.version.cuda or '0').partition('.')[0]}"
    try:
        return ctypes.CDLL(name)
    except OSError:
        logger.info(f"{name} cannot be loaded; torch computes all products.")
        return None


@functools.cache
def _handle(index: int) -> c_void_p:
    handle = c_void_p()
    with torch.cuda.device(index):
        _call("cublasLtCreate", byref(handle))
    return handle


def _layout(dtype: int, rows: int, columns: int, stride: int) -> c_void_p:
    layout = c_void_p()
    _call("cublasLtMatrixLayoutCreate", byref(layout), dtype, c_uint64(rows), c_uint64(columns), c_int64(stride))
    return layout


def _set(function: str, target: c_void_p, attribute: int, value) -> None:
    _call(function, target, attribute, byref(value), c_size_t(ctypes.sizeof(value)))


def _call(function: str, *args) -> None:
    if status := getattr(_library(), function)(*args):
        raise RuntimeError(f"{function} failed with status {status}.")
