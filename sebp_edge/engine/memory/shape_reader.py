"""Reads a decoder's shape from its config alone: its sizes, and how its blocks run.

Sizes are read from the model on "meta", without weights. How its blocks run is observed on a small copy of its class
(`models.small_copy`): whether they run on active rows only, which layers read which hidden states, and where
our norms, MLPs and attention replace the model family's.
"""

from contextlib import suppress
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from sebp_edge.engine.memory.kept_bytes import measure_kept
from sebp_edge.engine.models.architecture import blocks_of, is_linear, is_norm
from sebp_edge.engine.models.known_models import recall_model, remember_model
from sebp_edge.engine.models.loading import local_tokenizer, model_from_config
from sebp_edge.engine.models.model_shape import shape_of
from sebp_edge.engine.models.shape import BlockKind, DecoderShape
from sebp_edge.engine.models.small_copy import copy_of_few_layers, small_copy
from sebp_edge.engine.sparse.copy_trial import copy_mismatch
from sebp_edge.engine.sparse.hoist import Hoisted
from sebp_edge.engine.sparse.patches.agreement import FAILURES
from sebp_edge.engine.sparse.patches.attention import FusedAttention
from sebp_edge.engine.sparse.patches.norms_and_mlps import SmallOps
from sebp_edge.engine.sparse.rows.active_tokens import ActiveTokens
from sebp_edge.engine.sparse.rows.row_plan import RowPlan
from sebp_edge.errors import SebpEdgeError
from sebp_edge.ops import Scores
from sebp_edge.values.model_reference import ModelReference

# Path prefix of an MLP that can run in chunks of rows (see `ChunkedMlps`).
MLP = "mlp."


def read_shape(reference: ModelReference) -> DecoderShape:
    """Reads the shape of a model that need not be on this machine; reads or downloads only its config.json."""
    model = model_from_config(reference)
    shape = shape_of(model, reference.name)
    blocks = blocks_of(model)
    kinds = _kinds_of(model) if blocks else []
    if not kinds or len(kinds) != len(blocks):
        return shape
    known = [kind if names == _names(block) else None for block, (names, kind) in zip(blocks, kinds, strict=True)]
    if None in known:
        return _measured(shape, model)
    pairs = zip(shape.blocks, known, strict=True)
    return shape.with_blocks([replace(block, kind=kind) for block, kind in pairs])


def _measured(shape: DecoderShape, model: nn.Module) -> DecoderShape:
    """Adds what the blocks of a decoder keep that runs on active rows; leaves it out if that cannot be measured."""
    try:
        few, layers = copy_of_few_layers(model.config, type(model))
        small = small_copy(model.config, type(model)).model
        of_blocks, outside = measure_kept(few, small)[1], measure_kept(model, small, without_blocks=True)[0]
    except FAILURES:
        return shape
    blocks = [replace(block, kept=of_blocks[layer]) for block, layer in zip(shape.blocks, layers, strict=True)]
    return replace(shape.with_blocks(blocks), kept_outside=outside)


def keep_shape(reference: ModelReference) -> None:
    """Keeps what processes without torch ask of a model, if it can be read and that can be written."""
    if recall_model(reference) is None:
        with suppress(OSError, SebpEdgeError):
            remember_model(reference, read_shape(reference), local_tokenizer(reference))


def _names(block: nn.Module) -> list[str]:
    return [name for name, _ in block.named_parameters()]


def _kinds_of(decoder: nn.Module) -> list[tuple[list[str], BlockKind | None]]:
    """Returns the parameter names and the kind of each block's counterpart in a small copy.

    The list is empty if no copy runs on active rows.
    """
    if copy_mismatch(decoder) is not None:
        return []
    try:
        model, layers = small_copy(decoder.config, type(decoder))
        own_modules = {module for module, _ in SmallOps(model).replacements()}
        input_ids_BT = torch.arange(2, 98).view(2, 48)
        tokens = ActiveTokens.gather(input_ids_BT, RowPlan.from_labels(input_ids_BT))
        with Hoisted(model) as hoisted:
            own_attention = FusedAttention(model).replacements()
            found = [(block, _CallRecorder(block)) for block in blocks_of(model)]
            with torch.no_grad():
                hoisted.row_losses(tokens)
    except FAILURES:
        # A class that does not support small sizes or a decoder's calls is counted by its linear layers.
        return []
    has_rotary = any("rotary" in name for name, _ in model.named_modules())
    kinds = [(_names(block), calls.kind(own_modules, own_attention, has_rotary)) for block, calls in found]
    return [kinds[layer] for layer in layers]


def _is_norm(module: nn.Module) -> bool:
    return is_norm(module) or type(module).__name__.endswith("Norm")


class _CallRecorder:
    """Records the calls of a block's norms and linear layers in order, with their inputs and outputs."""

    def __init__(self, block: nn.Module):
        self._block, self._modules = block, dict(block.named_modules())
        self._calls: list[tuple[str, Tensor, Tensor]] = []
        for path, module in self._modules.items():
            if is_linear(module) or _is_norm(module):
                module.register_forward_hook(partial(self._record, path))

    def _record(self, path: str, module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        self._calls.append((path, inputs[0], output))

    def kind(
        self, own_modules: set[nn.Module], own_attention: dict[nn.Module, Scores], has_rotary: bool
    ) -> BlockKind | None:
        """Returns the block's kind, or None if the calls are not those of attention followed by an MLP."""
        linears = [path for path, _, _ in self._calls if is_linear(self._modules[path])]
        mlp = [path for path in linears if path.startswith(MLP)]
        attention = [path for path in linears if not path.startswith(MLP)]
        if len(attention) < 2 or len(mlp) < 2 or len(set(linears)) < len(linears) or self._has_other_matrices():
            return None
        first_layers = {*attention[:-1], *mlp[:-1]}
        attention_prefix = attention[-1].rpartition(".")[0] + "."
        if not all(path.startswith(attention_prefix) for path in attention):
            return None
        all_norms = dict.fromkeys(path for path, _, _ in self._calls if _is_norm(self._modules[path]))
        norms = [path for path in all_norms if not path.startswith(attention_prefix)]
        outputs = {gave.data_ptr() for path, _, gave in self._calls if path in norms}
        read_by_norms = {read.data_ptr() for path, read, _ in self._calls if path in norms}
        read_by_linears = {read.data_ptr() for path, read, _ in self._calls if path in first_layers}
        norm_modules = [self._modules[path] for path in norms]
        scores = own_attention.get(self._modules.get(attention_prefix[:-1]))
        return BlockKind(
            attention_in=tuple(attention[:-1]),
            attention_out=attention[-1],
            mlp_in=tuple(mlp[:-1]),
            mlp_out=mlp[-1],
            num_reads=len(read_by_norms | (read_by_linears - outputs)),
            num_norm_outputs=len(read_by_linears & outputs),
            num_norms=len(norms),
            has_fused_norms=own_modules.issuperset(norm_modules),
            has_layer_norms=all(isinstance(norm, nn.LayerNorm) for norm in norm_modules),
            has_head_norms=len(norms) < len(all_norms),
            has_rotary=has_rotary,
            has_fused_attention=scores is not None,
            has_softcap=scores is not None and scores.softcap is not None,
            has_fused_mlp=self._modules.get(MLP[:-1]) in own_modules,
        )

    def _has_other_matrices(self) -> bool:
        """Whether the block has matrices outside the layers that were called."""
        called = {self._modules[path] for path, _, _ in self._calls}
        known = {parameter for module in called for parameter in module.parameters(recurse=False)}
        return any(parameter.dim() > 1 and parameter not in known for parameter in self._block.parameters())
