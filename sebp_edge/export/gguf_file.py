"""Writes and reads GGUF files, a tensor at a time.

Matrices are quantised; norms and biases stay in fp32. In files of 4 and 5 bits the head, which is the embedding in many
models, is Q8_0, and so is a matrix in fp16 whose rows are no multiple of 32.
"""

from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from sebp_edge.engine.models.gguf.quantised import quantisation_of_head
from sebp_edge.engine.models.gguf.writer import GgufModel
from sebp_edge.engine.models.lora import LoraFactors
from sebp_edge.errors import ExportError
from sebp_edge.export.export_result import ExportProgress
from sebp_edge.export.model_weights import MergedWeights, Read

# From the smallest to the largest, by bits a weight.
QUANTISATIONS = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "bf16", "f16")
BITS = {"q4_0": 4.5, "q4_1": 5, "q5_0": 5.5, "q5_1": 6, "q8_0": 8.5, "bf16": 16, "f16": 16}
_BLOCK = 32
# Number of rows of a matrix that are quantised at once.
_ROWS = 4096


def write_model(
    path: Path, name: str, model: GgufModel, tokenizer, weights: MergedWeights, quant: str, progress: ExportProgress
) -> None:
    """Writes a model; holds one tensor in memory at a time.

    Args:
        name: the model's name in the file.
        progress: is told of each tensor; may raise to stop.
    """
    kinds = {each: kind_of(each, shape, quant, weights.shapes) for each, shape in weights.shapes.items()}
    extra = list(model.extra_tensors())
    with closing(gguf.GGUFWriter(path, model.arch)) as writer:
        writer.add_type(gguf.GGUFType.MODEL)
        writer.add_name(name)
        writer.add_file_type(_FILE_TYPES[quant])
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        model.add_settings(writer)
        tokenizer.add(writer)
        for each, tensor in extra:
            _announce(writer, each, tensor.shape, GGMLQuantizationType.F32)
        for each, kind in kinds.items():
            shape = model.convert(each, torch.empty(weights.shapes[each], device="meta")).shape
            _announce(writer, model.name(each), shape, kind)
        _write_header(writer)
        for _, tensor in extra:
            writer.write_tensor_data(tensor.numpy())
        for number, (each, kind) in enumerate(kinds.items(), start=1):
            writer.write_tensor_data(quantised(model.convert(each, weights.read(each)), kind))
            progress.written(number, len(kinds))


def write_lora(path: Path, model: GgufModel, factors: LoraFactors, progress: ExportProgress) -> None:
    """Writes an adapter in fp32, as llama.cpp takes it with --lora."""
    with closing(gguf.GGUFWriter(path, model.arch)) as writer:
        writer.add_type(gguf.GGUFType.ADAPTER)
        writer.add_string("adapter.type", "lora")
        writer.add_float32("adapter.lora.alpha", float(factors.lora_alpha))
        for name, (lora_A, lora_B) in factors.matrices.items():
            for suffix, matrix in (("lora_a", lora_A), ("lora_b", lora_B)):
                _announce(writer, f"{model.name(name)}.{suffix}", matrix.shape, GGMLQuantizationType.F32)
        _write_header(writer)
        for number, (name, (lora_A, lora_B)) in enumerate(factors.matrices.items(), start=1):
            writer.write_tensor_data(lora_A.float().numpy())
            writer.write_tensor_data(model.convert(name, lora_B.float()).contiguous().numpy())
            progress.written(number, len(factors.matrices))


def kind_of(name: str, shape: torch.Size, quantisation: str, names: Iterable[str]) -> GGMLQuantizationType:
    """Returns the type of a tensor in a file of this quantisation."""
    if len(shape) != 2:
        return GGMLQuantizationType.F32
    head = "lm_head.weight" if "lm_head.weight" in names else "model.embed_tokens.weight"
    kind = quantisation_of_head(quantisation) if name == head else quantisation
    if kind.startswith("q") and shape[-1] % _BLOCK:
        kind = "f16"
    return GGMLQuantizationType[kind.upper()]


def quantised(tensor: Tensor, kind: GGMLQuantizationType) -> np.ndarray:
    """Returns a tensor's numbers, or its bytes in blocks, as llama.cpp's own quantiser rounds them."""
    # In parts: an embedding of a large vocabulary would take a gigabyte in fp32.
    return np.concatenate([_quantised(rows, kind) for rows in tensor.split(_ROWS)])


def _quantised(rows: Tensor, kind: GGMLQuantizationType) -> np.ndarray:
    if kind is GGMLQuantizationType.BF16:
        return rows.bfloat16().contiguous().view(torch.uint8).numpy()
    with np.errstate(over="ignore"):
        values = gguf.quantize(rows.float().contiguous().numpy(), kind)
    if kind is GGMLQuantizationType.F16 and not np.isfinite(values).all():
        raise ExportError("A weight is too large for f16; use --quant bf16.")
    return values


def dequantised(values: np.ndarray, kind: GGMLQuantizationType) -> Tensor:
    """Returns a tensor in fp32."""
    return torch.from_numpy(np.array(gguf.dequantize(values, kind), dtype=np.float32))


def open_exported(path: Path, model: GgufModel) -> Read:
    """Returns the reader of an exported file's tensors, in fp32 under transformers' names.

    It reads with the package gguf, which has the types of llama.cpp's K-quantisations that `models.gguf` lacks.
    """
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}

    def read(name: str) -> Tensor:
        tensor = tensors[model.name(name)]
        return model.restore(name, dequantised(tensor.data, tensor.tensor_type))

    return read


def read_lora(path: Path, model: GgufModel, names: Iterable[str]) -> LoraFactors:
    """Reads what `write_lora` has written, for the weights of these names."""
    reader = gguf.GGUFReader(path)
    tensors = {tensor.name: dequantised(tensor.data, tensor.tensor_type) for tensor in reader.tensors}
    matrices = {
        name: (tensors[f"{model.name(name)}.lora_a"], model.restore(name, tensors[f"{model.name(name)}.lora_b"]))
        for name in names
    }
    rank = len(next(iter(matrices.values()))[0])
    return LoraFactors(rank, reader.get_field("adapter.lora.alpha").contents(), matrices)


def _announce(writer: gguf.GGUFWriter, name: str, shape: torch.Size, kind: GGMLQuantizationType) -> None:
    if kind in (GGMLQuantizationType.F32, GGMLQuantizationType.F16):
        dtype = np.dtype(kind.name.lower().replace("f", "float"))
        writer.add_tensor_info(name, list(shape), dtype, int(np.prod(shape)) * dtype.itemsize)
    else:
        in_bytes = gguf.quant_shape_to_byte_shape(shape, kind)
        writer.add_tensor_info(name, list(in_bytes), np.dtype(np.uint8), int(np.prod(in_bytes)), raw_dtype=kind)


def _write_header(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()


# f32, which no export has, is for comparisons: llama.cpp rounds nothing there.
_FILE_TYPES = {name: gguf.LlamaFileType[f"MOSTLY_{name.upper()}"] for name in QUANTISATIONS}
_FILE_TYPES["f32"] = gguf.LlamaFileType.ALL_F32
