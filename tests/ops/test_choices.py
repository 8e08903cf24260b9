"""The choice between our kernels and cuBLAS: measured on this machine, else shipped, else safe."""

import json
import logging
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from fake_gpu import FakeCuda, simulate
from fake_machine import MEASURED_ON
from pairwise import pairwise
from random_cases import random_case

from sebp_edge.ops import ActiveRows, choices, detect, sparse_linear
from sebp_edge.ops.choices import Algorithms, Shape
from sebp_edge.ops.tiles import Tiles

SMALL, LARGE = Tiles(64, 64, 64, 1, 4, 4), Tiles(128, 256, 64, 2, 8, 3)
SHAPE = Shape.of(True, True, 2, 768, 3072, 61)


class H100(FakeCuda):
    """A GPU with a name, and with the shared memory of a smaller one."""

    def get_device_name(self, index):
        return "NVIDIA H100 80GB HBM3"

    def get_device_properties(self, index):
        return SimpleNamespace(shared_memory_per_block_optin=70_000)


@pytest.fixture
def gpu(monkeypatch, on_machine):
    simulate(monkeypatch, H100())
    choices._known.cache_clear()
    yield torch.device("cuda", 0)
    choices._known.cache_clear()


def test_choices_are_read_back_from_their_file(tmp_path):
    path = choices.choices_file(tmp_path / "new", MEASURED_ON)
    found = {SHAPE: Algorithms(SMALL, None), SHAPE._replace(wanted="dx"): Algorithms(LARGE, None)}
    choices.write(path, MEASURED_ON, found)
    choices.write(path, MEASURED_ON, {SHAPE: Algorithms(None, LARGE)})
    assert choices.read(path) == found | {SHAPE: Algorithms(None, LARGE)}
    assert json.loads(path.read_text())["machine"] == MEASURED_ON
    assert [file.name for file in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"choices": [{}]}',
        '{"choices": [{"shape": {"wanted": "dx"}, "dx": "cublas", "dweight": "cublas"}]}',
    ]
    + [
        json.dumps({"choices": [{"shape": SHAPE._asdict(), "dx": wrong, "dweight": "cublas"}]})
        for wrong in (None, "fast", SMALL._asdict() | {"rows": 0}, SMALL._asdict() | {"rows": "64"}, {"rows": 64})
    ],
)
def test_a_broken_file_is_reported_once_ignored_and_replaced(gpu, text, caplog):
    path = choices.measured_file(0)
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with caplog.at_level(logging.WARNING):
        shape = SHAPE._replace(num_inputs=5)
        assert choices.choose(shape, gpu) == choices.choose(shape, gpu) == Algorithms()
    assert [record.message.count(str(path)) for record in caplog.records] == [1]
    choices.write(path, MEASURED_ON, {shape: Algorithms(SMALL, LARGE)})
    assert choices.choose(shape, gpu) == Algorithms(SMALL, LARGE)


def test_a_failed_write_leaves_the_file_unchanged(tmp_path, limit_files):
    path = choices.choices_file(tmp_path, MEASURED_ON)
    choices.write(path, MEASURED_ON, {SHAPE: Algorithms(SMALL, None)})
    before = path.read_bytes()

    with limit_files(10), pytest.raises(OSError, match="File too large"):
        choices.write(path, MEASURED_ON, {SHAPE: Algorithms(None, LARGE)})
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_measured_choices_come_before_shipped_ones_and_cublas_comes_last(gpu):
    (shape, found), (other, found_of_other), *_ = choices.shipped(torch.cuda.get_device_name(0)).items()
    assert choices.choose(shape, gpu) == found != Algorithms(None, LARGE)
    choices.write(choices.measured_file(0), MEASURED_ON, {shape: Algorithms(None, LARGE)})
    assert choices.choose(shape, gpu) == Algorithms(None, LARGE)
    assert choices.choose(other, gpu) == found_of_other
    assert choices.choose(shape._replace(num_inputs=5), gpu) == Algorithms()


