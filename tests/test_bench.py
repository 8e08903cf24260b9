"""The runner: it times what is right, and refuses what is wrong."""

import time

import pytest
from builders import make_llama

from sebp_edge.insight.bench import DENSE, WAYS, Way, WrongGradients, time_steps
from sebp_edge.texts.batches import Collator
from sebp_edge.texts.examples import Example


@pytest.fixture
def batches():
    texts = [list(range(7, 7 + length)) for length in (9, 3, 14)]
    return [Collator(32, 2)([Example(ids, ids, number) for number, ids in enumerate(texts)])]


def test_every_way_is_timed_and_right(batches):
    timings = time_steps(make_llama(), batches, rounds=2, tolerance=1e-4)
    assert [timing.way for timing in timings] == [way.name for way in WAYS]
    for timing in timings:
        assert 0 < timing.forward < timing.step
        assert 0 < timing.backward < timing.step
        assert timing.gradient_error < 1e-4


def test_what_is_wrong_is_not_timed(batches):
    wrong = Way("half the loss", DENSE.attach, lambda handle, batch: DENSE.loss(handle, batch) / 2)
    with pytest.raises(WrongGradients, match=r"half the loss: gradients differ from dense ones by 5.0e-01"):
        time_steps(make_llama(), batches, (DENSE, wrong), rounds=1, tolerance=1e-4)


def test_what_a_handle_does_at_its_first_batch_only_is_not_timed(batches):
    handles = []

    class Slow(DENSE.attach):
        def __init__(self, model):
            super().__init__(model)
            handles.append(self)
            self.pause = 0.5

    def loss(handle, batch):
        time.sleep(handle.pause)
        handle.pause = 0.0
        return DENSE.loss(handle, batch)

    (timing,) = time_steps(make_llama(), batches, (Way("slow at first", Slow, loss),), rounds=1, tolerance=1e-4)
    assert len(handles) >= 2
    assert timing.step < 0.5
