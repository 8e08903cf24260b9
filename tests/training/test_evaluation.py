"""Held-out losses are those of each token, added up by document, on boilerplate and on the rest."""

import dataclasses
import math
import random

import pytest
import torch
import torch.nn.functional as F
from builders import evaluated
from failing_memory import recovering_learner, uneven_examples

from sebp_edge.engine.models.adaptation import trainable
from sebp_edge.engine.training.evaluation import HeldOutLoss, evaluate

IGNORE = -100


def examples_with_boilerplate():
    """Two documents of three examples each, one that is all boilerplate, and one that has none."""
    order = random.Random(0)
    documents = [0, 0, 1, 0, 1, 2, 3, 1]
    examples = []
    for example, document in zip(uneven_examples(), documents, strict=True):
        length = len(example.labels)
        flags = {2: b"\1" * length, 3: b""}.get(document, bytes(order.choices([0, 1], k=length)))
        examples.append(dataclasses.replace(example, document=document, in_boilerplate=flags))
    return examples


def token_losses(model, example) -> list[tuple[float, bool]]:
    """Returns the loss of each loss token, and whether it is in boilerplate, computed one example at a time."""
    ids, labels = torch.tensor(example.input_ids), torch.tensor(example.labels)
    losses = F.cross_entropy(model(ids[None]).logits[0, :-1].float(), labels[1:], reduction="none", ignore_index=IGNORE)
    flags = example.in_boilerplate or bytes(len(labels))
    return [(losses[t - 1].item(), bool(flags[t])) for t in range(1, len(labels)) if example.labels[t] != IGNORE]


@pytest.mark.slow
@pytest.mark.usefixtures("plain_graphs")
@pytest.mark.parametrize("path", ["hoisted", "padded", "graphs"])
@pytest.mark.parametrize("max_rows", [64, 4096])
def test_losses_on_boilerplate_and_on_the_rest_are_those_of_their_tokens(base, path, max_rows):
    examples = examples_with_boilerplate()
    with torch.no_grad():
        losses = {number: token_losses(base.model, example) for number, example in enumerate(examples)}
    with recovering_learner(base, examples, max_rows=max_rows, padded=path == "padded") as learner:
        for parameter in trainable(learner.adaptation):  # so that the adapter changes nothing
            parameter.data.zero_()
        if path == "graphs":
            learner.plain.begin_graphs()
        found = evaluate(learner, evaluated(learner, examples))

    def expected(keep):
        nats, tokens = {}, {}
        for number, example in enumerate(examples):
            kept = [loss for loss, in_boilerplate in losses[number] if keep(in_boilerplate)]
            if kept:
                nats[example.document] = nats.get(example.document, 0.0) + sum(kept)
                tokens[example.document] = tokens.get(example.document, 0) + len(kept)
        return nats, tokens

    parts = {
        "all": (found, expected(lambda in_boilerplate: True)),
        "boilerplate": (found.boilerplate, expected(lambda in_boilerplate: in_boilerplate)),
        "rest": (found.rest, expected(lambda in_boilerplate: not in_boilerplate)),
    }
    for name, (part, (nats, tokens)) in parts.items():
        assert part.tokens == tokens, name
        assert part.nats == pytest.approx(nats, rel=1e-5), name
        assert part.mean == pytest.approx(sum(nats.values()) / sum(tokens.values()), rel=1e-5)
    assert sorted(found.rest.tokens) == [0, 1, 3]
    assert sorted(found.boilerplate.tokens) == [0, 1, 2]


def test_without_boilerplate_the_rest_is_all(base):
    examples = uneven_examples()
    with recovering_learner(base, examples) as learner:
        found = evaluate(learner, evaluated(learner, examples))
    assert found.rest == found
    assert found.boilerplate == HeldOutLoss()
    assert math.isnan(found.boilerplate.mean)


def test_merged_losses_keep_boilerplate_apart():
    one = HeldOutLoss({0: 30.0, 1: 8.0}, {0: 10, 1: 4}, {0: 5.0, 1: 8.0}, {0: 5, 1: 4})
    other = HeldOutLoss({2: 12.0}, {2: 4})
    merged = HeldOutLoss.merged([one, other])
    assert merged.mean == pytest.approx(50 / 18)
    assert merged.boilerplate == HeldOutLoss({0: 5.0, 1: 8.0}, {0: 5, 1: 4})
    assert merged.rest == HeldOutLoss({0: 25.0, 2: 12.0}, {0: 5, 2: 4})
