"""In your own training loop, graphs give the eager gradients, whatever the optimizer does to `grad`."""

import copy

import pytest
import torch
from against_dense import padded_batch
from builders import gpu_sync_forbidden, make_encoder, make_encoder_batch, make_llama
from failing_memory import PlainGraphs
from model_families import FAMILIES, WIDER
from peft import LoraConfig, get_peft_model

from sebp_edge.engine.sparse.hoist import Hoisted
from sebp_edge.engine.training import captured_gradients
from sebp_edge.errors import CannotCapture, MachineError
from sebp_edge.research import ActiveTokens, CapturedGradients, HoistedEncoder, RowPlan

LENGTHS = [(90, 1, 128, 33), (17, 40), (9, 9, 9, 9, 9), (200, 17, 129, 1)]


def on_gpu(family, head, dropout=0.0, dtype=torch.bfloat16):
    return make_encoder(family, head, dropout, **WIDER[family]).to("cuda", dtype)


def batches_of(family, head):
    return [make_encoder_batch(family, head, lengths, 240, seed) for seed, lengths in enumerate(LENGTHS)]


def gradients_of(model):
    return {name: p.grad.double() for name, p in model.named_parameters() if p.requires_grad and p.grad is not None}


def assert_alike(found, expected, truth=None, tolerance=0.03):
    """Filled buckets have other sizes, and so other rounding in bf16: twice the error of the eager gradients, if known.

    Args:
        truth: the gradients of an fp32 copy of the model.
    """
    assert found.keys() == expected.keys()
    largest = max(gradient.norm() for gradient in expected.values())
    for name, gradient in expected.items():
        allowed = tolerance * gradient.norm() + 1e-3 * largest
        if truth is not None:
            allowed += 2 * (gradient - truth[name]).norm()
            gradient = truth[name]
        assert (found[name] - gradient).norm() <= allowed, name


def test_without_a_gpu_the_error_names_the_reason():
    with (
        HoistedEncoder(make_encoder("bert", "sequence")) as hoisted,
        pytest.raises(MachineError, match="Graphs need an NVIDIA GPU, but the model is on cpu"),
    ):
        CapturedGradients(hoisted)


