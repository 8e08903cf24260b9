"""Products by the fastest of cuBLASLt's algorithms: how one is chosen and saved, and that every one is right."""

import json

import pytest
import torch
from fake_gpu import FakeCuda, simulate

from sebp_edge.ops import tuning
from sebp_edge.ops.gpu import cublaslt, gemm
from sebp_edge.ops.gpu.cublaslt import Matmul, Product

PRODUCT = Product("bfloat16", 832, 3072, 5120, (3072, 3072, 5120), True, True)


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ({None: 1.0}, None),
        ({None: 1.0, 0: 1.0, 1: 0.98}, None),
        ({None: 1.0, 0: 1.0, 1: 0.9, 2: 0.8}, 2),
        ({None: 1.0, 0: 1.2}, None),
    ],
)
def test_another_algorithm_must_be_clearly_faster(times, expected):
    assert gemm.pick_fastest(times) == expected


def test_new_choices_are_added_to_the_file(tmp_path):
    path = tmp_path / "new" / "products.json"
    other = PRODUCT._replace(num_rows=96)
    gemm.write(path, {PRODUCT: 3})
    gemm.write(path, {other: None})
    assert gemm.read(path) == {PRODUCT: 3, other: None}
    assert [file.name for file in path.parent.iterdir()] == ["products.json"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}x",
        "[[1, 2]]",
        "7",
        "[" * 10**5,
        *(
            json.dumps([[*PRODUCT._replace(**change), choice]])
            for change, choice in [
                ({}, "3"),
                ({}, -1),
                ({}, True),
                ({"dtype": "float32"}, 1),
                ({"num_rows": "8"}, 1),
                ({"strides": (8, 8)}, 1),
                ({"strides": 8}, 1),
                ({"transposed": 1}, 1),
            ]
        ),
    ],
    ids=lambda text: text[:60],
)
def test_a_broken_file_is_reported_and_replaced(text, tmp_path, caplog):
    gemm._warn_once.cache_clear()
    path = tmp_path / "products.json"
    path.write_text(text)
    assert gemm.read(path) == {}
    assert str(path) in caplog.text
    gemm.write(path, {PRODUCT: 3})
    assert gemm.read(path) == {PRODUCT: 3}


def matrices(rows=24, inner=16, columns=32, dtype=torch.bfloat16, device="cpu", transposed=False):
    draw = torch.Generator(device).manual_seed(rows * inner + columns)
    make = {"generator": draw, "dtype": torch.float32, "device": device}
    b = torch.randn(columns, inner, **make).to(dtype).T if transposed else torch.randn(inner, columns, **make).to(dtype)
    return torch.randn(rows, columns, **make).to(dtype), torch.randn(rows, inner, **make).to(dtype), b


class TestSupportedProducts:
    @pytest.mark.parametrize(
        "change",
        [
            lambda out, a, b: (out.float(), a.float(), b.float()),
            lambda out, a, b: (out[:, 1:], a, b[:, 1:]),
            lambda out, a, b: (out[:0], a[:0], b),
            lambda out, a, b: (out, a[:, :0], b[:0]),
            lambda out, a, b: (out[:, ::2], a, b[:, ::2]),
            lambda out, a, b: (out[:, :31].clone(), a, b[:, :31]),
            lambda out, a, b: (out, a[:1].expand(24, 16), b),
        ],
        ids=["fp32", "one element aside", "no rows", "nothing inside", "with gaps", "odd width", "one row for all"],
    )
    def test_torch_computes_all_others(self, change):
        out, a, b = change(*matrices())
        expected = torch.addmm(out, a, b)
        assert Product.of(out, a, b, accumulates=True) is None
        with tuning("a folder that is never made"):
            gemm.add_product_(out, a, b)
        assert torch.equal(out, expected)


def relative(found, truth):
    return float((found.double() - truth).norm() / truth.norm())


@pytest.fixture
def nothing_chosen():
    """The state of a process that has timed nothing yet."""
    gemm._chosen.clear()
    gemm._read_once.cache_clear()
    gemm._warn_once.cache_clear()
    yield
    gemm._chosen.clear()
    gemm._read_once.cache_clear()


class PlainMatmul:
    """Algorithms without a GPU: each one is torch's, and those in `failing` fail."""

    algorithms, failing = ["first", "second", "third"], set()

    def __init__(self, product, index):
        self.accumulates = product.accumulates

    def run(self, algorithm, out, a, b, scale=1.0):
        if algorithm in self.failing:
            raise RuntimeError(f"{algorithm} failed.")
        torch.addmm(out, a, b, beta=float(self.accumulates), alpha=scale, out=out)


