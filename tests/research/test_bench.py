"""Comparing variants: correct ones are timed, wrong ones are refused, and one that fails does not stop the others."""

import time
from contextlib import contextmanager

import pytest
import torch
from builders import make_examples, make_llama

from sebp_edge.errors import MachineError, SparsityError
from sebp_edge.machine.devices import ran_out_of_memory
from sebp_edge.research.bench.compare import compare, measure_deviation
from sebp_edge.research.bench.correctness import Reference, loss_and_gradients
from sebp_edge.research.bench.run import limited_host_memory
from sebp_edge.research.bench.timer import STEPS_PER_ROUND, running, time_variant
from sebp_edge.research.bench.variants import (
    DENSE,
    DROP_IN,
    DYNAMIC,
    GRAPH,
    HOISTED,
    PACKED,
    VARIANTS,
    Variant,
    packed,
    trim_to_longest,
)
from sebp_edge.research.bench.workload import Workload

CPU = torch.device("cpu")
AVAILABLE = tuple(variant for variant in VARIANTS if variant.unsupported_reason(CPU) is None)
OUT_OF_MEMORY = "DefaultCPUAllocator: can't allocate memory"


def make_batch(lengths=(9, 3, 14), context_length=32, prompt=0):
    return Workload.of(make_examples(lengths, prompt), context_length, 320, CPU).batch


def failing(name, error):
    def loss(model, batch):
        raise error

    return Variant(name, DENSE.attach, loss)


@pytest.mark.parametrize(("lengths", "prompt"), [((2,), 0), ((2, 9, 31), 4), ((32,), 0)], ids=str)
def test_every_variant_computes_what_the_model_computes_without_padding(lengths, prompt):
    model, batch = make_llama(), make_batch(lengths, prompt=prompt)
    reference = Reference.of(model, batch)
    for variant in AVAILABLE:
        found = measure_deviation(variant, reference, model, batch)
        assert max(found.loss_error, found.gradient_error) < 1e-5, variant.name
        assert reference.describe_error(found) is None


def test_the_captured_variant_makes_the_same_steps(plain_graphs):
    found, parts = {}, []
    for variant in (HOISTED, GRAPH):
        model, batch = make_llama(), make_batch()
        with variant.attach(model) as handle:
            step = variant.step(handle, model, batch)
            loss = float(step.gradients())
            gradients = [parameter.grad.clone() for parameter in model.parameters()]
            before = [parameter.detach().clone() for parameter in model.parameters()]
            step(parts.append)
            moves = [after.detach() - old for after, old in zip(model.parameters(), before, strict=True)]
            found[variant] = loss, gradients, moves
            step.release()
    (loss, gradients, moves), (other_loss, other_gradients, other_moves) = found.values()
    assert loss == pytest.approx(other_loss, rel=1e-5)
    for one, other in zip(gradients, other_gradients, strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-6)
    # Adam's first step is about as long as the learning rate wherever a gradient is not close to zero.
    for one, other, gradient in zip(moves, other_moves, gradients, strict=True):
        has_gradient = gradient.abs() > 1e-5
        assert has_gradient.any() and one[has_gradient].abs().max() > 5e-6
        assert torch.allclose(one[has_gradient], other[has_gradient], atol=2e-6)
    assert parts == ["forward", "backward", "update", "forward and backward", "update"]


@pytest.mark.slow
def test_available_variants_are_timed_and_graphs_state_what_they_need():
    found = {one.variant.name: one for one in compare(make_llama(), make_batch(), rounds=1)}
    assert list(found) == [variant.name for variant in VARIANTS]
    for variant in AVAILABLE:
        times = found[variant.name].times
        assert found[variant.name].status == "ok"
        assert 0 < times.forward < times.step
        assert 0 < times.backward < times.step
        assert times.peak_bytes is None
    graph = found[GRAPH.name]
    assert (graph.status, graph.reason, graph.times) == ("not available", "CUDA graphs need an NVIDIA GPU", None)


def test_the_reference_is_in_fp32_and_changes_no_weight():
    model, batch = make_llama().bfloat16(), make_batch()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    reference, exact = Reference.of(model, batch), Reference.of(make_llama().bfloat16().float(), batch)
    assert reference.loss == pytest.approx(exact.loss, rel=1e-6)
    torch.testing.assert_close(reference.gradients, exact.gradients)
    assert reference.allowed.gradient_error > 10 * exact.allowed.gradient_error > 0
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.slow
def test_bf16_variants_are_within_their_tolerance():
    found = compare(make_llama().bfloat16(), make_batch(), (DENSE, DROP_IN, HOISTED), rounds=1)
    assert [one.status for one in found] == ["ok"] * 3
    assert all(1e-4 < one.deviation.gradient_error < 0.1 for one in found)


def test_a_wrong_loss_is_refused_and_not_timed():
    half = Variant("half", DENSE.attach, lambda model, batch: DENSE.loss(model, batch) / 2)
    dense, wrong = compare(make_llama(), make_batch(), (DENSE, half), rounds=1)
    assert dense.status == "ok"
    assert (wrong.status, wrong.times) == ("refused", None)
    assert wrong.deviation.loss_error == pytest.approx(0.5)
    assert wrong.reason == "its loss is off by 5.0e-01, above 1.0e-04"