@pytest.mark.parametrize("at_once", [2**30, 0], ids=["all at once", "one by one"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_steps_first_gradients_are_written_and_later_ones_added(at_once, tied, limit_gradients):
    limit_gradients(at_once)
    model = make_llama(tie_word_embeddings=tied)
    unused = torch.nn.Parameter(torch.ones(3))
    parameters = [*model.parameters(), unused]
    buffers, (first, second) = captured_gradients._GradientBuffers(parameters), torch.randint(320, (2, 2, 9))
    for buffer in buffers.tensors:
        buffer.fill_(7.0)  # left by an earlier step

    def loss(ids):
        return model(ids, labels=ids).loss

    assert buffers.assign_grad()
    captured_gradients._WriteGradients(buffers).take_gradients(loss(first), is_warming_up=False)
    found = [parameter.grad.clone() for parameter in parameters]
    assert not buffers.assign_grad()
    captured_gradients._AddGradients(buffers).take_gradients(loss(second), is_warming_up=False)
    added = [parameter.grad.clone() for parameter in parameters]
    assert all(parameter.grad is buffer for parameter, buffer in zip(parameters, buffers.tensors, strict=True))
    for gradients, ids in ((found, [first]), (added, [first, second])):
        for parameter in parameters:
            parameter.grad = None
        for each in ids:
            loss(each).backward()
        for parameter, gradient in zip(parameters, gradients, strict=True):
            expected = torch.zeros(3) if parameter is unused else parameter.grad
            torch.testing.assert_close(gradient, expected)


def test_existing_gradients_are_kept():
    parameters = [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(3))]
    buffers = captured_gradients._GradientBuffers(parameters)
    buffers.tensors[1].fill_(7.0)
    parameters[0].grad = torch.full((2,), 5.0)
    assert not buffers.assign_grad()
    assert [parameter.grad.tolist() for parameter in parameters] == [[5.0, 5.0], [0.0, 0.0, 0.0]]


@pytest.fixture
def plain(plain_graphs, monkeypatch):
    """Replaces captures on machines without a GPU.

    Returns the recorded calls, and a list: if it is not empty, captures fail.
    """
    order, failing = [], []

    class RecordedGraphs(PlainGraphs):
        def warm_up(self, function):
            order.append("warm_up")
            super().warm_up(function)

        def capture(self, part, function):
            order.append(part)
            if failing:
                raise CannotCapture("it cannot be captured")
            return function

    monkeypatch.setattr(captured_gradients, "GraphPool", RecordedGraphs)
    return order, failing


def rows_of(count):
    batch = padded_batch(prompt=0)
    return ActiveTokens.gather(batch["input_ids"][:count], RowPlan.from_labels(batch["labels"][:count]))


def test_all_planned_buckets_are_warmed_up_before_the_first_capture(plain):
    order, _ = plain
    with Hoisted(make_llama()) as hoisted:
        captured = CapturedGradients(hoisted)
        captured.prepare([rows_of(3), rows_of(1)])
        for tokens in (rows_of(3), rows_of(1), rows_of(1)):
            captured.add(tokens)
    assert order == ["warm_up"] * order.count("warm_up") + ["first gradients", "gradients"]
    assert order.count("warm_up") >= 2


def test_a_first_batch_that_cannot_be_captured_leaves_no_gradients_of_the_last_step(plain):
    _, failing = plain
    with Hoisted(make_llama()) as hoisted:
        captured, parameters = CapturedGradients(hoisted), list(hoisted.model.parameters())
        captured.add(rows_of(3))
        hoisted.model.zero_grad()
        failing.append(True)
        with pytest.raises(CannotCapture):
            captured.add(rows_of(1))
        assert [parameter.grad for parameter in parameters] == [None] * len(parameters)


@pytest.mark.parametrize("at_once", [2**30, 0])
def test_warm_up_leaves_existing_gradients_unchanged(plain, at_once, limit_gradients):
    limit_gradients(at_once)
    model = make_llama()
    with Hoisted(model) as hoisted:
        captured, parameters = CapturedGradients(hoisted), list(model.parameters())
        one, other = rows_of(3), rows_of(1)
        for tokens in (one, other):
            hoisted.row_losses(tokens).mean().backward()
        expected = [parameter.grad.clone() for parameter in parameters]
        # Gradients from before the first capture.
        model.zero_grad()
        hoisted.row_losses(one).mean().backward()
        captured.prepare([other])
        captured.add(other)
        torch.testing.assert_close([parameter.grad for parameter in parameters], expected)
        # A bucket that is prepared while gradients are accumulated.
        model.zero_grad()
        captured = CapturedGradients(hoisted)
        captured.add(one)
        captured.prepare([other])
        captured.add(other)
        torch.testing.assert_close([parameter.grad for parameter in parameters], expected)


class TestOnAGpu:
    pytestmark = pytest.mark.gpu

    @pytest.mark.parametrize("family", FAMILIES)
    @pytest.mark.parametrize("head", ["sequence", "token"])
    @pytest.mark.parametrize("adapt", ["full", "lora"])
    def test_gradients_equal_the_eager_ones(self, family, head, adapt):
        model = on_gpu(family, head)
        if adapt == "lora":
            model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)).cuda()
        in_fp32 = copy.deepcopy(model).float()
        with HoistedEncoder(model) as hoisted, HoistedEncoder(in_fp32) as true:
            captured = CapturedGradients(hoisted)
            batches = batches_of(family, head)
            captured.prepare(map(hoisted.tokens, batches))
            for batch in batches + batches[::-1]:
                model.zero_grad()
                loss = hoisted.losses(batch).mean()
                loss.backward()
                # A reference to the loss would keep autograd on the stream that computed it.
                expected = loss.detach()
                del loss
                wanted = gradients_of(model)
                model.zero_grad()
                found = captured.add(hoisted.tokens(batch))
                torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-3)
                in_fp32.zero_grad()
                true.losses(batch).mean().backward()
                assert_alike(gradients_of(model), wanted, gradients_of(in_fp32))
                torch.testing.assert_close(
                    captured.losses(hoisted.tokens(batch)).cuda().mean(), expected, rtol=1e-2, atol=1e-3
                )

    @pytest.mark.parametrize("set_to_none", [True, False])
    def test_gradients_accumulate_and_are_zeroed_as_in_any_loop(self, set_to_none):
        model = on_gpu("bert", "sequence")
        first, second, *_ = batches_of("bert", "sequence")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        with HoistedEncoder(model) as hoisted:
            captured = CapturedGradients(hoisted)
            captured.add(hoisted.tokens(first))
            one = gradients_of(model)
            captured.add(hoisted.tokens(second))
            both = gradients_of(model)
            optimizer.zero_grad(set_to_none=set_to_none)
            captured.add(hoisted.tokens(second))
            other = gradients_of(model)
        assert_alike(both, {name: one[name] + other[name] for name in one})
        assert not all(torch.equal(one[name], other[name]) for name in one)

    def test_replays_do_not_wait_for_the_gpu(self):
        model = on_gpu("roberta", "sequence", 0.1)
        with HoistedEncoder(model) as hoisted:
            captured = CapturedGradients(hoisted)
            tokens = hoisted.tokens(make_encoder_batch("roberta", "sequence", (40, 9), 64))
            captured.add(tokens)
            with gpu_sync_forbidden():
                captured.add(tokens)

    def test_each_replay_draws_new_dropout_with_the_eager_distribution(self):
        model, draws = on_gpu("bert", "sequence", 0.3), 200
        batch = make_encoder_batch("bert", "sequence", (40, 9, 100), 128)
        with HoistedEncoder(model) as hoisted, torch.random.fork_rng(devices=[0]):
            torch.manual_seed(0)
            captured, tokens = CapturedGradients(hoisted), hoisted.tokens(batch)
            by_graphs = torch.stack([captured.add(tokens) for _ in range(draws)])
            with torch.no_grad():
                eager = torch.stack([hoisted.losses(batch).mean() for _ in range(draws)])
        assert len(by_graphs.unique()) > 0.9 * draws
        error = float((by_graphs.var() / draws + eager.var() / draws).sqrt())
        assert abs(float(by_graphs.mean() - eager.mean())) <= 5 * error
        torch.testing.assert_close(by_graphs.std(), eager.std(), rtol=0.4, atol=0.0)

    def test_evaluation_has_no_dropout_even_if_training_was_captured_first(self):
        model = on_gpu("bert", "sequence", 0.5)
        batch = make_encoder_batch("bert", "sequence", (40, 9), 64)
        with HoistedEncoder(model) as hoisted:
            captured, tokens = CapturedGradients(hoisted), hoisted.tokens(batch)
            assert not torch.equal(captured.losses(tokens), captured.losses(tokens))
            captured.add(tokens)
            model.eval()
            assert torch.equal(captured.losses(tokens), captured.losses(tokens))
            assert torch.equal(captured.add(tokens), captured.add(tokens))