class PlainCuda(FakeCuda):
    """A GPU whose stream is captured if the test says so."""

    def __init__(self):
        self.is_captured = False

    def is_current_stream_capturing(self):
        return self.is_captured


@pytest.fixture
def plain_cuda(monkeypatch):
    cuda = PlainCuda()
    simulate(monkeypatch, cuda)
    return cuda


@pytest.fixture
def plain_matmuls(monkeypatch, plain_cuda, nothing_chosen, on_machine):
    """Algorithms without a GPU, the third one the fastest; returns the candidates of each timing."""
    timed = []

    def times(candidates):
        timed.append(list(candidates))
        return {choice: 1.0 if choice is None else 0.9 - 0.1 * choice for choice in candidates}

    monkeypatch.setattr(gemm, "_matmul", PlainMatmul)
    PlainMatmul.failing.clear()
    monkeypatch.setattr(gemm, "_time_candidates", times)
    monkeypatch.setattr(cublaslt, "version", lambda: "1")
    return timed


class TestTuning:
    @pytest.mark.parametrize("accumulates", [True, False])
    def test_a_product_is_timed_once_and_its_result_is_right(self, accumulates, plain_matmuls, tmp_path):
        function = gemm.add_product_ if accumulates else gemm.multiply_
        for _ in range(2):
            out, a, b = matrices()
            expected = torch.addmm(out, a, b) if accumulates else a @ b
            with tuning(tmp_path):
                function(out, a, b)
            assert torch.equal(out, expected)
        assert plain_matmuls == [[0, 1, 2, None]]
        assert list(gemm._chosen.values()) == [2]

    def test_nothing_is_timed_outside(self, plain_matmuls, tmp_path):
        with tuning(tmp_path):
            gemm.multiply_(*matrices())
        gemm.multiply_(*matrices(rows=40))
        assert len(gemm._chosen) == 1 and len(plain_matmuls) == 1

    def test_a_context_that_ends_leaves_another_one_open(self, plain_matmuls, tmp_path):
        first, second = tuning(tmp_path / "first"), tuning(tmp_path / "second")
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        gemm.multiply_(*matrices())
        second.__exit__(None, None, None)
        gemm.multiply_(*matrices(rows=40))
        assert len(gemm._chosen) == 1
        assert [path.parent.name for path in tmp_path.rglob("*.json")] == ["second"]

    def test_a_capture_times_nothing(self, plain_matmuls, plain_cuda, tmp_path):
        plain_cuda.is_captured = True
        with tuning(tmp_path):
            gemm.multiply_(*matrices())
        assert not gemm._chosen

    def test_the_next_process_uses_the_saved_choices(self, plain_matmuls, tmp_path):
        with tuning(tmp_path):
            gemm.multiply_(*matrices())
        gemm._chosen.clear()
        gemm._read_once.cache_clear()
        with tuning(tmp_path):
            gemm.multiply_(*matrices())
        assert list(gemm._chosen.values()) == [2] and len(plain_matmuls) == 1

    def test_a_choice_of_an_unknown_algorithm_is_replaced(self, plain_matmuls, tmp_path):
        product = Product.of(*matrices(), accumulates=False)
        gemm.write(gemm._file(tmp_path, 0), {product: 1000})
        with tuning(tmp_path):
            gemm.multiply_(*matrices())
        assert gemm._chosen == {(0, product): 2}
        assert gemm.read(gemm._file(tmp_path, 0)) == {product: 2}

    def test_an_algorithm_that_fails_is_left_out(self, plain_matmuls, tmp_path):
        PlainMatmul.failing = {"third"}
        with tuning(tmp_path):
            gemm.multiply_(*matrices())
        assert plain_matmuls == [[0, 1, None]]
        assert list(gemm._chosen.values()) == [1]

    def test_torch_multiplies_if_all_algorithms_fail(self, plain_matmuls, tmp_path):
        PlainMatmul.failing = {"first", "second", "third"}
        out, a, b = matrices()
        with tuning(tmp_path):
            gemm.multiply_(out, a, b)
        assert torch.equal(out, a @ b)
        assert list(gemm._chosen.values()) == [None]

    def test_a_later_failure_is_reported_and_torch_multiplies(self, plain_matmuls, tmp_path, caplog):
        with tuning(tmp_path):
            gemm.multiply_(*matrices())
        PlainMatmul.failing = {"third"}
        out, a, b = matrices()
        gemm.multiply_(out, a, b)
        assert torch.equal(out, a @ b)
        assert list(gemm._chosen.values()) == [None] and "From now on torch computes this product" in caplog.text

    def test_torch_multiplies_if_algorithms_must_be_deterministic(self, plain_matmuls, poisoned_memory, tmp_path):
        with tuning(tmp_path):
            gemm.multiply_(*matrices())
        assert not gemm._chosen

    def test_an_unwritable_folder_is_reported_once(self, plain_matmuls, tmp_path, caplog):
        (tmp_path / "file").write_text("")
        for rows in (24, 40):
            with tuning(tmp_path / "file"):
                gemm.multiply_(*matrices(rows=rows))
        assert caplog.text.count("cannot be saved") == 1 and len(caplog.records) == 1


