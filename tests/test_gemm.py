"""Products by the fastest of cuBLASLt's algorithms: which one that is, where that is kept, and that each is right."""

import json

import pytest
import torch

from sebp_edge.ops import tuning
from sebp_edge.ops.gpu import cublaslt, gemm
from sebp_edge.ops.gpu.cublaslt import Plan, Product

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
    assert gemm.best(times) == expected


def test_what_was_found_is_kept_beside_what_was_there(tmp_path):
    path = tmp_path / "new" / "products.json"
    other = PRODUCT._replace(num_rows=96)
    gemm.write(path, {PRODUCT: 3})
    gemm.write(path, {other: None})
    assert gemm.read(path) == {PRODUCT: 3, other: None}
    assert [file.name for file in path.parent.iterdir()] == ["products.json"]


@pytest.mark.parametrize(
    "text", ["", "{}x", "[[1, 2]]", json.dumps([[*PRODUCT, "3"]]), json.dumps([[*PRODUCT, -1]]), "7"]
)
def test_a_broken_file_is_told_and_replaced(text, tmp_path, caplog):
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


class TestWhichProductsItTakes:
    def test_both_ways_that_a_weight_may_lie(self):
        out, a, b = matrices()
        assert Product.of(out, a, b, accumulates=True) == Product("bfloat16", 24, 16, 32, (16, 32, 32), False, True)
        out, a, b = matrices(transposed=True)
        assert Product.of(out, a, b, accumulates=False) == Product("bfloat16", 24, 16, 32, (16, 16, 32), True, False)

    def test_parts_of_wider_matrices(self):
        out, a, b = matrices(columns=64)
        found = Product.of(out[:, 8:40], a, b[:, 8:40], accumulates=True)
        assert found == Product("bfloat16", 24, 16, 32, (16, 64, 64), False, True)

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
    def test_none_that_only_torch_can_compute(self, change):
        out, a, b = change(*matrices())
        expected = torch.addmm(out, a, b)
        assert Product.of(out, a, b, accumulates=True) is None
        with tuning("a folder that is never made"):
            gemm.add_product_(out, a, b)
        assert torch.equal(out, expected)


def relative(found, truth):
    return float((found.double() - truth).norm() / truth.norm())


@pytest.fixture
def nothing_chosen(monkeypatch):
    """As in a process that has timed nothing yet."""
    monkeypatch.setattr(gemm, "_chosen", {})
    gemm._read_once.cache_clear()
    yield
    gemm._read_once.cache_clear()


SHAPES = [(96, 3072, 5120), (832, 1024, 3072), (840, 8192, 256), (1, 64, 8), (7, 24, 1000), (2, 8, 8)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU, and there is none here")
class TestOnAGpu:
    @pytest.mark.parametrize("accumulates", [True, False])
    @pytest.mark.parametrize("transposed", [True, False])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("shape", SHAPES)
    def test_every_algorithm_errs_no_more_than_torchs_product_and_sum(self, shape, dtype, transposed, accumulates):
        out, a, b = matrices(*shape, dtype, "cuda", transposed)
        truth = out.double() * accumulates + a.double() @ b.double()
        # Most of cuBLAS's kernels round a product before they add it, torch's choice too.
        allowed = 1.1 * relative(out + a @ b if accumulates else a @ b, truth) + 1e-6
        product = Product.of(out, a, b, accumulates=accumulates)
        plan = Plan(product, 0)
        assert plan.algorithms
        for algorithm in plan.algorithms:
            found = out.clone()
            plan.run(algorithm, found, a, b)
            assert relative(found, truth) <= allowed

    def test_parts_of_wider_matrices_are_right_and_leave_the_rest(self):
        out, a, b = matrices(200, 64, 512, device="cuda")
        truth = out.double()
        truth[:, 128:256] += a.double() @ b[:, 128:256].double()
        part = out[:, 128:256]
        plan = Plan(Product.of(part, a, b[:, 128:256], accumulates=True), 0)
        for algorithm in plan.algorithms:
            found = out.clone()
            plan.run(algorithm, found[:, 128:256], a, b[:, 128:256])
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

    def test_another_process_takes_what_was_found_and_times_nothing(self, tmp_path, nothing_chosen, monkeypatch):
        out, a, b = matrices(832, 1024, 3072, device="cuda")
        with tuning(tmp_path):
            gemm.multiply_(out, a, b)
        ((_, chosen),) = gemm._chosen.items()
        gemm._chosen.clear()
        gemm._read_once.cache_clear()
        monkeypatch.setattr(gemm, "_times", lambda ways: pytest.fail("timed again"))
        with tuning(tmp_path):
            gemm.multiply_(out, a, b)
        assert list(gemm._chosen.values()) == [chosen]

    def test_a_file_of_more_algorithms_than_there_are_is_not_believed(self, tmp_path, nothing_chosen):
        out, a, b = matrices(832, 1024, 3072, device="cuda")
        product = Product.of(out, a, b, accumulates=False)
        gemm.write(gemm._file(tmp_path, 0), {product: 1000})
        with tuning(tmp_path):
            gemm.multiply_(out, a, b)
        assert gemm._chosen[0, product] in {None, *range(len(Plan(product, 0).algorithms))}
        assert relative(out, a.double() @ b.double()) < 3e-3

    def test_a_graph_holds_any_of_them(self, tmp_path, nothing_chosen, monkeypatch):
        out, a, b = matrices(96, 256, 512, device="cuda")
        product = Product.of(out, a, b, accumulates=True)
        for choice in range(len(Plan(product, 0).algorithms)):
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

    def test_a_folder_that_cannot_be_written_to_is_told(self, tmp_path, nothing_chosen, caplog):
        out, a, b = matrices(96, 256, 512, device="cuda")
        (tmp_path / "file").write_text("")
        with tuning(tmp_path / "file"):
            gemm.multiply_(out, a, b)
        assert "cannot be kept" in caplog.text

    def test_without_the_library_torch_multiplies(self, tmp_path, nothing_chosen, monkeypatch):
        out, a, b = matrices(832, 1024, 3072, device="cuda")
        monkeypatch.setattr(cublaslt, "_library", lambda: None)
        monkeypatch.setattr(gemm, "_plan", Plan)
        with tuning(tmp_path):
            gemm.multiply_(out, a, b)
        assert set(gemm._chosen.values()) == {None}
        assert torch.equal(out, a @ b)
