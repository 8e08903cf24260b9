"""Active tokens: they equal the padded batch's, and filler changes nothing."""

import pytest
import torch
from against_dense import LENGTHS, assert_same_gradients, gradients, padded_batch, with_lora
from builders import IGNORE, gathered, hoist, make_llama
from model_families import MODELS, make_model
from pairwise import pairwise
from transformers import GPT2Config

from sebp_edge.errors import SparsityError
from sebp_edge.research import RowPlan

# How many tokens, sequences and loss rows there are, and how long the longest sequence is.
Bucket = type(gathered(padded_batch()).sizes)
# The batch itself has at most 38 active tokens in 4 sequences, the longest of 23, and as many loss rows.
BUCKETS = {
    "exact": None,
    "one token more": Bucket(39, 4, 23, 38),
    "on the grid": Bucket(38, 4, 23, 38).on_grid,
    "much larger": Bucket(257, 9, 40, 100),
    "loss everywhere": Bucket(64, 4, 23, 64),
}


def test_gathered_tokens_equal_the_padded_batchs():
    batch = padded_batch(prompt=5)
    tokens = gathered(batch)
    assert tokens.sizes == Bucket(tokens=38, sequences=4, longest=23, loss_rows=6 + 19 + 1)
    assert tokens.cu_seqlens.dtype == torch.int32
    assert tokens.cu_seqlens.tolist() == [0, 10, 10, 33, 38]
    lengths = [length - 1 for length in LENGTHS]
    assert tokens.position_ids.tolist() == [t for length in lengths for t in range(length)]
    own = [batch["input_ids"][row, :length] for row, length in enumerate(lengths)]
    assert torch.equal(tokens.input_ids, torch.cat(own))
    rows, positions = tokens.sequences, tokens.position_ids[tokens.loss_indices]
    assert torch.equal(batch["labels"][rows, positions + 1], tokens.targets)
    assert torch.equal(tokens.cu_seqlens[rows] + positions, tokens.loss_indices)
    assert torch.equal(tokens.weights, torch.ones(26))


@pytest.mark.parametrize("prompt", [0, 5])
@pytest.mark.parametrize("bucket", BUCKETS)
def test_filler_is_in_separate_sequences(bucket, prompt):
    tokens = gathered(padded_batch(prompt=prompt))
    bucket = BUCKETS[bucket] or tokens.sizes
    filled = tokens.filled(bucket)
    num_tokens, num_sequences, _, num_losses = tokens.sizes
    assert len(filled.input_ids) == len(filled.position_ids) == bucket.tokens
    assert len(filled.loss_indices) == bucket.loss_rows
    assert filled.max_len == bucket.longest
    lengths = filled.cu_seqlens.diff()
    assert filled.cu_seqlens.dtype == torch.int32
    assert len(lengths) == bucket.slots
    assert torch.equal(lengths[:num_sequences], tokens.cu_seqlens.diff())
    assert lengths.sum() == bucket.tokens
    assert 0 <= lengths.min() <= lengths.max() <= bucket.longest
    assert torch.equal(filled.input_ids[:num_tokens], tokens.input_ids)
    assert torch.equal(filled.position_ids[:num_tokens], tokens.position_ids)
    assert not filled.input_ids[num_tokens:].any()
    # A row gathered twice would get one of its two gradients.
    assert len(filled.loss_indices.unique()) == bucket.loss_rows
    real = filled.weights == 1
    assert real.sum() == num_losses
    assert not filled.weights[~real].any()
    for name in ("loss_indices", "targets", "sequences"):
        assert torch.equal(getattr(filled, name)[real], getattr(tokens, name)), name
        assert getattr(filled, name).dtype == torch.int64


@pairwise(
    family=MODELS.keys(),
    adapt=["full", "lora"],
    prompt=[5, 0],
    bucket=["on the grid", "much larger", "loss everywhere"],
)
def test_filler_changes_neither_losses_nor_gradients(family, adapt, bucket, prompt):
    model = MODELS[family]()
    if adapt == "lora":
        model = with_lora(model).float()
    tokens = gathered(padded_batch(prompt=prompt))
    filled = tokens.filled(BUCKETS[bucket])
    with hoist(model) as hoisted:
        expected = hoisted.row_losses(tokens)
        expected_gradients = gradients(model, expected)
        found = hoisted.row_losses(filled)
        model.zero_grad()
        ((found * filled.weights).sum() / len(expected)).backward()
    torch.testing.assert_close(found[filled.weights == 1], expected, rtol=1e-5, atol=1e-6)
    found_gradients = {name: model.get_parameter(name).grad for name in expected_gradients}
    assert_same_gradients(expected_gradients, found_gradients, noise=1e-6)


@pytest.mark.parametrize("family", MODELS)
def test_an_example_depends_neither_on_its_neighbour_nor_on_filler(family):
    model, batch = MODELS[family](), padded_batch(lengths=(9, 12, 7))
    tokens = gathered(batch)
    batch["input_ids"][1, :12] = torch.arange(100, 112)
    changed, bucket = gathered(batch), Bucket(50, 4, 16, 40)
    with torch.no_grad(), hoist(model) as hoisted:
        before, after = hoisted.row_losses(tokens.filled(bucket)), hoisted.row_losses(changed.filled(bucket))
    filled = tokens.filled(bucket)
    secret = (filled.sequences == 1) & (filled.weights == 1)
    assert torch.equal(before[~secret], after[~secret])
    assert not torch.equal(before[secret], after[secret])


def test_filler_needs_no_position_beyond_the_models():
    config = GPT2Config(vocab_size=320, n_embd=32, n_layer=2, n_head=4, n_positions=24, bos_token_id=0, eos_token_id=1)
    model = make_model(config).eval()
    tokens = gathered(padded_batch())
    filled = tokens.filled(Bucket(128, 4, 64, 128))
    with torch.no_grad(), hoist(model) as hoisted:
        expected, found = hoisted.row_losses(tokens), hoisted.row_losses(filled)
    torch.testing.assert_close(found[filled.weights == 1], expected, rtol=1e-5, atol=1e-6)


def test_a_sequence_without_a_loss_has_a_slot_and_no_token():
    batch = padded_batch()
    batch["labels"][2] = IGNORE
    tokens = gathered(batch)
    assert tokens.cu_seqlens.diff().tolist() == [10, 0, 0, 5]
    filled = tokens.filled(tokens.sizes.on_grid)
    assert filled.cu_seqlens.diff().tolist()[:5] == [10, 0, 0, 5, 1]
    with torch.no_grad(), hoist(make_llama()) as hoisted:
        losses = hoisted.row_losses(filled)
    assert losses.isfinite().all()
    assert set(filled.sequences[filled.weights == 1].tolist()) == {0, 3}


def test_padding_before_real_tokens_is_refused():
    mask = torch.tensor([[1, 1, 0], [0, 1, 1]])
    with pytest.raises(SparsityError, match="pad on the right"):
        RowPlan.from_labels(torch.ones(2, 3, dtype=torch.int64), mask)


@pytest.mark.parametrize("size", range(4))
def test_a_batch_that_does_not_fit_is_refused(size):
    tokens = gathered(padded_batch())
    sizes = list(tokens.sizes)
    sizes[size] -= 1
    with pytest.raises(SparsityError, match="38 tokens, 4 sequences, 23 longest, 38 loss rows does not fit into"):
        tokens.filled(Bucket(*sizes))


def test_a_bucket_with_more_loss_rows_than_tokens_is_refused():
    with pytest.raises(SparsityError, match="does not fit"):
        gathered(padded_batch()).filled(Bucket(64, 4, 23, 65))