def test_the_right_loss_with_wrong_gradients_is_refused():
    @contextmanager
    def doubling_a_gradient(model):
        handle = model.model.layers[0].mlp.up_proj.weight.register_hook(lambda gradient: 2 * gradient)
        yield model
        handle.remove()

    wrong = Variant("doubled", doubling_a_gradient, DENSE.loss)
    (found,) = compare(make_llama(), make_batch(), (wrong,), rounds=1)
    assert (found.status, found.times) == ("refused", None)
    assert found.reason.startswith("its gradients are off by ")


def test_a_loss_that_is_not_a_number_is_refused():
    broken = Variant("broken", DENSE.attach, lambda model, batch: DENSE.loss(model, batch) * float("nan"))
    (found,) = compare(make_llama(), make_batch(), (broken,), rounds=1)
    assert (found.status, found.reason) == ("refused", "its loss is off by nan, above 1.0e-04")


def test_attention_between_documents_is_refused():
    def with_a_mask_of_ones(model, row):
        mask = torch.ones_like(row["input_ids"])
        return model(input_ids=row["input_ids"], labels=row["labels"], attention_mask=mask, use_cache=False).loss

    (found,) = compare(
        make_llama(), make_batch(), (Variant("one text", DENSE.attach, with_a_mask_of_ones, packed),), rounds=1
    )
    assert found.status == "refused"


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (RuntimeError(OUT_OF_MEMORY), "out of memory", None),
        (torch.OutOfMemoryError("CUDA out of memory"), "out of memory", None),
        (SparsityError("This does not run on rows."), "not available", "This does not run on rows"),
        (TypeError("forward() got\nan argument"), "failed", "TypeError: forward() got"),
    ],
    ids=["memory", "GPU memory", "unfit", "other"],
)
def test_a_variant_that_fails_has_its_row_and_the_others_go_on(error, status, reason):
    bad, good = compare(make_llama(), make_batch(), (failing("bad", error), DENSE), rounds=1)
    assert (bad.status, bad.reason, bad.deviation, bad.times) == (status, reason, None, None)
    assert good.status == "ok"


def test_running_out_of_memory_in_a_later_round_is_reported():
    calls = []

    def loss(model, batch):
        calls.append(1)
        if len(calls) > 2 + STEPS_PER_ROUND:
            raise MemoryError
        return DENSE.loss(model, batch)

    model = make_llama()
    late, good = compare(model, make_batch(), (Variant("late", DENSE.attach, loss), DENSE), rounds=2)
    assert (late.status, late.times) == ("out of memory", None)
    assert late.deviation is not None
    assert good.times is not None
    assert all(parameter.grad is None for parameter in model.parameters())


def test_without_a_reference_nothing_is_compared():
    def out_of_memory(*_):
        raise RuntimeError(OUT_OF_MEMORY)

    model = make_llama()
    model.register_forward_pre_hook(out_of_memory)
    with pytest.raises(MachineError, match=r"The fp32 gradients .* could not be computed \(memory ran out\); choose a"):
        compare(model, make_batch())


def test_the_model_is_restored():
    model, batch = make_llama(), make_batch()
    before = {name: vars(module).keys() for name, module in model.named_modules()}
    attention = model.config._attn_implementation
    for variant in AVAILABLE:
        time_variant(model, batch, variant)
    assert {name: vars(module).keys() for name, module in model.named_modules()} == before
    assert model.config._attn_implementation == attention


def test_one_time_costs_of_the_first_step_are_not_timed():
    class Slow:
        def __init__(self, model):
            self.model, self.pause = model, 0.5

        def __enter__(self):
            return self

        def __exit__(self, *exception): ...

    def loss(handle, batch):
        time.sleep(handle.pause)
        handle.pause = 0.0
        return DENSE.loss(handle.model, batch)

    found = time_variant(make_llama(), make_batch(), Variant("slow at first", Slow, loss))
    assert len(found) == STEPS_PER_ROUND
    assert all(times.step < 0.5 for times in found)


def test_dynamic_padding_and_packing_keep_all_tokens():
    batch = make_batch((5, 2, 11), context_length=16)
    shorter, row = trim_to_longest(batch), packed(batch)
    assert shorter.input_ids.shape == (3, 11)
    assert row["input_ids"].shape == (1, 18)
    assert torch.equal(row["input_ids"][0], batch.input_ids[batch.attention_mask.bool()])
    assert row["position_ids"][0].tolist() == [*range(2), *range(5), *range(11)]
    assert row["cu_seq_lens_q"].tolist() == [0, 2, 7, 18]
    assert (row["labels"][0] == -100).nonzero().flatten().tolist() == [0, 2, 7]


def test_variants_of_this_project_are_marked():
    assert [variant for variant in VARIANTS if variant.is_ours] == [DROP_IN, HOISTED, GRAPH]
    assert not (DENSE.is_ours or DYNAMIC.is_ours or PACKED.is_ours)


def test_sampled_gradients_are_elements_of_the_gradients():
    model, batch = make_llama(), make_batch()
    with running(model, batch, DENSE) as step:
        _, some = loss_and_gradients(step, model)
        step.gradients()
        every = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    assert every.keys() == some.keys()
    for name, whole in every.items():
        stride = max(1, whole.numel() // 4096)
        assert torch.equal(some[name], whole.flatten()[::stride])


@pytest.mark.slow
def test_running_out_of_limited_host_memory_is_an_error():
    # Far above the limit: earlier tests may leave the allocator 100 MB that it can use again.
    with limited_host_memory(50_000_000), pytest.raises(RuntimeError) as caught:
        torch.ones(250_000_000)
    assert ran_out_of_memory(caught.value)
    assert len(torch.empty(250_000_000)) == 250_000_000
