"""Level 2: runs a decoder on the active rows only, which are gathered before the embedding and never scattered back.

Scattering after one layer and gathering before the next cancel out, so the padded batch [B, T] becomes one row of A
tokens, [1, A]: every layer, the loss and the backward pass see no padding. Losses and gradients equal the padded ones
if the model works row by row except in its attention and in `restarts`; `hoist_if_exact` tries that.

Only transformers' own extension points are used: a registered attention function, and keywords of the model's call.
The attention function is the only state outside of the model; it is a pure function of its arguments.

Shapes: B sequences, T positions, A active rows, C loss rows, D hidden, H heads, G key/value heads, E head size.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from sebp_edge.basics.stopping import Check
from sebp_edge.engine.models.architecture import blocks_of, head_size_of, row_mixer
from sebp_edge.engine.models.lora import refuse_packed_weights, without_adapter
from sebp_edge.engine.sparse.patches.agreement import trial_batch
from sebp_edge.engine.sparse.patches.attention import FusedAttention
from sebp_edge.engine.sparse.patches.checkpoints import CheckpointedBlocks
from sebp_edge.engine.sparse.patches.counts import CHUNK_ROWS, MAX_DQ_BYTES
from sebp_edge.engine.sparse.patches.fused_lora import FusedLora
from sebp_edge.engine.sparse.patches.last_layer import LastLayer, Watch
from sebp_edge.engine.sparse.patches.loss import Head
from sebp_edge.engine.sparse.patches.mlp_chunks import ChunkedMlps
from sebp_edge.engine.sparse.patches.norms_and_mlps import SmallOps
from sebp_edge.engine.sparse.patches.packed_layers import PackedTexts, unknown_options
from sebp_edge.engine.sparse.patches.restarts import Restarts
from sebp_edge.engine.sparse.patches.state import FollowingPatch, ModelState
from sebp_edge.engine.sparse.patches.stops import Stops
from sebp_edge.engine.sparse.patches.tied_embedding import TiedEmbedding
from sebp_edge.engine.sparse.rows.active_tokens import ActiveTokens
from sebp_edge.engine.sparse.rows.row_plan import RowPlan
from sebp_edge.errors import SparsityError
from sebp_edge.ops import Prefixes, Scores, backend, gather_rows, sequence_attention_
from sebp_edge.ops.linear_cross_entropy import CHUNK_LOGITS

ATTENTION = "sebp_edge_rows"


class Hoisted(FollowingPatch):
    """Handle of one hoisted model: a context manager, or call `remove()` when done.

    If the model changes (its modules, hooks, settings; see `ModelState`), the next batch tries every part again.

    Args:
        model: a causal decoder of transformers, or a PEFT model around one.
        checkpoints: how many blocks, counted from the first, keep only their input for the backward pass.
        offload: whether these inputs are kept in host memory.
        chunked_blocks: whether MLPs run on one chunk of rows at a time, recomputed in the backward pass, and
            attention's backward pass takes a few heads at a time.
        dequantised_blocks: how many blocks, counted from the first, keep a dequantised copy of their 4-bit weights,
            so that no pass dequantises them.
        max_logits: the largest number of logits that exist at once; at least one row's.
        check: called at each linear layer, and each time as many logits were computed; may raise to end the pass.

    Raises:
        SparsityError: the model cannot run on active rows; or, at the first batch, its attention cannot.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        checkpoints: int = 0,
        offload: bool = False,
        chunked_blocks: bool = False,
        dequantised_blocks: int = 0,
        max_logits: int = CHUNK_LOGITS,
        check: Check | None = None,
    ):
        super().__init__()
        refuse_packed_weights(model)
        self.model = model
        self._decoder: PreTrainedModel = without_adapter(model)
        self._num_checkpoints, self._offload = checkpoints, offload
        self._chunked_blocks, self.num_dequantised = chunked_blocks, dequantised_blocks
        self._max_logits, self._check = max_logits, check
        self._attach()

    def _attach(self, verdicts: dict[str, bool] | None = None) -> None:
        """Replaces what passes its trial in the model as it is now.

        Args:
            verdicts: see `LastLayer`.
        """
        decoder, is_chunked = self._decoder, self._chunked_blocks
        self._restarts = Restarts(decoder)
        packed = {part for layer in self._restarts.layers for part in layer.modules()}
        parts = (part for block in blocks_of(decoder) or [decoder] for part in block.modules())
        if mixer := row_mixer(part for part in parts if part not in packed):
            raise SparsityError(f"Its {mixer} would mix neighbouring sequences.")
        self._head = Head(decoder, self._max_logits, self._check or (lambda: None))
        self._embedding = TiedEmbedding(decoder)
        self._last_layer = LastLayer(decoder, verdicts=verdicts)
        # transformers' own checkpoints recompute blocks after the batch that says where their texts begin.
        recomputes = any(getattr(part, "gradient_checkpointing", False) for part in decoder.modules())
        if recomputes and self._restarts.layers:
            raise SparsityError("Its state does not support gradient checkpointing; disable it and pass `checkpoints`.")
        dequantised, joined = blocks_of(decoder)[: self.num_dequantised], not (self._num_checkpoints or is_chunked)
        self._fused_lora = FusedLora(self.model, dequantised, joined=joined)
        self._chunked_mlps = ChunkedMlps(decoder, CHUNK_ROWS if is_chunked else None)
        self._small_ops = SmallOps(decoder)
        self._fused_attention = FusedAttention(decoder, MAX_DQ_BYTES if is_chunked else None)
        with self._attaching():
            self._set_attention(decoder, ATTENTION)
            # Before other patches replace parts of the blocks.
            if _fits_flash_attention(decoder):
                self._include(self._fused_attention)
            self._include(self._small_ops)
            self._include(self._fused_lora, ungrouped=self._last_layer.query, source_of=self._small_ops.source_of)
            # Around the projections' adapters, so that they read active rows.
            self._include(self._restarts)
            self._include(self._embedding)
            self._include(self._chunked_mlps, self._fused_lora.without_refresh)
            # Around the chunked MLPs, so that they split the rows that it selects.
            self._include(self._last_layer)
            checkpoints = CheckpointedBlocks(decoder, self._num_checkpoints, offload=self._offload)
            self._include(checkpoints, lambda: self._recomputing(self._restarts.texts))
            if self._check is not None:
                self._include(Stops(self.model, self._check))
        self.state = ModelState(self.model, decoder)

    def free_dequantised(self) -> None:
        """Frees the dequantised copies of weights, which graphs that were captured before must not read any more."""
        self.num_dequantised = 0
        self._fused_lora.free_dequantised()

    @property
    def attends_to_prefixes(self) -> bool:
        """Whether the model takes sequences that continue others on this device; states do not.

        On a CPU torch attends by sequence. A GPU's kernels do, in blocks that are all replaced and have no softcap.
        """
        if self._restarts.layers:
            return False
        if self._decoder.device.type == "cpu":
            return True
        states_AHE = _no_queries(self._decoder)
        without_softcap = [scores for scores in self._fused_attention.scores if scores.softcap is None]
        is_ours = len(without_softcap) == len(blocks_of(self._decoder))
        return is_ours and backend.runs_short_attention(states_AHE, states_AHE, states_AHE)

    def row_losses(self, tokens: ActiveTokens) -> Tensor:
        """The loss of every loss row, in nats: fp32 [C]; the batch's tokens are on the model's device."""
        self._follow_changes()
        hidden_CD = self._hidden_states(tokens, self._restricts(tokens))
        weight_VD = self._embedding.head_weight(self._head.weight)
        return self._head.losses(hidden_CD, tokens.targets, weight_VD, tokens.soft_targets)

    def row_logits(self, tokens: ActiveTokens) -> Iterator[Tensor]:
        """The logits of every loss row, a few rows at a time: fp32 [c, V]."""
        self._follow_changes()
        return self._head.logits(self._hidden_states(tokens, self._restricts(tokens)))

    def _restricts(self, tokens: ActiveTokens) -> bool:
        """Whether the last layer computes loss rows only."""
        fewer = len(tokens.loss_indices) < len(tokens.input_ids)
        return fewer and self._last_layer.is_exact(self._decoder, self._trial_hidden_states)

    @contextmanager
    def _recomputing(self, texts: PackedTexts | None) -> Iterator[None]:
        """Context in which a block is recomputed, only for what it keeps."""
        with self._fused_lora.without_refresh(), self._chunked_mlps.recomputing_block(), self._restarts.at(texts):
            yield

    def _hidden_states(self, tokens: ActiveTokens, restricted: bool, watch: Watch | None = None) -> Tensor:
        """The hidden states of the loss rows after the final norm, [C, D]."""
        recorded_scores: list[Scores] = []
        with (
            self._fused_lora.refreshed(),
            self._last_layer.restricted_to(tokens.loss_indices if restricted else None, watch),
            self._restarts.at(self._restarts.texts_of(tokens)),
        ):
            output = self._decoder.base_model(**tokens.inputs, use_cache=False, recorded_scores=recorded_scores)
        if not all(scores.causal for scores in recorded_scores):
            raise SparsityError("Its attention is not causal.")
        hidden_AD = output.last_hidden_state.squeeze(0)
        return gather_rows(hidden_AD, tokens.loss_indices)

    def _trial_hidden_states(self, watch: Watch | None) -> Tensor:
        input_ids, labels = trial_batch(self._decoder)
        plan = RowPlan.from_labels(labels).to(labels.device)
        return self._hidden_states(ActiveTokens.gather(input_ids, plan), True, watch)


