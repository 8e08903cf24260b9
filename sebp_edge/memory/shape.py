"""What a decoder is made of, from its config alone: what memory and time are counted from before anything is loaded.

Sizes are read off the model on "meta", which has no weights. How its blocks run is found on a small copy of its class
(`sebp_edge.models.small_copy`): whether they run on active rows only, which layers read which hidden states, and where
our own norms, MLPs and attention take a family's place.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from sebp_edge.errors import SparsityError
from sebp_edge.models.architecture import blocks_of, is_linear, is_norm, weight_MK
from sebp_edge.models.catalog import ModelReference
from sebp_edge.models.loading import model_of_shape
from sebp_edge.models.small_copy import small_copy
from sebp_edge.patches.attention import OwnAttention
from sebp_edge.patches.norms_and_mlps import SmallOps
from sebp_edge.texts.batches import Collator, pack
from sebp_edge.texts.examples import Example
from sebp_edge.training.losses import RowLosses

# Where a block's MLP is that can run in pieces (see `MlpPieces`).
MLP = "mlp."


class Linear(NamedTuple):
    """A linear layer's sizes: what it reads and what it gives for each token."""

    inputs: int
    outputs: int

    @property
    def size(self) -> int:
        return self.inputs * self.outputs


class Kind(NamedTuple):
    """How a block of a decoder's class runs on active rows. Layers are named by their paths in the block.

    Attributes:
        attention_in, attention_out, mlp_in, mlp_out: its linear layers.
        reads: how many hidden states are read by norms, or by linear layers without a norm before them.
        norm_outputs: how many of its norms' outputs linear layers read.
        norms: how many norms of hidden states it has.
        has_own_norms: whether all of them run on our operation, on a GPU.
        has_layer_norms: whether all of them are torch's LayerNorms.
        has_head_norms: whether queries and keys are normalised.
        has_rotary: whether queries and keys are turned.
        attends_in_place: whether its attention is replaced by ours (see `OwnAttention`).
        has_own_mlp: whether its MLP's gate runs on our operation.
    """

    attention_in: tuple[str, ...]
    attention_out: str
    mlp_in: tuple[str, ...]
    mlp_out: str
    reads: int
    norm_outputs: int
    norms: int
    has_own_norms: bool
    has_layer_norms: bool
    has_head_norms: bool
    has_rotary: bool
    attends_in_place: bool
    has_own_mlp: bool


