"""Answers many prompts at once, with the likeliest token each time.

Prompts that begin with the same tokens, such as the questions about one note, compute these once. All rows of a batch
then take one step together for each token, from keys and values in one `RowCache`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sebp_edge.errors import CannotCapture, TextsError
from sebp_edge.events import Notice, Sink, silent
from sebp_edge.models.captured_step import CapturedSteps
from sebp_edge.models.generation import NonFiniteLogits, end_ids_of
from sebp_edge.models.greedy import decode_alone
from sebp_edge.models.loading import pad_token_id_of, refuse_unknown_tokens
from sebp_edge.models.lora import without_adapter
from sebp_edge.models.prefix_groups import PrefixBatch, group_by_prefix, make_batches
from sebp_edge.models.row_cache import RowCache, bytes_per_token, masks, why_not_rows

# The most prompts that are decoded together. One CPU thread computes 64 rows 13 times as fast as one by one, and 128
# rows 17 times as fast.
MAX_ROWS = 64
# The most bytes of keys and values, unless a single prompt needs more.
MAX_CACHE_BYTES = 2**29
# The most tokens of one pass through the model before the first new token, filled up or not.
FILL_TOKENS = 4096
# Rows with more tokens than this after their prefix are computed by themselves, so that no others are filled up.
MAX_FILLED_UP = 64


@dataclass
class _Reply:
    """A prompt with its new tokens.

    Attributes:
        left: how many new tokens may follow; 0 once the row has ended.
    """

    prompt: list[int]
    left: int
    new: list[int] = field(default_factory=list)

    @property
    def last(self) -> int:
        return self.new[-1] if self.new else self.prompt[-1]

    @property
    def position(self) -> int:
        """The position of the last token."""
        return len(self.prompt) + len(self.new) - 1

    def add(self, token: int, ends: set[int]) -> None:
        if token in ends:
            self.left = 0
        else:
            self.new.append(token)
            self.left -= 1


class Answerer:
    """Decodes prompts together, with the results of decoding each one alone.

    Rows that have ended leave their batch as soon as they are half of it. On a GPU, steps are captured as CUDA graphs
    in each call, unless the model cannot be captured, which a Notice says.

    Where rows of different lengths cannot share a batch exactly, prompts are decoded one by one instead, with
    transformers' `generate`: in models with a recurrent state, chunked attention or caches of other things than keys
    and values, and if positions are read from masks, a rotary embedding depends on the batch's longest row, or an
    attention implementation takes no masks. `one_by_one` says so.

    Args:
        model: a decoder, wrapped by PEFT or not.
        end_ids: tokens that end a text, besides those of the model's generation config.
        pad_token_id: any token of the model.
        max_rows: the most prompts that are decoded together.
        max_cache_bytes: the most bytes of their keys and values, by the config; one prompt may need more.
        check: is called after each pass through the model, which gives at most one token per prompt; may raise.

    Attributes:
        one_by_one: why the prompts are decoded one by one; None if they are decoded together.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        end_ids: list[int],
        pad_token_id: int = 0,
        *,
        max_rows: int = MAX_ROWS,
        max_cache_bytes: int = MAX_CACHE_BYTES,
        check: Callable[[], None] = lambda: None,
        on_event: Sink = silent,
    ):
        model = without_adapter(model)  # whose layers keep the adapter
        self._model, self._pad_token_id = model, pad_token_id
        self._ends = {*end_ids, *end_ids_of(model)}
        self._max_rows, self._max_cache_bytes = max_rows, max_cache_bytes
        self._check, self._on_event = check, on_event
        self.one_by_one = why_not_rows(model)
        self._cache: RowCache | None = None
        self._captured: CapturedSteps | None = None
        self._captures = model.device.type == "cuda"

    @torch.no_grad()
    def answer(self, prompts: list[list[int]], max_new_tokens: int) -> list[list[int]]:
        """Returns the new tokens of each prompt, without the one that ended it.

        Raises:
            TextsError: a prompt is empty, or leaves no room in the model's context.
            ModelError: a prompt has tokens unknown to the model.
            NonFiniteLogits: the model, with its current adapter, computes NaN or infinite logits.
        """
        limit = getattr(self._model.config, "max_position_embeddings", None)
        for prompt in prompts:
            if not prompt or (limit is not None and len(prompt) >= limit):
                room = "at least 1" if limit is None else f"1 to {limit - 1}"
                raise TextsError(f"A prompt has {len(prompt)} tokens; expected {room} for this model.")
            refuse_unknown_tokens(self._model, prompt)
        rows = [
            _Reply(prompt, max_new_tokens if limit is None else min(max_new_tokens, limit - len(prompt)))
            for prompt in prompts
        ]
        if self.one_by_one is not None:
            for row in rows:
                new = decode_alone(self._model, row.prompt, self._ends, row.left, self._pad_token_id, self._check)
                row.new = [token for token in new if token not in self._ends]
        elif rows:
            try:
                for batch in self._batches(rows):
                    self._decode(batch, [rows[number] for number in batch.numbers])
            finally:
                self._cache = self._captured = None
        return [row.new for row in rows]

    def _batches(self, rows: list[_Reply]) -> list[PrefixBatch]:
        columns = [len(row.prompt) + row.left for row in rows]
        max_cells = self._max_cache_bytes // bytes_per_token(self._model)
        largest_group = max(1, min(self._max_rows, max_cells // max(columns)))
        groups = group_by_prefix([row.prompt for row in rows], largest_group)
        return make_batches(groups, columns, self._max_rows, max_cells)

    def _decode(self, batch: PrefixBatch, rows: list[_Reply]) -> None:
        self._take_cache(len(rows), batch.columns)
        self._fill_prompts(batch, rows)
        while rows:
            tokens = self._step(rows)
            self._check()
            for row, token in zip(rows, tokens, strict=True):
                if row.left and token < 0:
                    raise NonFiniteLogits
                if row.left:
                    row.add(token, self._ends)
            kept = [at for at, row in enumerate(rows) if row.left]
            if 2 * len(kept) <= len(rows):
                rows = [rows[at] for at in kept]
                self._cache.keep(kept)

    def _take_cache(self, rows: int, columns: int) -> None:
        """Allocates the cache, unless the last one serves; captured graphs live with it."""
        cache = self._cache
        if cache is None or cache.columns < columns or cache.rows < rows or cache.columns > 2 * columns:
            self._cache = self._captured = cache = None
            self._cache = RowCache(rows, columns)
            if self._captures:
                self._captured = CapturedSteps(self._model.device, self._cache, self._next_tokens)

    def _fill_prompts(self, batch: PrefixBatch, rows: list[_Reply]) -> None:
        """Computes keys and values of all prompts, except those of their last tokens."""
        begin, rest = 0, []
        for group in batch.groups:
            end = begin + len(group.numbers)
            if group.prefix:
                self._fill(begin, [rows[begin].prompt[: group.prefix]], [0])
                self._cache.share(begin, slice(begin + 1, end), group.prefix)
            rest += [(row.prompt[group.prefix : -1], group.prefix) for row in rows[begin:end]]
            begin = end
        for at, (tokens, start) in enumerate(rest):
            if len(tokens) > MAX_FILLED_UP:
                self._fill(at, [tokens], [start])
        short = [([] if len(tokens) > MAX_FILLED_UP else tokens, start) for tokens, start in rest]
        if any(tokens for tokens, start in short):
            self._fill(0, [tokens for tokens, start in short], [start for tokens, start in short])

    def _fill(self, first: int, tokens: list[list[int]], starts: list[int]) -> None:
        """Computes keys and values of rows' next tokens, in one or more passes.

        Args:
            first: the first of the rows.
            starts: the position of each row's first token.
        """
        size = max(1, FILL_TOKENS // len(tokens))
        for begin in range(0, max(map(len, tokens)), size):
            parts = [row[begin : begin + size] for row in tokens]
            longest = max(map(len, parts))
            ids = torch.full((len(parts), longest), self._pad_token_id)
            positions, columns = torch.zeros_like(ids), torch.full_like(ids, self._cache.columns)
            for at, (part, start) in enumerate(zip(parts, starts, strict=True)):
                ids[at, : len(part)] = torch.tensor(part)
                positions[at, : len(part)] = columns[at, : len(part)] = torch.arange(len(part)) + start + begin
            width = int(positions.max()) + 1
            rows = slice(first, first + len(parts))
            self._forward(rows, *(each.to(self._model.device) for each in (ids, positions, columns)), width)
            self._check()

    def _step(self, rows: list[_Reply]) -> list[int]:
        """Returns the likeliest token after each row's last one, -1 where logits are not finite."""
        last, positions = [row.last for row in rows], [row.position for row in rows]
        if self._captured is not None:
            try:
                return self._captured(last, positions)
            except CannotCapture as error:
                self._captured, self._captures = None, False
                self._on_event(Notice(f"Prompts are answered without CUDA graphs, which is slower: {error.reason}"))
        ids, at = (torch.tensor(each, device=self._model.device)[:, None] for each in (last, positions))
        return self._next_tokens(ids, at, max(positions) + 1).tolist()

    def _next_tokens(self, ids: Tensor, positions: Tensor, width: int) -> Tensor:
        """Takes a step of the first rows: the likeliest next tokens, -1 where logits are not finite."""
        logits = self._forward(slice(0, len(ids)), ids, positions, positions, width).float()
        highest, tokens = logits.max(dim=1)  # NaN, if there is one
        return torch.where(highest.isfinite(), tokens, -1)

    def _forward(self, rows: slice, ids: Tensor, positions: Tensor, columns: Tensor, width: int) -> Tensor:
        """Passes tokens through the model; returns the logits of the last column, [rows, vocabulary]."""
        self._cache.select(rows, columns, width)
        return self._model(
            input_ids=ids,
            attention_mask=masks(self._model, positions, width),
            position_ids=positions,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]


def answer_all(
    model: PreTrainedModel,
    tokenizer,
    prompts: list[list[int]],
    end_ids: list[int],
    max_new_tokens: int,
    check: Callable[[], None] = lambda: None,
) -> list[str]:
    """Returns the new text of each prompt; see `Answerer`."""
    answerer = Answerer(model, end_ids, pad_token_id_of(tokenizer, model), check=check)
    replies = answerer.answer(prompts, max_new_tokens)
    return [tokenizer.decode(tokens, skip_special_tokens=True).strip() for tokens in replies]
