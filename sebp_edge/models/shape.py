"""A decoder's shape, from its config alone: what memory and time are counted from before anything is loaded."""

import functools
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from sebp_edge.models.architecture import is_linear, weight_MK
from sebp_edge.models.catalog import ModelReference
from sebp_edge.models.loading import model_of_shape

# The projections of a block that runs on active rows as one knows it: Llama's, Qwen's, Mistral's, Gemma's.
LLAMA_PROJECTIONS = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


class Linear(NamedTuple):
    """A linear layer's sizes: what it reads and what it gives for each token."""

    inputs: int
    outputs: int


@dataclass(frozen=True)
class Block:
    """One of a decoder's layers.

    Attributes:
        linears: its linear layers, by the last part of their names.
        norms: how many of its norms are as wide as the hidden states.
        has_head_norms: whether queries and keys are normalised too (Qwen3, Gemma 3).
    """

    linears: dict[str, Linear]
    norms: int
    has_head_norms: bool

    @property
    def parameters(self) -> int:
        """Of its linear layers."""
        return sum(linear.inputs * linear.outputs for linear in self.linears.values())

    @property
    def is_llamas(self) -> bool:
        """Whether it has Llama's projections, one of each and no others."""
        return self.linears.keys() == LLAMA_PROJECTIONS


@dataclass(frozen=True)
class DecoderShape:
    """What a decoder is made of.

    Attributes:
        parameters: of the whole model, a tied head counted once.
        head_parameters: of the head, [vocabulary, hidden].
        is_tied: whether the head is the embedding too.
        embeds_plainly: whether the embedding does nothing but look rows up.
        longest: the longest sequence that it knows, in tokens; None if it has no limit.
    """

    name: str
    parameters: int
    vocabulary: int
    hidden: int
    heads: int
    head_size: int
    longest: int | None
    is_tied: bool
    embeds_plainly: bool
    blocks: tuple[Block, ...]

    @property
    def head_parameters(self) -> int:
        return self.vocabulary * self.hidden

    @functools.cached_property
    def kinds(self) -> list[Block]:
        """Its blocks, of those that are alike the first."""
        return [block for number, block in enumerate(self.blocks) if block not in self.blocks[:number]]

    @functools.cached_property
    def is_llamas(self) -> bool:
        """Whether every block has Llama's projections."""
        return all(block.is_llamas for block in self.kinds)

    @property
    def linear_parameters(self) -> int:
        """Parameters of all linear layers but the head, which are what is loaded in 4 bits."""
        return sum(block.parameters for block in self.blocks)

    def adapter_parameters(self, r: int) -> int:
        """Parameters of a LoRA adapter of rank `r` on every linear layer but the head."""
        return r * sum(sum(linear) for block in self.blocks for linear in block.linears.values())


def read_shape(reference: ModelReference) -> DecoderShape:
    """The shape of a model that need not be on this machine: only its config.json is read, or downloaded.

    Raises:
        ModelError: it cannot be had, or is no decoder.
    """
    model = model_of_shape(reference)
    config, head = model.config.get_text_config(), model.get_output_embeddings()
    embedding, (vocabulary, hidden) = model.get_input_embeddings(), weight_MK(head).shape
    return DecoderShape(
        name=reference.name,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        vocabulary=vocabulary,
        hidden=hidden,
        heads=config.num_attention_heads,
        head_size=getattr(config, "head_dim", None) or hidden // config.num_attention_heads,
        longest=getattr(model.config, "max_position_embeddings", None),
        is_tied=embedding.weight is head.weight,
        embeds_plainly=type(embedding) is nn.Embedding,
        blocks=tuple(_block(part, hidden) for part in blocks_of(model)),
    )


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The blocks: of all lists of modules the one with the most parameters; without any, the whole base model."""
    lists = [module for module in model.base_model.modules() if isinstance(module, nn.ModuleList)]
    return list(max(lists, key=_num_parameters, default=[model.base_model]))


def _num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _block(part: nn.Module, hidden: int) -> Block:
    linears, norms, has_head_norms = {}, 0, False
    for path, module in part.named_modules():
        name, own = path.rpartition(".")[2], dict(module.named_parameters(recurse=False))
        if is_linear(module):
            # Of two layers of one name, each by its whole path.
            outputs, inputs = weight_MK(module).shape
            linears[path if name in linears else name] = Linear(inputs, outputs)
        elif "weight" in own and own["weight"].dim() == 1:
            norms += own["weight"].numel() == hidden
            has_head_norms |= name in ("q_norm", "k_norm")
    return Block(linears, norms, has_head_norms)
