"""Makes memory run out in a step: a learner on a few uneven examples, operations that fail, the step's gradients."""

from contextlib import contextmanager

import torch
from builders import disturb, limit_rows, make_examples, make_step, refuse_hoisting
from torch.utils._python_dispatch import TorchDispatchMode

from sebp_edge import Recipe
from sebp_edge.engine.models.adaptation import attach, trainable
from sebp_edge.engine.sparse.rows.batches import Collator
from sebp_edge.engine.training.learner import Learner
from sebp_edge.engine.training.losses import RowLosses
from sebp_edge.engine.training.recovery import RecoveringLearner
from sebp_edge.engine.training.update import Update

RECIPE = Recipe(name="test", description="", r=4, learning_rate=5e-3, epochs=2, batch_tokens=10**6, context_length=64)
LENGTHS = [31, 2, 17, 40, 5, 23, 27, 30]
CPU = torch.device("cpu")


def uneven_examples(prompt=6):
    return make_examples(LENGTHS, prompt)


@contextmanager
def recovering_learner(base, examples, recipe=RECIPE, max_rows=4096, padded=False, limit=None, words=None, **options):
    """A learner on a new adaptation with non-zero weights; its events are in `learner.events`."""
    adaptation, events = attach(base, recipe, 0), []
    if recipe.method == "lora":
        disturb(adaptation, 0.05)
    if padded:
        refuse_hoisting(base.model)
    try:
        collator = Collator(64, base.pad_token_id)
        options |= {"guard": limit, "words": lambda: words}
        with RecoveringLearner(adaptation, recipe, examples, collator, events.append, **options) as learner:
            assert (learner.row_losses.hoisted is None) == padded
            limit_rows(learner, max_rows)
            learner.events = events
            yield learner
    finally:
        if padded:
            del base.model.model.layers[1].self_attn.forward
        adaptation.detach()


class Failing(TorchDispatchMode):
    """Raises an out-of-memory error in the operations with these numbers, counted from 1 across the context."""

    def __init__(self, *numbers, error=torch.OutOfMemoryError):
        super().__init__()
        self.numbers, self.error, self.count = numbers, error, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        if self.count in self.numbers:
            raise self.error("no more")
        return function(*args, **(kwargs or {}))


def accumulate_within(around, patch):
    """Makes learners run each micro-batch within the context manager that `around` returns for it."""
    accumulate = Learner.accumulate

    def watched(self, micro_batch, loss_tokens):
        with around(micro_batch):
            accumulate(self, micro_batch, loss_tokens)

    patch.setattr(Learner, "accumulate", watched)


def losses_within(around, patch):
    """Makes micro-batches, of these examples, compute their losses within the context manager of `around`."""
    compute = RowLosses.__call__

    def watched(losses, examples):
        with around(examples):
            return compute(losses, examples)

    patch.setattr(RowLosses, "__call__", watched)


def gradients(learner, examples, failing, monkeypatch):
    """Runs a step whose micro-batches run within `failing`; returns its loss, followed by its gradients."""
    found = []

    def keep(self):
        found.extend(parameter.grad.clone() for parameter in trainable(learner.adaptation))
        self.reset()
        return torch.zeros((), device=found[0].device)

    with monkeypatch.context() as patch:
        accumulate_within(lambda _: failing, patch)
        patch.setattr(Update, "finish", keep)
        loss = learner.step(make_step(learner, examples), 1e-3).loss
    return [loss, *found]


def equal(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


class PlainGraphs:
    """Replaces `GraphPool` on machines without a GPU; a replay calls the function itself. Records calls in `order`."""

    is_warming_up = False

    def __init__(self, device, on_event):
        self.order = []

    def warm_up(self, function):
        self.order.append("warm_up")
        self.is_warming_up = True
        try:
            function()
        finally:
            self.is_warming_up = False

    def capture(self, part, function):
        self.order.append(part)
        return function
