"""The sizes of a decoder, as plain numbers, from which memory and time are computed before anything is loaded.

They are read from a model, which may be on "meta" without weights. How a block runs on active rows (`BlockKind`) does
not follow from the sizes; `sebp_edge.memory.shape_reader` finds it.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from sebp_edge.models.architecture import blocks_of, head_size_of, is_linear, num_parameters, weight_MK


class LinearShape(NamedTuple):
    """A linear layer's sizes: its numbers of input and output features."""

    inputs: int
    outputs: int

    @property
    def size(self) -> int:
        return self.inputs * self.outputs


class BlockKind(NamedTuple):
    """How a block of a decoder's class runs on active rows.

    Attributes:
        attention_in, attention_out, mlp_in, mlp_out: its linear layers, by their paths in the block.
        num_reads: number of hidden states that are read by norms, or by linear layers without a norm before them.
        num_norm_outputs: number of norm outputs that linear layers read.
        num_norms: number of norms of hidden states.
        has_fused_norms: whether all these norms run on our operation, on a GPU.
        has_layer_norms: whether all these norms are torch's LayerNorms.
        has_head_norms: whether queries and keys are normalised.
        has_rotary: whether queries and keys are rotated.
        has_fused_attention: whether its attention is replaced by ours (see `FusedAttention`).
        has_fused_mlp: whether its MLP's gate runs on our operation.
    """

    attention_in: tuple[str, ...]
    attention_out: str
    mlp_in: tuple[str, ...]
    mlp_out: str
    num_reads: int
    num_norm_outputs: int
    num_norms: int
    has_fused_norms: bool
    has_layer_norms: bool
    has_head_norms: bool
    has_rotary: bool
    has_fused_attention: bool
    has_fused_mlp: bool


@dataclass(frozen=True)
class Block:
    """One of a decoder's blocks. All attributes but `linears` and `parameters` need a known kind.

    Attributes:
        linears: its linear layers, by their paths in the block.
        kind: how it runs on active rows; None if unknown.
    """

    linears: dict[str, LinearShape]
    kind: BlockKind | None = None

    @cached_property
    def parameters(self) -> int:
        """Parameters of its linear layers."""
        return sum(linear.size for linear in self.linears.values())

    @cached_property
    def hidden(self) -> int:
        """Size of a token's hidden state."""
        return self.attention_out.outputs

    @cached_property
    def queries(self) -> int:
        """Size of a token's queries, all heads together."""
        return self.attention_out.inputs

    @cached_property
    def keys(self) -> int:
        """Size of a token's keys, all heads together; its values have the same size."""
        return (self._outputs(self.kind.attention_in) - self.queries) // 2

    @cached_property
    def intermediate(self) -> int:
        """Input size of the MLP's last layer."""
        return self.mlp_out.inputs

    @cached_property
    def gate_and_up(self) -> int:
        """Output size of the MLP's first layers together: 2 `intermediate` with a gate, else `intermediate`."""
        return self._outputs(self.kind.mlp_in)

    @cached_property
    def has_gate(self) -> bool:
        return self.gate_and_up > self.intermediate

    @cached_property
    def attention_out(self) -> LinearShape:
        return self.linears[self.kind.attention_out]

    @cached_property
    def mlp_out(self) -> LinearShape:
        return self.linears[self.kind.mlp_out]

    @cached_property
    def mlp_in(self) -> list[LinearShape]:
        return [self.linears[path] for path in self.kind.mlp_in]

    def _outputs(self, paths: tuple[str, ...]) -> int:
        return sum(self.linears[path].outputs for path in paths)


@dataclass(frozen=True)
class DecoderShape:
    """The sizes of a decoder and of its blocks.

    Attributes:
        parameters: of the whole model, a tied head counted once.
        vocabulary, hidden: the head's sizes.
        head_size: size of one attention head; 0 if there are none, or if it differs between blocks.
        longest: the longest sequence that the model takes, in tokens; None for no limit.
        is_tied: whether head and embedding share their weight.
        has_plain_embedding: whether the embedding only looks up rows.
        linears: all linear layers except the head, each once: those that can be in 4 bits and get adapters.
    """

    name: str
    parameters: int
    vocabulary: int
    hidden: int
    head_size: int
    longest: int | None
    is_tied: bool
    has_plain_embedding: bool
    linears: tuple[LinearShape, ...]
    blocks: tuple[Block, ...]

    @classmethod
    def of(cls, model: PreTrainedModel, name: str) -> "DecoderShape":
        """Reads the shape of a model; the kinds of its blocks stay unknown."""
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        vocabulary, hidden = weight_MK(head).shape
        return cls(
            name=name,
            parameters=num_parameters(model),
            vocabulary=vocabulary,
            hidden=hidden,
            head_size=_head_size(model.config.get_text_config()),
            longest=getattr(model.config, "max_position_embeddings", None),
            is_tied=embedding.weight is head.weight,
            has_plain_embedding=type(embedding) is nn.Embedding,
            linears=tuple(_sizes(layer) for layer in model.modules() if _is_linear(layer) and layer is not head),
            blocks=tuple(Block(_linears(block)) for block in blocks_of(model, guess=True)),
        )

    @property
    def head_parameters(self) -> int:
        """Parameters of the head, [vocabulary, hidden]."""
        return self.vocabulary * self.hidden

    @cached_property
    def distinct_blocks(self) -> list[Block]:
        """Its blocks without duplicates."""
        return [block for number, block in enumerate(self.blocks) if block not in self.blocks[:number]]

    @cached_property
    def is_hoisted(self) -> bool:
        """Whether it is expected to run on active rows only; a trial before the training decides."""
        return all(block.kind is not None for block in self.distinct_blocks)

    @cached_property
    def linear_parameters(self) -> int:
        """Parameters of all linear layers except the head."""
        return sum(linear.size for linear in self.linears)

    def adapter_parameters(self, r: int) -> int:
        """Parameters of a LoRA adapter of rank `r` on every linear layer except the head."""
        return r * self._linear_features

    @cached_property
    def _linear_features(self) -> int:
        return sum(map(sum, self.linears))


def _linears(block: nn.Module) -> dict[str, LinearShape]:
    return {path: _sizes(part) for path, part in block.named_modules() if _is_linear(part)}


def _is_linear(part: nn.Module) -> bool:
    # Subclasses of torch's Linear, such as Falcon's, can be in 4 bits and get adapters too.
    return is_linear(part) or isinstance(part, nn.Linear)


def _sizes(layer: nn.Module) -> LinearShape:
    outputs, inputs = weight_MK(layer).shape
    return LinearShape(inputs, outputs)


def _head_size(config: PretrainedConfig) -> int:
    try:
        return head_size_of(config)
    except (AttributeError, RuntimeError):  # without attention heads; transformers raises if layers differ
        return 0