SHAPES = [(96, 3072, 5120), (832, 1024, 3072), (840, 8192, 256), (1, 64, 8), (7, 24, 1000), (2, 8, 8)]


@pytest.mark.gpu
class TestOnAGpu:
    @pytest.mark.parametrize("accumulates", [True, False])
    @pytest.mark.parametrize("transposed", [True, False])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("shape", SHAPES)
    def test_every_algorithm_errs_no_more_than_torchs_product_and_sum(self, shape, dtype, transposed, accumulates):
        out, a, b = matrices(*shape, dtype, "cuda", transposed)
        truth = out.double() * accumulates + a.double() @ b.double()
        # Most of cuBLAS's kernels, torch's choice too, round a product before they add it.
        allowed = 1.1 * relative(out + a @ b if accumulates else a @ b, truth) + 1e-6
        product = Product.of(out, a, b, accumulates=accumulates)
        matmul = Matmul(product, 0)
        assert matmul.algorithms
        for algorithm in matmul.algorithms:
            found = out.clone()
            matmul.run(algorithm, found, a, b)
            assert relative(found, truth) <= allowed

    def test_parts_of_wider_matrices_are_right_and_leave_the_rest(self):
        out, a, b = matrices(200, 64, 512, device="cuda")
        truth = out.double()
        truth[:, 128:256] += a.double() @ b[:, 128:256].double()
        part = out[:, 128:256]
        matmul = Matmul(Product.of(part, a, b[:, 128:256], accumulates=True), 0)
        for algorithm in matmul.algorithms:
            found = out.clone()
            matmul.run(algorithm, found[:, 128:256], a, b[:, 128:256])
            assert torch.equal(found[:, :128], out[:, :128]) and torch.equal(found[:, 256:], out[:, 256:])
            assert relative(found, truth) < 3e-3

    @pytest.mark.parametrize("accumulates", [True, False])
    def test_timing_changes_no_result(self, accumulates, tmp_path, nothing_chosen):
        out, a, b = matrices(832, 1024, 3072, device="cuda")
        truth = out.double() * accumulates + a.double() @ b.double()
        with tuning(tmp_path):
            (gemm.add_product_ if accumulates else gemm.multiply_)(out, a, b)
        assert relative(out, truth) < 3e-3
        (product,) = gemm.read(next(tmp_path.iterdir()))
        assert product == Product.of(out, a, b, accumulates=accumulates)

    def test_every_algorithm_can_be_captured(self, tmp_path, nothing_chosen, monkeypatch):
        out, a, b = matrices(96, 256, 512, device="cuda")
        product = Product.of(out, a, b, accumulates=True)
        for choice in range(len(Matmul(product, 0).algorithms)):
            gemm._chosen[0, product] = choice
            found, graph = out.clone(), torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                gemm.add_product_(found, a, b)
            assert torch.equal(found, out)
            graph.replay()
            assert relative(found, out.double() + a.double() @ b.double()) < 3e-3

    def test_a_capture_times_nothing(self, tmp_path, nothing_chosen):
        out, a, b = matrices(96, 256, 512, device="cuda")
        gemm.multiply_(out, a, b)
        graph = torch.cuda.CUDAGraph()
        with tuning(tmp_path), torch.cuda.graph(graph):
            gemm.multiply_(out, a, b)
        assert not gemm._chosen

    def test_without_the_library_torch_multiplies(self, tmp_path, nothing_chosen, monkeypatch):
        out, a, b = matrices(832, 1024, 3072, device="cuda")
        monkeypatch.setattr(cublaslt, "_library", lambda: None)
        cublaslt.version.cache_clear()
        with tuning(tmp_path):
            gemm.multiply_(out, a, b)
        cublaslt.version.cache_clear()
        assert not gemm._chosen
        assert torch.equal(out, a @ b)
