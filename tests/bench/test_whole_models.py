"""The benchmarks of encoders and decoders, in small shapes: correct variants are measured, wrong ones refused."""

import copy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from models import WrongGradients, make_batch, make_model
from sebp_edge.research.bench.timer import running
from sebp_edge.research.bench.variants import DENSE
from speed import whole_models
from speed.graph_time import sums_before_waits
from speed.whole_models import BENCHMARKS, Replayed

CPU = torch.device("cpu")
CASES = [(benchmark, [*benchmark.tiny_cases()][-1]) for benchmark in BENCHMARKS.values()]


@pytest.fixture(params=CASES, ids=lambda param: param[1].model)
def benchmark_and_case(request):
    """A benchmark and one of its cases."""
    return request.param


@pytest.mark.parametrize("command", BENCHMARKS)
def test_tiny_shapes_are_not_recorded(command, capsys):
    with pytest.raises(SystemExit):
        whole_models.main([command, "--tiny", "--record"])
    assert "--record is for GPU runs only" in capsys.readouterr().err


@pytest.mark.slow
def test_each_variant_has_its_row_and_is_shown(benchmark_and_case, capsys):
    benchmark, case = benchmark_and_case
    rows = list(replace(benchmark, samples=1).measure(case, CPU))
    assert [row["variant"] for row in rows] == ["dense padded", "drop-in", "hoisted"]
    for row in rows:
        # The backward pass is a difference of two times, which can be negative.
        assert min(row["forward_ms"], row["step_ms"]) > 0
        assert 0 < row["gradient_error"] < 0.1  # bf16 against fp32: never exactly equal
        assert row["gpu_backward_ms"] is None and row["gpu_step_ms"] is None
        assert 0 < row["tokens"] < case.batch_size * case.context_length
    whole_models.show(case, rows)
    output = capsys.readouterr().out
    assert output.count("dense / drop-in: forward") == output.count("dense / hoisted: forward") == 1
    target = "target of 1.0x for backward"
    assert output.count(f"{target} reached") + output.count(f"{target} missed") == 1


def test_kernel_times_are_summed_by_part():
    def event(name, start, microseconds):
        return SimpleNamespace(name=name, time_range=SimpleNamespace(start=start, elapsed_us=lambda: microseconds))

    wait = "at::cuda::(anonymous namespace)::spin_kernel(long)"
    events = [event(wait, 9, 100), event("b", 12, 5.0), event("a", 1, 2.0), event("a", 4, 3.0), event(wait, 20, 100)]
    assert sums_before_waits(events) == [5.0, 5.0]
    assert sums_before_waits([event(wait, 1, 7)]) == [0.0]


@pytest.mark.slow
def test_a_variant_with_wrong_gradients_is_not_timed(benchmark_and_case):
    benchmark, case = benchmark_and_case

    def with_half_a_loss(model, batch):
        *others, hoisted = benchmark.variants_for(model, batch)
        return *others, replace(hoisted, loss=lambda handle, batch: hoisted.loss(handle, batch) / 2)

    with pytest.raises(WrongGradients, match=r"hoisted: the gradient of .* is off"):
        next(replace(benchmark, variants_for=with_half_a_loss).measure(case, CPU))


def test_a_replayed_variant_makes_the_same_step(benchmark_and_case):
    _, case = benchmark_and_case

    def add(model):
        loss = DENSE.loss(model, batch)
        loss.backward()
        return loss.detach()

    torch.manual_seed(0)
    model, (batch, _) = make_model(case.config, CPU).eval(), make_batch(case, CPU)
    replayed = Replayed("replayed", DENSE.attach, DENSE.loss, add=add)
    before, states = copy.deepcopy(model.state_dict()), []
    for variant in (DENSE, replayed):
        model.load_state_dict(before)
        with running(model, batch, variant) as step:
            step(lambda part: None)
        states.append(copy.deepcopy(model.state_dict()))
    assert all(torch.equal(states[0][name], states[1][name]) for name in before)
    assert not all(torch.equal(states[0][name], before[name]) for name in before)


def test_every_data_set_of_the_paper_has_a_case():
    assert len(list(whole_models.encoder_cases())) == 20
    assert [case.texts for case in whole_models.decoder_cases()] == list(whole_models.TEXTS)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU, and there is none here")
def test_the_graph_has_its_row_on_a_gpu(benchmark_and_case):
    benchmark, case = benchmark_and_case
    rows = list(benchmark.measure(case, torch.device("cuda")))
    assert [row["variant"] for row in rows[2:]] == ["hoisted", "hoisted, in a graph"]
    for row in rows:
        assert row["gpu_step_ms"] > 0 and row["peak_gib"] > 0
