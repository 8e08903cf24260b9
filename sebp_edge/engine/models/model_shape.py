"""Reads the sizes of a decoder from a model, which may be on "meta" without weights."""

from torch import nn
from transformers import PreTrainedModel

from sebp_edge.engine.models.architecture import (
    blocks_of,
    head_size_of,
    is_linear,
    lookup_tables,
    num_parameters,
    weight_MK,
)
from sebp_edge.engine.models.shape import Block, DecoderShape, LinearShape


def shape_of(model: PreTrainedModel, name: str) -> DecoderShape:
    """Reads the shape of a model; the kinds of its blocks stay unknown."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    vocabulary, hidden = weight_MK(head).shape
    linears = [_sizes(layer) for layer in model.modules() if _is_linear(layer) and layer is not head]
    shape = DecoderShape(
        name=name,
        parameters=num_parameters(model),
        vocabulary=vocabulary,
        hidden=hidden,
        head_size=head_size_of(model.config.get_text_config()),
        longest=getattr(model.config, "max_position_embeddings", None),
        is_tied=embedding.weight is head.weight,
        has_plain_embedding=type(embedding) is nn.Embedding,
        linear_parameters=sum(linear.size for linear in linears),
        linear_features=sum(linear.features for linear in linears),
        table_parameters=sum(table.numel() for table in lookup_tables(model)),
    )
    parts_of_blocks = (block.named_modules() for block in blocks_of(model, guess=True))
    linears_of_blocks = ({path: _sizes(part) for path, part in parts if _is_linear(part)} for parts in parts_of_blocks)
    return shape.with_blocks(list(map(Block, linears_of_blocks)))


def _is_linear(part: nn.Module) -> bool:
    # Subclasses of torch's Linear, such as Falcon's, can be in 4 bits and get adapters too.
    return is_linear(part) or isinstance(part, nn.Linear)


def _sizes(layer: nn.Module) -> LinearShape:
    outputs, inputs = weight_MK(layer).shape
    return LinearShape(inputs, outputs)
