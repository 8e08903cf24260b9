"""LoRA on a base model in 4 bits: PEFT's outputs and gradients, without its extra passes."""

import copy

import pytest
import torch
from against_dense import loss_and_gradients, padded_batch
from builders import batch_losses, hoist
from four_bits import four_bit_llama, lora_layers
from torch.utils._python_dispatch import TorchDispatchMode

from sebp_edge import sparsify
from sebp_edge.errors import SparsityError


def assert_close(found, expected, tolerance=2e-5):
    assert found.keys() == expected.keys()
    for name, truth in expected.items():
        assert truth.norm() > 0, name
        assert (found[name] - truth).norm() <= tolerance * truth.norm(), name


def test_weights_replaced_by_a_merge_are_used():
    model, batch = four_bit_llama(), padded_batch()
    with sparsify(model):
        loss_and_gradients(model, batch)
        with pytest.warns(UserWarning, match="4-bit"):
            model.merge_adapter()
            model.unmerge_adapter()
        found_loss, found = loss_and_gradients(model, batch)
    expected_loss, expected = loss_and_gradients(model, batch)
    torch.testing.assert_close(found_loss, expected_loss)
    assert_close(found, expected)


@pytest.mark.parametrize("prompt", [0, 5])
def test_the_drop_in_trains_like_peft(prompt):
    model, batch = four_bit_llama(), padded_batch(prompt=prompt)
    expected_loss, expected = loss_and_gradients(model, batch)
    with sparsify(model) as sparsified:
        assert [layer for layer in lora_layers(model) if "forward" in vars(layer)] == lora_layers(model)
        for _ in range(2):  # the first pass verifies the rows
            found_loss, found = loss_and_gradients(model, batch)
    assert sparsified.layers == {}
    torch.testing.assert_close(found_loss, expected_loss)
    assert_close(found, expected)


def test_hoisted_rows_train_like_peft():
    model, batch = four_bit_llama(), padded_batch()
    expected_loss, expected = loss_and_gradients(model, batch)
    model.zero_grad()
    with hoist(model) as hoisted:
        loss = batch_losses(hoisted, batch).mean()
        loss.backward()
    torch.testing.assert_close(loss.detach(), expected_loss)
    assert_close({name: p.grad for name, p in model.named_parameters() if p.grad is not None}, expected)


@pytest.mark.slow
def test_a_layer_that_computes_in_another_dtype_is_as_exact_as_pefts():
    model, batch = four_bit_llama(compute_dtype=torch.float32, dtype=torch.bfloat16), padded_batch()
    exact_loss, exact = loss_and_gradients(copy.deepcopy(model).float(), batch)
    dense_loss, dense = loss_and_gradients(model, batch)
    with sparsify(model):
        found_loss, found = loss_and_gradients(model, batch)
    assert abs(found_loss - exact_loss) <= 2 * abs(dense_loss - exact_loss) + 1e-4
    for name, gradient in exact.items():
        # How far bf16 rounds depends on the CPU: no further than twice as far as the dense model.
        rounding = (dense[name] - gradient).norm()
        assert 0 < rounding < 0.1 * gradient.norm(), name
        assert (found[name] - gradient).norm() <= 2 * rounding + 1e-4 * gradient.norm(), name


def test_weights_packed_for_inference_on_the_cpu_are_refused():
    model = four_bit_llama()
    attention = model.config._attn_implementation
    lora_layers(model)[9].base_layer.weight.quant_state.packing_format_for_cpu = True
    for level in (sparsify, hoist):
        with pytest.raises(SparsityError, match=r"packed this model's 4-bit weights .* keep it in training mode"):
            level(model)
    assert not any("forward" in vars(module) for module in model.modules())
    assert model.config._attn_implementation == attention


class Dequantisations(TorchDispatchMode):
    """Counts how often weights are dequantised while it is active."""

    number = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.number += "dequantize_4bit" in str(function)
        return function(*args, **(kwargs or {}))


def hoisted_gradients(model, hoisted, batch):
    model.zero_grad()
    with Dequantisations() as dequantisations:
        loss = batch_losses(hoisted, batch).mean()
        loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), gradients, dequantisations.number


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"checkpoints": 1}, {"chunked_blocks": True}], ids=str)
def test_blocks_that_hold_dequantised_weights_train_like_peft_and_dequantise_no_more(options):
    model, batch = four_bit_llama(), padded_batch()
    expected_loss, expected = loss_and_gradients(model, batch)
    results, numbers = [], []
    for dequantised_blocks in range(3):
        with hoist(model, dequantised_blocks=dequantised_blocks, **options) as hoisted:
            for _ in range(2):
                loss, found, number = hoisted_gradients(model, hoisted, batch)
                torch.testing.assert_close(loss, expected_loss)
                assert_close(found, expected)
                results.append((loss, found))
        numbers.append(number)
    assert numbers[0] > numbers[1] > numbers[2] == 0
    # The memory that is left changes no bit.
    for loss, found in results[1:]:
        assert torch.equal(loss, results[0][0])
        assert all(torch.equal(gradient, results[0][1][name]) for name, gradient in found.items())


@pytest.mark.slow
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_our_kernel_dequantises_nf4_in_training(quant_type, kernels):
    # Blocks of 64 end with rows: bitsandbytes 0.50 reads others wrongly on a CPU with AVX-512.
    sizes = {"hidden_size": 64, "intermediate_size": 128}
    model, batch = four_bit_llama(quant_type=quant_type, num_layers=1, sizes=sizes), padded_batch()
    expected_loss, expected = loss_and_gradients(model, batch)
    with hoist(model) as hoisted:
        loss, found, number = hoisted_gradients(model, hoisted, batch)
    torch.testing.assert_close(loss, expected_loss)
    assert_close(found, expected)
    assert (number == 0) == (quant_type == "nf4")


@pytest.mark.parametrize("change", ["merge", "in place"])
def test_dequantised_weights_follow_a_change(change):
    model, batch = four_bit_llama(), padded_batch()
    with hoist(model, dequantised_blocks=2) as hoisted:
        before, _, _ = hoisted_gradients(model, hoisted, batch)
        if change == "merge":
            with pytest.warns(UserWarning, match="4-bit"):
                model.merge_adapter()
                model.unmerge_adapter()
        else:
            with torch.no_grad():
                lora_layers(model)[4].base_layer.weight.bitwise_not_()
        loss, found, _ = hoisted_gradients(model, hoisted, batch)
    assert loss != before
    expected_loss, expected = loss_and_gradients(model, batch)
    torch.testing.assert_close(loss, expected_loss)
    assert_close(found, expected)


@pytest.mark.parametrize("options", [{}, {"checkpoints": 1}], ids=str)
def test_dequantised_weights_can_be_freed_without_a_change(options):
    model, batch = four_bit_llama(), padded_batch()
    with hoist(model, dequantised_blocks=2, **options) as hoisted:
        loss, expected, number = hoisted_gradients(model, hoisted, batch)
        assert number == 0
        hoisted.free_dequantised()
        assert hoisted.num_dequantised == 0
        found_loss, found, number = hoisted_gradients(model, hoisted, batch)
    assert number > 0
    assert torch.equal(found_loss, loss)
    assert all(torch.equal(gradient, expected[name]) for name, gradient in found.items())
