"""Gives examples random teachers, and computes the naive loss: the cross-entropy with whole distributions."""

import random
from dataclasses import replace

import torch

from sebp_edge.engine.sparse.hoist import Hoisted
from sebp_edge.engine.sparse.rows.batches import Collator, pack
from sebp_edge.values.example import TeacherTokens

IGNORE = -100


def random_teacher(num_loss_tokens, k, vocabulary=320, seed=0):
    """Random tokens with random shares, those of the most probable ones between a third and nearly all."""
    draw = random.Random(seed)
    ids = [token for _ in range(num_loss_tokens) for token in draw.sample(range(vocabulary), k)]
    weights = torch.tensor([draw.expovariate(0.5) for _ in ids], dtype=torch.float64).view(-1, k)
    shares = (2 * weights).softmax(1).sort(1, descending=True).values
    return TeacherTokens(ids, shares.flatten().tolist(), k)


def taught(examples, ks, **options):
    """Gives each example a random teacher with k tokens, or none if k is 0."""
    return [
        replace(example, teacher=random_teacher(example.num_loss_tokens, k, seed=seed, **options) if k else None)
        for seed, (example, k) in enumerate(zip(examples, ks, strict=True))
    ]


def distributions(example, vocabulary):
    """What each loss token of an example should be predicted as: fp64 [C, V]."""
    labels = [label for label in example.labels[1:] if label != IGNORE]
    wanted = torch.zeros(len(labels), vocabulary, dtype=torch.float64)
    if example.teacher is None:
        wanted[range(len(labels)), labels] = 1
        return wanted
    ids = torch.tensor(example.teacher.ids).view(-1, example.teacher.k).long()
    return wanted.scatter_(1, ids, torch.tensor(example.teacher.shares).view_as(ids).double())


def dense_losses(model, examples):
    """The loss of each loss token, from all logits, one example at a time."""
    losses = []
    for example in examples:
        labels = torch.tensor(example.labels)[1:]
        logits = model(torch.tensor([list(example.input_ids)]), use_cache=False).logits[0, :-1][labels != IGNORE]
        losses.append(-(distributions(example, logits.shape[1]) * logits.double().log_softmax(1)).sum(1))
    return torch.cat(losses)


def losses_of(rows, examples):
    """The losses of a micro-batch's loss rows, from hoisted rows or from the drop-in."""
    if isinstance(rows, Hoisted):
        return rows.row_losses(pack(examples))
    batch = Collator(24, 2)(examples)
    return rows.row_losses(batch.input_ids, batch.plan)
