"""The sizes of a decoder, as plain numbers, from which memory and time are computed before anything is loaded.

`model_shape` reads them from a model. How a block runs on active rows (`BlockKind`) does not follow
from the sizes; `sebp_edge.engine.memory.shape_reader` finds it. Imports no torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property


@dataclass(frozen=True)
class LinearShape:
    """A linear layer's sizes: its numbers of input and output features."""

    inputs: int
    outputs: int

    @property
    def size(self) -> int:
        return self.inputs * self.outputs

    @property
    def features(self) -> int:
        return self.inputs + self.outputs


def spread(number: int, total: int) -> list[int]:
    """Returns `number` of the numbers below `total`, spread evenly."""
    return [each for each in range(total) if (each + 1) * number // total > each * number // total]


@dataclass(frozen=True)
class BlockKind:
    """How a block of a decoder's class runs on active rows."""

    # Its linear layers, by their paths in the block.
    attention_in: tuple[str, ...]
    attention_out: str
    mlp_in: tuple[str, ...]
    mlp_out: str
    num_reads: int  # number of hidden states that are read by norms, or by linear layers without a norm before them
    num_norm_outputs: int  # number of norm outputs that linear layers read
    num_norms: int  # number of norms of hidden states
    has_fused_norms: bool  # whether all these norms run on our operation, on a GPU
    has_layer_norms: bool  # whether all these norms are torch's LayerNorms
    has_head_norms: bool  # whether queries and keys are normalised
    has_rotary: bool  # whether queries and keys are rotated
    has_fused_attention: bool  # whether its attention is replaced by ours (see `FusedAttention`)
    has_softcap: bool  # whether that attention caps its scores, which kernels for common beginnings do not
    has_fused_mlp: bool  # whether its MLP's gate runs on our operation


@dataclass(frozen=True)
class RuleShape:
    """The sizes of a block's linear attention, which runs on packed texts."""

    heads: int  # of values
    keys: int  # heads of keys
    key_size: int
    value_size: int


@dataclass(frozen=True)
class HeadsShape:
    """The sizes of a block's attention."""

    number: int  # heads of queries
    size: int  # of each


@dataclass(frozen=True)
class Kept:
    """What autograd keeps of a part of a decoder."""

    by_run: tuple[int, ...]  # bytes of each token: with an adapter in 2 and 4 bytes, then with all weights trained
    by_run_of_kernels: tuple[int, ...]  # the same where our kernels run
    has_state: bool = False  # whether it has layers whose state restarts at each text
    rule: RuleShape | None = None
    heads: HeadsShape | None = None


def max_decoded(*, has_states: bool) -> int:
    """Returns how many prompts are decoded together at most.

    One CPU thread computes 64 rows 13 times as fast as one by one, and 128 rows 17 times as fast. The states of a row
    take more than keys and values of many tokens: 19 MB in Qwen3.5-0.8B.
    """
    return 8 if has_states else 64


@dataclass(frozen=True)
class Block:
    """One of a decoder's blocks. All attributes but these and `parameters` need a known kind."""

    linears: dict[str, LinearShape]  # its linear layers, by their paths in the block
    kind: BlockKind | None = None  # how it runs on active rows; None if unknown
    kept: Kept | None = None  # what it keeps on active rows, if it is of no known kind; None if it does not run on them

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
    """The sizes of a decoder and of its blocks."""

    name: str
    parameters: int  # of the whole model, a tied head counted once
    # The head's sizes.
    vocabulary: int
    hidden: int
    head_size: int  # size of one attention head, the largest if blocks differ; 0 if there are none
    longest: int | None  # the longest sequence that the model takes, in tokens; None for no limit
    is_tied: bool  # whether head and embedding share their weight
    has_plain_embedding: bool  # whether the embedding only looks up rows
    # Of all linear layers except the head, each once: those that can be in 4 bits and get adapters.
    linear_parameters: int
    linear_features: int
    table_parameters: int  # of lookup tables, which stay in host memory if an adapter is trained on a GPU
    distinct_blocks: tuple[Block, ...] = ()  # its blocks without duplicates
    order: tuple[int, ...] = ()  # the place of each block among the distinct ones
    kept_outside: Kept | None = None  # what is kept outside of blocks, if they are of no known kind

    def with_blocks(self, blocks: Sequence[Block]) -> "DecoderShape":
        """Returns the same shape with these blocks."""
        distinct = [block for number, block in enumerate(blocks) if block not in blocks[:number]]
        return replace(self, distinct_blocks=tuple(distinct), order=tuple(map(distinct.index, blocks)))

    @cached_property
    def blocks(self) -> list[Block]:
        return [self.distinct_blocks[number] for number in self.order]

    @property
    def head_parameters(self) -> int:
        """Parameters of the head, [vocabulary, hidden]."""
        return self.vocabulary * self.hidden

    @cached_property
    def is_hoisted(self) -> bool:
        """Whether it is expected to run on active rows only; a trial before the training decides."""
        return all(block.kind is not None or block.kept is not None for block in self.distinct_blocks)

    @cached_property
    def has_states(self) -> bool:
        """Whether it has layers whose state restarts at each text."""
        return any(block.kept is not None and block.kept.has_state for block in self.distinct_blocks)

    def adapter_parameters(self, r: int) -> int:
        """Parameters of a LoRA adapter of rank `r` on every linear layer except the head."""
        return r * self.linear_features
