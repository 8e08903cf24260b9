"""Makes padded batches, and compares losses and gradients with those of a dense model."""

import torch
from builders import IGNORE, batch_losses, seeded
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForSequenceClassification

from sebp_edge import sparsify
from sebp_edge.engine.sparse.hoist import Hoisted

LENGTHS = (11, 1, 24, 6)


def padded_batch(lengths=LENGTHS, length=24, side="right", prompt=0):
    generator = torch.Generator().manual_seed(7)
    input_ids = torch.full((len(lengths), length), 2)
    mask = torch.zeros(len(lengths), length, dtype=torch.int64)
    for row, real in enumerate(lengths):
        begin = 0 if side == "right" else length - real
        input_ids[row, begin : begin + real] = torch.randint(7, 320, (real,), generator=generator)
        mask[row, begin : begin + real] = 1
    labels = input_ids.masked_fill(mask == 0, IGNORE)
    if prompt:
        labels[:, :prompt] = IGNORE
    return {"input_ids": input_ids, "attention_mask": mask, "labels": labels}


def encoder_batch(head, padding="right"):
    batch = padded_batch(lengths=(24, 24, 24, 24)) if padding == "none" else padded_batch(
        side="left" if padding == "left" else "right"
    )  # fmt: skip
    if head is AutoModelForSequenceClassification:
        batch["labels"] = torch.tensor([0, 2, 1, 1])
    else:
        batch["labels"] = (batch["input_ids"] % 3).masked_fill(batch["labels"] == IGNORE, IGNORE)
        batch["labels"][:, 2:4] = IGNORE
    if padding == "no mask":
        del batch["attention_mask"]
    return batch


def with_lora(model, modules="all-linear"):
    with seeded(0):
        lora = get_peft_model(model, LoraConfig(r=3, target_modules=modules, init_lora_weights=False))
    return lora.double()


def with_adapter(model):
    config = LoraConfig(r=3, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    with seeded(2):
        return get_peft_model(model, config).eval()


def loss_and_gradients(model, batch):
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), found


def dense_losses(model, batch):
    """Returns the losses of the loss rows, computed by transformers on the padded batch."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False).logits
    losses = torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), batch["labels"][:, 1:].flatten(), reduction="none"
    )
    return losses[batch["labels"][:, 1:].flatten() != -100]


def gradients(model, losses):
    model.zero_grad()
    (losses.sum() / len(losses)).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def all_gradients(model, checkpoints, prompt=0, lengths=LENGTHS, **options):
    batch = padded_batch(lengths, prompt=prompt)
    with Hoisted(model, checkpoints=checkpoints, **options) as rows:
        return gradients(model, batch_losses(rows, batch))


def assert_same(expected, found, tolerance):
    (dense_loss, dense), (sparse_loss, sparse) = expected, found
    assert abs(dense_loss - sparse_loss) <= tolerance * dense_loss
    assert_same_gradients(dense, sparse, tolerance, 1e-15)


def assert_same_gradients(expected, found, tolerance=1e-5, noise=1e-7):
    """Compares gradients by their norms.

    Args:
        noise: allowed besides, relative to the largest gradient: one that is zero in exact arithmetic, such as that of
            a key's bias, is noise far below the others.
    """
    assert expected.keys() == found.keys()
    largest = max(gradient.norm() for gradient in expected.values())
    assert largest > 0
    for name, gradient in expected.items():
        assert (gradient - found[name]).norm() <= tolerance * gradient.norm() + noise * largest, name


def assert_same_training(model, batch):
    """Compares losses and gradients with the dense ones, for the model's own loss and for the loss without logits.

    The loss without logits is computed in fp32, hence its tolerance. Each runs twice: the first pass detects its rows,
    the second uses the rows that the first has verified.
    """
    dense = loss_and_gradients(model, batch)
    for keep_logits, tolerance in ((True, 1e-10), (False, 1e-5)):
        with sparsify(model, keep_logits=keep_logits):
            for _ in range(2):
                assert_same(dense, loss_and_gradients(model, batch), tolerance)


def record_rows(sparsified):
    """Returns a list to which the rows of every later call of a layer are appended."""
    recorded, linear_rows = [], sparsified._linear_rows

    def recording(layers, x):
        rows = linear_rows(layers, x)
        if x.dim() and torch.is_grad_enabled():
            recorded.append(rows)
        return rows

    sparsified._linear_rows = recording
    return recorded


def record_inputs(module, seen):
    """Appends the shape of every later input of a module, without its last dimension, by wrapping its forward."""
    forward = module.forward

    def recording(x, *args, **kwargs):
        seen.append(x.shape[:-1])
        return forward(x, *args, **kwargs)

    module.forward = recording