def _fits_flash_attention(decoder: PreTrainedModel) -> bool:
    """Whether flash attention takes the model's heads; only then are our attention blocks faster."""
    return backend.runs_flash_attention(_no_queries(decoder))


def _no_queries(decoder: PreTrainedModel) -> Tensor:
    """Queries of no row, of which only the dtype, the device and the size of the heads count."""
    embedding_VD = decoder.get_input_embeddings().weight
    return embedding_VD.new_empty(0, 1, head_size_of(decoder.config.get_text_config()))


def rows_attention(
    module: nn.Module,
    query_1HAE: Tensor,
    key_1GAE: Tensor,
    value_1GAE: Tensor,
    attention_mask: None,
    *,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_k: int | None = None,
    recorded_scores: list[Scores] | None = None,
    recorded_heads: dict[nn.Module, tuple[int, int]] | None = None,
    prefixes: Prefixes | None = None,
    **others,
) -> tuple[Tensor, None]:
    """Computes attention within each of the concatenated sequences; has the signature that transformers calls.

    Args:
        module: the layer; its attribute `is_causal` is used if the argument is None.
        cu_seq_lens_q: int32 [B + 1], where each sequence begins.
        max_length_q: the length of the longest sequence, or an upper bound of it.
        recorded_scores: a list to which the options of the layer's scores are appended.
        recorded_heads: takes the number of the layer's heads, and their size.
        prefixes: the sequences that continue others; None if none does.

    Returns:
        [1, A, H, E], and None for the attention weights.
    """
    if cu_seq_lens_q is None:
        raise SparsityError(
            "Its attention is not told where each text begins: its blocks pass no keywords on, or it was called "
            "directly instead of through its handle."
        )
    unknown = unknown_options(others)
    if unknown or attention_mask is not None:
        raise SparsityError(f"Attention on hoisted rows does not support {', '.join(unknown) or 'an attention mask'}.")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    scores = Scores(scaling, sliding_window, softcap, causal, dropout)
    if recorded_scores is not None:
        recorded_scores.append(scores)
    if recorded_heads is not None:
        recorded_heads[module] = query_1HAE.shape[1], query_1HAE.shape[3]
    q_AHE, k_AGE, v_AGE = (states.squeeze(0).transpose(0, 1) for states in (query_1HAE, key_1GAE, value_1GAE))
    return sequence_attention_(q_AHE, k_AGE, v_AGE, cu_seq_lens_q, max_length_q, scores, prefixes=prefixes)[None], None


AttentionInterface.register(ATTENTION, rows_attention)
