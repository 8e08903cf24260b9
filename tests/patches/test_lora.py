"""LoRA layers whose weights are joined with their adapters: in Triton's interpreter."""

import gc
import weakref

import pytest
import torch
from against_dense import padded_batch, with_adapter
from builders import make_llama
from four_bits import four_bit_llama, lora_layers
from torch.multiprocessing.reductions import StorageWeakRef

from sebp_edge import Recipe
from sebp_edge.engine.memory.shape_reader import read_shape
from sebp_edge.engine.models.catalog import resolve
from sebp_edge.engine.models.lora import plain_projection
from sebp_edge.engine.sparse.patches.counts import joined_bytes
from sebp_edge.engine.sparse.patches.fused_lora import FusedLora
from sebp_edge.engine.training.update import Update
from sebp_edge.ops import QuantisedWeight
from sebp_edge.ops.gpu.copies import CopyTable


def linear_layers(model):
    return {name: layer for name, layer in model.named_modules() if hasattr(layer, "lora_A")}


def copy_tables():
    gc.collect()
    return [weakref.ref(each) for each in gc.get_objects() if isinstance(each, CopyTable)]


@pytest.mark.slow
def test_detached_weights_have_their_own_memory_and_bits(kernels):
    model = with_adapter(make_llama())
    before = {name: layer.base_layer.weight.detach().clone() for name, layer in linear_layers(model).items()}
    with FusedLora(model, joined=True) as fused:
        fused.attach()
        assert not any(layer.base_layer.weight.is_contiguous() for layer in linear_layers(model).values())
        model(input_ids=torch.tensor([[5, 6, 7]]))
    for name, layer in linear_layers(model).items():
        weight = layer.base_layer.weight
        assert torch.equal(weight, before[name])
        assert weight.is_contiguous()
        assert weight.untyped_storage().nbytes() == weight.nbytes


@pytest.mark.slow
def test_tables_that_captured_graphs_read_stay_until_the_weights_are_detached(kernels):
    model = with_adapter(make_llama())
    assert not copy_tables()
    with FusedLora(model, joined=True) as fused:
        fused.attach()
        with fused.refreshed():
            tables = copy_tables()
        # An evaluation of the base model needs no copies.
        with model.disable_adapter(), fused.refreshed():
            pass
        gc.collect()
        assert [table() is not None for table in tables] == [True]
    gc.collect()
    assert tables[0]() is None


def test_adapters_that_moved_leave_no_memory_behind():
    model = with_adapter(make_llama())
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with FusedLora(model) as fused:
        fused.attach()
        with fused.refreshed():
            model(input_ids=torch.tensor([[5, 6, 7]]))
        before = [StorageWeakRef(parameter.untyped_storage()) for parameter in parameters]
        Update(parameters, Recipe.load("notes"))  # makes them views of one tensor
        with fused.refreshed():
            model(input_ids=torch.tensor([[5, 6, 7]]))
        assert all(storage.expired() for storage in before)


@pytest.mark.slow
def test_the_memory_beside_joined_weights_is_counted(kernels, tmp_path):
    model = make_llama(hidden_size=96, intermediate_size=160)
    model.config.save_pretrained(tmp_path)
    block, adapted = read_shape(resolve(tmp_path)).blocks[0], with_adapter(model)
    with FusedLora(adapted, joined=True) as fused:
        fused.attach()
        layers = linear_layers(adapted.base_model.model.model.layers[0]).values()
        storages = {layer.base_layer.weight.untyped_storage() for layer in layers}
        held = sum(storage.nbytes() for storage in {each.data_ptr(): each for each in storages}.values())
        weights = sum(layer.base_layer.weight.nbytes for layer in layers)
        # A lies beneath, with fillers of its ranks and rows: of 3 ranks to 4, and of 96 inputs to 128.
        beneath = held - weights - joined_bytes(block, rank=3, itemsize=4)
        adapters = sum(layer.lora_A["default"].weight.nbytes for layer in layers)
        assert adapters <= beneath <= 2 * adapters


@pytest.mark.slow
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("compress_statistics", [True, False])
def test_every_projection_is_plain_and_dequantises_to_its_packed_matrix(quant_type, compress_statistics):
    model = four_bit_llama(quant_type=quant_type, compress_statistics=compress_statistics)
    projections = [plain_projection(layer) for layer in lora_layers(model)]
    assert len(projections) == 14
    for projection, layer in zip(projections, lora_layers(model), strict=True):
        assert isinstance(projection.weight, QuantisedWeight)
        base = layer.base_layer
        assert projection.weight.dtype == torch.float32
        matrix = torch.empty(base.out_features, base.in_features)
        projection.weight.dequantise(matrix)
        # The layer's product with the identity gives the matrix.
        bias = 0 if base.bias is None else base.bias
        torch.testing.assert_close(matrix.T, base(torch.eye(base.in_features)) - bias, rtol=1e-4, atol=1e-5)


def test_a_layer_without_a_compute_dtype_is_plain_after_its_first_call():
    model = four_bit_llama(compute_dtype=None)
    assert not any(plain_projection(layer) for layer in lora_layers(model))
    model(**padded_batch())
    assert all(plain_projection(layer) for layer in lora_layers(model))