@dataclass(frozen=True)
class Block:
    """One of a decoder's layers.

    Attributes:
        linears: its linear layers, by their paths in it.
        kind: how it runs on active rows; None if that is not known.
    """

    linears: dict[str, Linear]
    kind: Kind | None

    @property
    def parameters(self) -> int:
        """Of its linear layers."""
        return sum(linear.size for linear in self.linears.values())

    @property
    def queries(self) -> int:
        """Numbers of a token's queries."""
        return self.attention_out.inputs

    @property
    def keys(self) -> int:
        """Numbers of a token's keys, and of its values."""
        return (self._outputs(self.kind.attention_in) - self.queries) // 2

    @property
    def wide(self) -> int:
        """Numbers that the MLP's last layer reads of a token."""
        return self.mlp_out.inputs

    @property
    def gate_and_up(self) -> int:
        """Numbers that the MLP's first layers give for a token; without a gate, `wide`."""
        return self._outputs(self.kind.mlp_in)

    @property
    def attention_out(self) -> Linear:
        return self.linears[self.kind.attention_out]

    @property
    def mlp_out(self) -> Linear:
        return self.linears[self.kind.mlp_out]

    @property
    def mlp_in(self) -> list[Linear]:
        return [self.linears[path] for path in self.kind.mlp_in]

    def _outputs(self, paths: tuple[str, ...]) -> int:
        return sum(self.linears[path].outputs for path in paths)


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
    head_size: int
    longest: int | None
    is_tied: bool
    embeds_plainly: bool
    blocks: tuple[Block, ...]

    @property
    def head_parameters(self) -> int:
        return self.vocabulary * self.hidden

    @cached_property
    def kinds(self) -> list[Block]:
        """Its blocks, of those that are alike the first."""
        return [block for number, block in enumerate(self.blocks) if block not in self.blocks[:number]]

    @cached_property
    def is_hoisted(self) -> bool:
        """Whether it runs on active rows only; the trial before a training has the last word."""
        return all(block.kind is not None for block in self.kinds)

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
        head_size=getattr(config, "head_dim", None) or hidden // config.num_attention_heads,
        longest=getattr(model.config, "max_position_embeddings", None),
        is_tied=embedding.weight is head.weight,
        embeds_plainly=type(embedding) is nn.Embedding,
        blocks=tuple(_blocks(model)),
    )


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The blocks; where they are not found, of all lists of modules the one with the most parameters, or without any
    the whole base model."""
    lists = [module for module in model.base_model.modules() if isinstance(module, nn.ModuleList)]
    return blocks_of(model) or list(max(lists, key=_num_parameters, default=[model.base_model]))


def _num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _blocks(model: nn.Module) -> Iterator[Block]:
    kinds = _kinds_of(model.config) if blocks_of(model) else {}
    for number, part in enumerate(layers_of(model)):
        names, kind = kinds.get(number, (None, None))
        layers = {path: weight_MK(module).shape for path, module in part.named_modules() if is_linear(module)}
        linears = {path: Linear(inputs, outputs) for path, (outputs, inputs) in layers.items()}
        yield Block(linears, kind if names == _names(part) else None)


def _names(block: nn.Module) -> list[str]:
    return [name for name, _ in block.named_parameters()]


# --------------------------------------------------------------------------------------------------------- small copies


def _kinds_of(config) -> dict[int, tuple[list[str], Kind | None]]:
    """By layer, the parameters' names and the kind of its block in a small copy; empty where no copy runs on active
    rows."""
    examples = [Example(ids, ids, number) for number, ids in enumerate((list(range(2, 50)), list(range(5, 36))))]
    try:
        model, layers = small_copy(config)
        own = {module for module, _ in SmallOps(model).stand_ins()}
        with RowLosses(model, examples, Collator(64, 0), torch.device("cpu"), lambda event: None) as rows:
            if rows.hoisted is None:
                return {}
            own |= set(OwnAttention(model).stand_ins())
            found = [(block, _Calls(block)) for block in blocks_of(model)]
            with torch.no_grad():
                rows.hoisted.row_losses(pack(examples))
    except (SparsityError, TypeError, ValueError, RuntimeError, LookupError, AttributeError, ArithmeticError):
        # A class that takes no small sizes, or other calls than a decoder's, is counted by its linear layers.
        return {}
    has_rotary = any("rotary" in name for name, _ in model.named_modules())
    kinds = [(_names(block), calls.kind(own, has_rotary)) for block, calls in found]
    return {number: kinds[layer] for number, layer in enumerate(layers)}


def _is_norm(module: nn.Module) -> bool:
    return is_norm(module) or type(module).__name__.endswith("Norm")


class _Calls:
    """The norms and linear layers of a block in the order of their calls, with what they read and gave."""

    def __init__(self, block: nn.Module):
        self._block, self._modules = block, dict(block.named_modules())
        self._calls: list[tuple[str, Tensor, Tensor]] = []
        for path, module in self._modules.items():
            if is_linear(module) or _is_norm(module):
                module.register_forward_hook(partial(self._note, path))

    def _note(self, path: str, module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        self._calls.append((path, inputs[0], output))

    def kind(self, own: set[nn.Module], has_rotary: bool) -> Kind | None:
        """What the calls show, where `own` are the modules that have our operations; None if it is not understood."""
        linears = [path for path, _, _ in self._calls if is_linear(self._modules[path])]
        mlp = [path for path in linears if path.startswith(MLP)]
        attention = [path for path in linears if not path.startswith(MLP)]
        if len(attention) < 2 or len(mlp) < 2 or len(set(linears)) < len(linears) or self._has_others():
            return None
        first_layers = {*attention[:-1], *mlp[:-1]}
        within = attention[-1].rpartition(".")[0] + "."
        norms = [path for path in dict(self._of_norms()) if not path.startswith(within)]
        outputs = {gave.data_ptr() for path, _, gave in self._calls if path in norms}
        read_by_norms = {read.data_ptr() for path, read, _ in self._calls if path in norms}
        read_by_linears = {read.data_ptr() for path, read, _ in self._calls if path in first_layers}
        of_norms = [self._modules[path] for path in norms]
        return Kind(
            attention_in=tuple(attention[:-1]),
            attention_out=attention[-1],
            mlp_in=tuple(mlp[:-1]),
            mlp_out=mlp[-1],
            reads=len(read_by_norms | (read_by_linears - outputs)),
            norm_outputs=len(read_by_linears & outputs),
            norms=len(norms),
            has_own_norms=own.issuperset(of_norms),
            has_layer_norms=all(isinstance(norm, nn.LayerNorm) for norm in of_norms),
            has_head_norms=any(path.startswith(within) for path, _ in self._of_norms()),
            has_rotary=has_rotary,
            attends_in_place=self._modules.get(within[:-1]) in own,
            has_own_mlp=self._modules.get(MLP[:-1]) in own,
        )

    def _of_norms(self) -> Iterator[tuple[str, nn.Module]]:
        for path, _, _ in self._calls:
            if _is_norm(self._modules[path]):
                yield path, self._modules[path]

    def _has_others(self) -> bool:
        """Whether matrices are multiplied by that are no linear layer's, or layers were not called."""
        called = {self._modules[path] for path, _, _ in self._calls}
        known = {parameter for module in called for parameter in module.parameters(recurse=False)}
        return any(parameter.dim() > 1 and parameter not in known for parameter in self._block.parameters())