# ---------------------------------------------------------------------------------------------------------- measuring


def times(gather, dx, dweight):
    from sebp_edge.ops.measure import LayerTimes

    return LayerTimes(
        gather, dict(zip([None, SMALL, LARGE], dx, strict=True)), dict(zip([None, SMALL], dweight, strict=True))
    )


def rows_of(num_active):
    return ActiveRows.from_ids(torch.arange(num_active), 100)


def test_the_fastest_algorithms_share_one_gather():
    pytest.importorskip("triton")
    from sebp_edge.ops.measure import fastest

    found = fastest(8, 16, torch.bfloat16, [(rows_of(50), times(5, dx=[10, 14, 20], dweight=[10, 14]))])
    algorithms = {shape.wanted: algorithm for shape, algorithm in found.items()}
    # Alone, a product is slower by cuBLAS with its gather; together they are faster.
    assert algorithms == {
        "dx": Algorithms(SMALL, None),
        "dweight": Algorithms(None, SMALL),
        "both": Algorithms(None, None),
    }
    assert {shape.bucket for shape in found} == {64}


def test_row_sets_of_one_shape_choose_together():
    pytest.importorskip("triton")
    from sebp_edge.ops.measure import fastest

    several = [
        (rows_of(50), times(0, dx=[10, 11, 99], dweight=[1, 2])),
        (rows_of(64), times(0, dx=[99, 11, 10], dweight=[1, 2])),
    ]
    assert fastest(8, 16, torch.bfloat16, several)[Shape.of(True, False, 2, 8, 16, 64)] == Algorithms(SMALL, None)


def test_a_wrong_algorithm_is_refused():
    pytest.importorskip("triton")
    from sebp_edge.ops.measure import check

    truth = torch.randn(5, 7)
    check({None: truth.clone, SMALL: (truth * 1.00001).clone}, truth)
    for wrong in (truth * 1.01, torch.full_like(truth, float("nan"))):
        with pytest.raises(RuntimeError, match="error of"):
            check({None: truth.clone, SMALL: wrong.clone}, truth)


@pytest.mark.slow
def test_measuring_checks_and_times_every_algorithm_that_fits(monkeypatch, request):
    pytest.importorskip("triton")
    from sebp_edge.ops import measure

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        # No graphs and no limits on a CPU: kernels run in Triton's interpreter, those with the smallest tiles.
        monkeypatch.setattr(measure, "milliseconds", lambda function: 1.0)
        request.getfixturevalue("gpu")
    rows = ActiveRows.from_ids(torch.tensor([1, 4, 5, 30], device=device), 40)
    found = measure.measure([(24, 40)], [rows], torch.float16)
    assert found.keys() == {Shape(wanted, 16, 24, 40, 4) for wanted in ("dx", "dweight", "both")}
    assert choices.read(choices.measured_file(0)) == found


TINY = Tiles(16, 16, 16, 2, 4, 2)


@pairwise(
    dx=[None, TINY],
    dweight=[None, TINY],
    trained=["xwb", "x", "w", "b", "xb", "xw"],
    given=["ids", "detect"],
)
def test_every_algorithm_gives_dense_gradients(dx, dweight, trained, given, kernels, monkeypatch, poisoned_memory):
    monkeypatch.setattr(choices, "choose", lambda shape, device: choices.Algorithms(dx, dweight))
    x, weight, bias, ids, dout = random_case(24, 8, 6, 9, torch.float32)
    rows = {"ids": ids, "detect": detect}[given]
    tensors = {"x": x, "w": weight, "b": bias}
    for name in trained:
        tensors[name].requires_grad_()
    expected = torch.autograd.grad(F.linear(x, weight, bias), [tensors[name] for name in trained], dout)
    found = torch.autograd.grad(sparse_linear(x, weight, bias, rows), [tensors[name] for name in trained], dout)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
