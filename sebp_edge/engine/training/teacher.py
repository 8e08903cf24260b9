"""Gives examples a teacher: what a model, as it is now, finds probable at each of their loss tokens.

Trained on these examples, a model learns to predict as its teacher does.
Shapes: C loss rows, V vocabulary, K tokens of each.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from sebp_edge.basics.stopping import Check
from sebp_edge.engine.memory.memory_options import FASTEST, MemoryOptions
from sebp_edge.engine.sparse.rows.batches import Collator
from sebp_edge.engine.training.losses import RowLosses
from sebp_edge.engine.training.scoring import in_micro_batches
from sebp_edge.errors import OptionError
from sebp_edge.events import Sink, silent
from sebp_edge.values.example import Example, Outline, TeacherTokens, outlines

# The most probable tokens that a teacher gives at each loss token.
K = 20
# Tokens that are drawn from all others.
NUM_DRAWN = 12


@torch.no_grad()
def with_teacher(
    model: nn.Module,
    examples: Sequence[Example],
    collator: Collator,
    device: torch.device,
    on_event: Sink,
    check: Check = lambda: None,
    *,
    k: int = K,
    options: MemoryOptions = FASTEST,
) -> list[Example]:
    """Returns the examples with `model`, a decoder in evaluation mode, as their teacher; restores the model.

    Disable the adapter of a model that is its own teacher. `k` of the most probable tokens are kept at each loss token.
    """
    if k < 1:
        raise OptionError(f"A teacher got k={k}; expected 1 token or more at each loss token.")
    # Each example once, without a teacher of its own; one without loss tokens teaches nothing.
    read = {id(example): replace(example, teacher=None) for example in examples if example.num_loss_tokens}
    if not read:
        return list(examples)
    alone, taught = list(read.values()), {}
    # The training tells the user if the model runs on padded batches.
    with RowLosses(model, alone, collator, device, silent, options, check) as row_losses:

        def teach(micro_batch: list[Outline]) -> list[TeacherTokens]:
            chunks = map(partial(tokens_and_shares, k=k), row_losses.row_logits(micro_batch))
            return _split(*(torch.cat(parts).cpu() for parts in zip(*chunks, strict=True)), micro_batch)

        for micro_batch, targets in in_micro_batches(teach, outlines(alone), row_losses.limit, device, on_event):
            taught |= {example.number: own for example, own in zip(micro_batch, targets, strict=True)}
            check()
    targets = {key: taught[number] for number, key in enumerate(read)}
    return [replace(example, teacher=targets.get(id(example))) for example in examples]


def _split(ids_CK: Tensor, shares_CK: Tensor, examples: list[Outline]) -> list[TeacherTokens]:
    """Splits the tokens of a micro-batch's loss rows, which are in the order of the examples."""
    counts = [example.num_loss_tokens for example in examples]
    return [
        TeacherTokens(ids.flatten().tolist(), shares.flatten().tolist(), ids.shape[1])
        for ids, shares in zip(ids_CK.split(counts), shares_CK.split(counts), strict=True)
    ]


def tokens_and_shares(logits_CV: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Returns a few tokens that stand for each row's probabilities, int64 [C, K], and their shares, fp32 [C, K].

    These are the k most probable tokens, the most probable first, with their probabilities; and tokens drawn from all
    others, which share the rest. So the expected loss is that with the whole distribution. Without the drawn ones, a
    student would learn that the others never occur, and its loss on other texts would rise (Anshumann et al. 2025).
    All tokens are returned, and none is drawn, if there are no more than k.
    """
    probabilities_CV = logits_CV.float().softmax(dim=1)
    shares_CK, ids_CK = probabilities_CV.topk(min(k, logits_CV.shape[1]), dim=1)
    if k >= logits_CV.shape[1]:
        return ids_CK, shares_CK
    rest_CV = probabilities_CV.scatter(1, ids_CK, 0.0)
    rest_C1 = rest_CV.sum(dim=1, keepdim=True)
    # A row without a rest needs some token to draw; its share is 0.
    generator = torch.Generator(logits_CV.device).manual_seed(0)
    drawn_CN = torch.multinomial(rest_CV + (rest_C1 == 0), NUM_DRAWN, replacement=True, generator=generator)
    shares = torch.cat([shares_CK, (rest_C1 / NUM_DRAWN).expand(-1, NUM_DRAWN)], dim=1)
    return torch.cat([ids_CK, drawn_CN], dim=1), shares / shares.sum(dim=1, keepdim=True)
