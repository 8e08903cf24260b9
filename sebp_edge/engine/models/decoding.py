"""Decodes texts after their prompts, one or many, a token at a time: the decoder of everything that writes text.

Prompts that begin with the same tokens, such as the questions about one note, compute these once. All rows of a batch
then take one step together for each token, from keys and values in one `RowCache`. For an owner of the model, who knows
when it changes, those of a single prompt are kept: the next call computes only what follows the tokens that both begin
with.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from sebp_edge.basics.out_of_memory import Attempt
from sebp_edge.basics.stopping import StopRequested
from sebp_edge.engine.models.architecture import blocks_of
from sebp_edge.engine.models.captured_step import CapturedSteps
from sebp_edge.engine.models.loading import refuse_unknown_tokens
from sebp_edge.engine.models.lora import without_adapter
from sebp_edge.engine.models.prefix_groups import PrefixBatch, common_length, group_by_prefix, make_batches
from sebp_edge.engine.models.row_cache import RowCache, bytes_per_token, has_states, masks, needs_no_mask, no_masks
from sebp_edge.engine.models.sampling import NonFiniteLogits, Sampler, Sampling
from sebp_edge.engine.models.shape import max_decoded
from sebp_edge.engine.models.shared_batches import longest_alike, why_not_rows
from sebp_edge.engine.models.single_rows import decode_alone, threaded_linears
from sebp_edge.errors import CannotCapture, TextsError
from sebp_edge.events import Notice, Sink, silent
from sebp_edge.machine.devices import release_memory

# The most bytes of keys and values, unless a single prompt needs more; and of those that are kept between calls.
MAX_CACHE_BYTES, MAX_KEPT_BYTES = 2**29, 2**28
# The most tokens of one pass through the model before the first new token, filled up or not.
FILL_TOKENS = 4096
# The same of a single prompt on the CPU, where a stop may lose what the running pass has computed; and the fewest that
# a pass is cut to if memory runs out.
FILL_TOKENS_CPU = MIN_FILL_TOKENS = 256
# A pass whose result would be kept is ended only after so many seconds of work, so that who types on does not wait for
# the same tokens again.
KEPT_SECONDS = 1.0
# Rows with more tokens than this after their prefix are computed by themselves, so that no others are filled up. On a
# GPU, where one pass takes as long as thousands of filled up tokens, only if all of them do not fit into one.
MAX_FILLED_UP = 64
# So few tokens of a single prompt take one captured step each, which launches less than a pass without a graph.
MAX_REPLAYED = 4
# The logits after so many tokens are kept at most.
MAX_KEPT_LOGITS = 8
# The last tokens of a prompt may change as the text goes on. States cannot go back, so those before so many tokens are
# copied.
UNSETTLED = 8
# Caches of one row have a multiple of this many columns, so that the next prompt finds room in what is kept.
COLUMNS = 128

# Takes a text's tokens and the logits of the next one, fp32 [1, vocabulary]; returns that one, or None to end the text.
Choose = Callable[[list[int], Tensor], int | None]


@dataclass
class _Row:
    """A prompt with its new tokens."""

    number: int  # of the prompt in the call
    prompt: list[int]
    left: int  # how many new tokens may follow; 0 once the row has ended
    choose: Choose | None  # chooses the next token; None takes the likeliest
    new: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.new

    @property
    def last(self) -> int:
        return self.new[-1] if self.new else self.prompt[-1]

    @property
    def position(self) -> int:
        """The position of the last token."""
        return len(self.prompt) + len(self.new) - 1


class Decoder:
    """Decodes prompts, with the results of decoding each one alone, in batches of any lengths.

    Rows that have ended leave their batch as soon as they are half of it. On a GPU, steps are captured as CUDA graphs,
    unless the model cannot be captured, which a Notice says. If memory runs out, smaller batches go on.

    Where a `RowCache` does not hold what a model has computed, or not exactly, prompts are decoded one by one instead,
    in transformers' loop, and nothing is kept, as are texts so long that their rotary angles depend on the length.

    Args:
        keeps: whether the next call uses what a call with a single prompt has computed, and its graphs. Nothing else
            tells that weights, an adapter, hooks or settings have changed: the owner of the model makes a new decoder
            then.

    Attributes:
        one_by_one: why prompts are decoded one by one; None if a `RowCache` serves.
    """

    def __init__(self, model: PreTrainedModel, *, keeps: bool = False, on_event: Sink = silent):
        self._model, self._on_event = without_adapter(model), on_event  # whose layers keep the adapter
        config = self._model.config.get_text_config()
        self.one_by_one = why_not_rows(self._model)
        self._longest = 0 if self.one_by_one else longest_alike(config)
        self._has_states = has_states(config)
        self._captures, self._is_on_cpu = model.device.type == "cuda", model.device.type == "cpu"
        self._keeps, self._holds = keeps, False
        self._forget()

    @torch.no_grad()
    def decode(
        self,
        prompts: list[list[int]],
        end_ids: list[int],
        sampling: Sampling,
        *,
        choose: Choose | None = None,
        on_token: Callable[[int, int], bool] = lambda number, token: False,
        check: Callable[[], None] = lambda: None,
    ) -> list[list[int]]:
        """Returns the new tokens of each prompt, without the one that ended it.

        Args:
            end_ids: tokens that end a text, besides those of the model's generation config.
            choose: chooses each token of a single prompt, in place of `sampling`.
            on_token: receives the number of a prompt and its next token; returns whether its text ends there.
            check: is called after each pass through the model, which gives at most one token per prompt; on the CPU
                also before each block of it, at once or after `KEPT_SECONDS`; may raise.

        Raises:
            TextsError: a prompt is empty, or leaves no room in the model's context.
            ModelError: a prompt has tokens unknown to the model.
            NonFiniteLogits: the model, with its current adapter, computes NaN or infinite logits.
        """
        rows = []
        for number, prompt in enumerate(prompts):
            room = self.room_after(prompt)
            draw = Sampler(sampling, self._model.device)
            left = min(sampling.max_new_tokens, room)
            rows.append(_Row(number, prompt, left, choose or (None if draw.is_greedy else draw)))
        self._ends, self._on_token = {*end_ids, *end_ids_of(self._model)}, on_token
        with self._computing(check):
            self._decode_all(rows)
        return [row.new for row in rows]

    @contextmanager
    def holding_graphs(self) -> Iterator[None]:
        """Context in which a call with the same prompts as the last one uses its graphs.

        Only the values of weights may change between the calls, in place.
        """
        self._holds = True
        try:
            yield
        finally:
            self._holds = False
            self._forget()

    @torch.no_grad()
    def next_logits(self, prompt: list[int], count: int, check: Callable[[], None] = lambda: None) -> Tensor:
        """Returns the logits after each of a prompt's last `count` tokens, fp32 [count, vocabulary]."""
        self.room_after(prompt)
        with self._computing(check):
            if len(prompt) > self._longest:
                ids = torch.tensor([prompt], device=self._model.device)
                logits = self._model(input_ids=ids, use_cache=False).logits[0, -count:].float()
                self._check()
            else:
                logits = self._kept_or_next_logits(prompt, range(len(prompt) - count, len(prompt)))
            if not logits.isfinite().all():
                raise NonFiniteLogits
        return logits

    def _kept_or_next_logits(self, prompt: list[int], positions: range) -> Tensor:
        """Computes only the tokens that are not kept, and those whose logits are not."""
        shared = common_length([*self._kept, -1], [*prompt, -2])
        found = {at: logits_V for at, logits_V in self._kept_logits.items() if at < shared}
        if missing := [at for at in positions if at not in found]:
            first = missing[0]
            self._take_cache(1, len(prompt), known=min(shared, first))
            computed = self._fill_row(prompt, len(prompt) - first)
            found |= zip(range(first, len(prompt)), computed, strict=True)
            self._kept_logits = dict(sorted(found.items())[-MAX_KEPT_LOGITS:])
        return torch.stack([found[at] for at in positions])

    def room_after(self, prompt: list[int]) -> int:
        """Returns how many tokens may follow a prompt; refuses one that cannot be computed."""
        limit = getattr(self._model.config, "max_position_embeddings", None)
        if not prompt or (limit is not None and len(prompt) >= limit):
            room = "at least 1" if limit is None else f"1 to {limit - 1}"
            raise TextsError(f"The prompt has {len(prompt)} tokens; expected {room} for this model.")
        refuse_unknown_tokens(self._model, prompt)
        return sys.maxsize if limit is None else limit - len(prompt)

    @contextmanager
    def _computing(self, check: Callable[[], None]) -> Iterator[None]:
        """Context that keeps what it computes, unless it fails."""
        self._check, self._pass_began = check, time.thread_time()
        # Until memory runs out.
        self._max_rows, self._fill_tokens = max_decoded(has_states=self._has_states), FILL_TOKENS
        try:
            with threaded_linears(self._model), self._checking():
                yield
        except StopRequested:
            if self._cache is not None:
                # The pass that was stopped may have advanced the states of some layers.
                self._kept = self._kept[: self._cache.go_back(len(self._kept), None)]
            self._keep()
            raise
        except BaseException:
            self._forget()
            raise
        self._keep()

    @contextmanager
    def _checking(self) -> Iterator[None]:
        """Context in which passes on the CPU, which take long, check before each block."""
        blocks = blocks_of(self._model) if self._is_on_cpu else []
        hooks = [block.register_forward_pre_hook(self._before_block) for block in blocks]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _before_block(self, block: nn.Module, inputs: tuple) -> None:
        if not self._keeps or time.thread_time() - self._pass_began >= KEPT_SECONDS:
            self._check()

    def _decode_all(self, rows: list[_Row]) -> None:
        together = [row for row in rows if len(row.prompt) + row.left <= self._longest]
        for row in rows:
            if len(row.prompt) + row.left > self._longest:

                def add_next(logits: Tensor, row: _Row = row) -> int | None:
                    self._check()
                    return self._add_next([row], logits)[0]

                decode_alone(self._model, row.prompt, row.left, add_next)
        batches = self._batches(together)
        while batches:
            batch = [together[number] for number in batches[0].numbers]
            with Attempt(partial(self._can_be_halved, batch)) as attempt:
                self._decode(batches.pop(0), batch)
            if attempt.did_not_fit:
                self._forget()
                release_memory(self._model.device)
                self._max_rows = max(1, len(batch) // 2)
                self._fill_tokens = max(MIN_FILL_TOKENS, self._fill_tokens // 2)
                together = [row for row in together if row.left]
                batches = self._batches(together)

    def _can_be_halved(self, batch: list[_Row]) -> bool:
        return len(batch) > 1 or self._fill_tokens > MIN_FILL_TOKENS

    def _keep(self) -> None:
        """Keeps the keys and values of a single prompt's text for the next call, or only what graphs refer to."""
        if self._cache is None:
            return
        if self._holds:
            self.forget_texts()
            return
        if not self._keeps or not self._kept or self._cache.nbytes > MAX_KEPT_BYTES:
            self._forget()

    def forget_texts(self) -> None:
        """Forgets what prompts have computed, since weights have changed in place; graphs stay."""
        self._kept, self._kept_logits = [], {}

    def _forget(self) -> None:
        self._cache: RowCache | None = None
        self._captured: CapturedSteps | None = None
        self._kept: list[int] = []  # the tokens whose keys and values are in the cache, if it has a single row
        self._kept_logits: dict[int, Tensor] = {}  # those after some of these tokens, by their positions

    def _batches(self, rows: list[_Row]) -> list[PrefixBatch]:
        if not rows:
            return []
        columns = [len(row.tokens) + row.left for row in rows]
        max_cells = MAX_CACHE_BYTES // bytes_per_token(self._model)
        largest_group = max(1, min(self._max_rows, max_cells // max(columns)))
        groups = group_by_prefix([row.tokens for row in rows], largest_group)
        return make_batches(groups, columns, self._max_rows, max_cells)

    def _decode(self, batch: PrefixBatch, rows: list[_Row]) -> None:
        is_alone = len(rows) == 1
        # All that is kept may be known, but a prompt's last token is computed for its logits.
        known = common_length([*self._kept, -1], rows[0].tokens) if is_alone else 0
        self._take_cache(len(rows), batch.columns, known)
        if is_alone:
            logits = self._fill_row(rows[0].tokens, 1)
        else:
            self._fill_prompts(batch, rows)
            logits = self._step_rows(rows)
            self._check()
        while True:
            self._add_next(rows, logits)
            kept = [at for at, row in enumerate(rows) if row.left]
            if 2 * len(kept) <= len(rows):
                rows = [rows[at] for at in kept]
                self._cache.keep(kept)
            if not rows:
                return
            logits = self._step_rows(rows)
            if is_alone:
                self._kept = rows[0].tokens
            self._check()

    def _add_next(self, rows: list[_Row], logits: Tensor) -> list[int | None]:
        """Adds the next token to each row that has not ended; returns them, None for rows that have."""
        highest, likeliest = logits.max(dim=1)  # NaN, if there is one
        found = torch.where(highest.isfinite(), likeliest, -1).tolist()
        if any(row.left and token < 0 for row, token in zip(rows, found, strict=True)):
            raise NonFiniteLogits
        draw = rows[0].choose  # those of the other rows are of the same sampling
        if isinstance(draw, Sampler) and not draw.is_random:
            found = draw.likeliest([row.tokens for row in rows], logits)
        elif draw is not None:
            found = [row.left and row.choose(row.tokens, logits[at : at + 1]) for at, row in enumerate(rows)]
        return [self._add(row, token) for row, token in zip(rows, found, strict=True)]

    def _add(self, row: _Row, token: int | None) -> int | None:
        if not row.left:
            return None
        row.left -= 1
        if token is None or token in self._ends:
            row.left = 0
        else:
            row.new.append(token)
            if self._on_token(row.number, token):
                row.left = 0
        return token if row.left else None

    def _take_cache(self, rows: int, columns: int, known: int) -> None:
        """Allocates the cache, unless the last one serves; captured graphs live with it.

        The first `known` tokens of the prompt are kept; those after them are forgotten.
        """
        cache = self._cache
        if cache is not None:
            known = cache.go_back(known, len(self._kept))
        if rows == 1:
            columns = -(-columns // COLUMNS) * COLUMNS
        if cache is None or cache.columns < columns or cache.rows < rows or cache.columns > 2 * columns:
            last = cache if known else None
            self._cache = self._captured = cache = None
            self._cache = RowCache(rows, columns, self._model.config.get_text_config())
            if last is not None:
                self._cache.take(last, known)
        self._kept = self._kept[:known]
        self._kept_logits = {at: logits_V for at, logits_V in self._kept_logits.items() if at < known}
        if self._captures and self._captured is None:
            self._captured = CapturedSteps(self._model.device, self._cache, self._forward_step)

    def _fill_prompts(self, batch: PrefixBatch, rows: list[_Row]) -> None:
        """Computes keys and values of all rows, except those of their last tokens."""
        begin, rest = 0, []
        for group in batch.groups:
            end = begin + len(group.numbers)
            if group.prefix:
                self._fill(begin, [rows[begin].tokens[: group.prefix]], [0])
                self._cache.share(begin, slice(begin + 1, end), group.prefix)
            rest += [(row.tokens[group.prefix : -1], group.prefix) for row in rows[begin:end]]
            begin = end
        longest = max(len(tokens) for tokens, start in rest)
        fits_into_one = not self._is_on_cpu and len(rest) * longest <= self._fill_tokens
        most = 0 if self._has_states else longest if fits_into_one else MAX_FILLED_UP
        for at, (tokens, start) in enumerate(rest):
            if len(tokens) > most:
                self._fill(at, [tokens], [start])
        short = [([] if len(tokens) > most else tokens, start) for tokens, start in rest]
        if any(tokens for tokens, start in short):
            self._fill(0, [tokens for tokens, start in short], [start for tokens, start in short])

    def _fill(self, first: int, tokens: list[list[int]], starts: list[int]) -> None:
        """Computes keys and values of rows' next tokens, in one or more passes.

        Args:
            first: the first of the rows.
            starts: the position of each row's first token.
        """
        size = max(1, self._fill_tokens // len(tokens))
        for begin in range(0, max(map(len, tokens)), size):
            self._pass(first, [row[begin : begin + size] for row in tokens], [start + begin for start in starts])
            self._check()

    def _pass(self, first: int, tokens: list[list[int]], starts: list[int], count: int = 1) -> Tensor:
        """Computes keys and values as `_fill`, in one pass; returns the logits of the last columns, row by row."""
        longest = max(map(len, tokens))
        ids = torch.full((len(tokens), longest), 0)
        positions, columns = torch.zeros_like(ids), torch.full_like(ids, self._cache.columns)
        for at, (row, start) in enumerate(zip(tokens, starts, strict=True)):
            ids[at, : len(row)] = torch.tensor(row)
            positions[at, : len(row)] = columns[at, : len(row)] = torch.arange(len(row)) + start
        width = int(positions.max()) + 1
        rows = slice(first, first + len(tokens))
        ids, positions, columns = (each.to(self._model.device) for each in (ids, positions, columns))
        if len(tokens) == 1:
            columns = slice(width - longest, width)
        return self._forward(rows, ids, positions, columns, width, count, begins=not any(starts))

    def _fill_row(self, prompt: list[int], count: int) -> Tensor:
        """Computes what is not kept of a single prompt; returns its last `count` logits."""
        settled = len(prompt) - max(1 + UNSETTLED, count)
        if self._has_states and self._keeps and settled > len(self._kept):
            self._go_on(prompt[:settled], 1)
            self._cache.settle(settled)
        return self._go_on(prompt, count)

    def _go_on(self, prompt: list[int], count: int) -> Tensor:
        is_replayed = self._captured is not None and len(prompt) - len(self._kept) <= MAX_REPLAYED
        most, found = FILL_TOKENS_CPU if self._is_on_cpu else self._fill_tokens, []
        size = 1 if is_replayed else most
        for begin in range(len(self._kept), len(prompt), size):
            tokens = prompt[begin : begin + size]
            if is_replayed:
                found.append(self._step(tokens, [begin]).clone())
            else:
                found.append(self._pass(0, [tokens], [begin], min(count, len(tokens))))
            self._kept = prompt[: begin + size]
            self._check()
        return torch.cat(found)[-count:]

    def _step_rows(self, rows: list[_Row]) -> Tensor:
        """Returns the logits after each row's last token, [rows, vocabulary]."""
        return self._step([row.last for row in rows], [row.position for row in rows])

    def _step(self, last: list[int], positions: list[int]) -> Tensor:
        """Returns the logits after tokens at these positions, one for each row, [rows, vocabulary]."""
        if self._captured is not None:
            try:
                return self._captured(last, positions)
            except CannotCapture as error:
                self._captured, self._captures = None, False
                self._on_event(Notice(f"Texts are generated without CUDA graphs, which is slower: {error.reason}"))
        ids, at = (torch.tensor(each, device=self._model.device)[:, None] for each in (last, positions))
        width = max(positions) + 1
        columns = slice(width - 1, width) if len(last) == 1 else at
        return self._forward(slice(0, len(last)), ids, at, columns, width)

    def _forward_step(self, ids: Tensor, positions: Tensor, width: int) -> Tensor:
        return self._forward(slice(0, len(ids)), ids, positions, positions, width)

    def _forward(
        self,
        rows: slice,
        ids: Tensor,
        positions: Tensor,
        columns: Tensor | slice,
        width: int,
        count: int = 1,
        *,
        begins: bool = False,
    ) -> Tensor:
        """Passes tokens through the model; returns the logits of the last columns, fp32 [rows * count, vocabulary]."""
        self._pass_began = time.thread_time()
        self._cache.select(rows, columns, width, begins=begins)
        # transformers repeats the keys of grouped heads if there is a mask. A captured step has columns to mask.
        is_bare = isinstance(columns, slice) and ids.numel() == 1 and needs_no_mask(self._model, width)
        logits = self._model(
            input_ids=ids,
            attention_mask=no_masks(self._model) if is_bare else masks(self._model, positions, width),
            position_ids=positions,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=count,
        ).logits
        return logits[:, -count:].flatten(0, 1).float()


def end_ids_of(model: PreTrainedModel) -> list[int]:
    """Returns the tokens that end a text according to the model's generation config."""
    ids = model.generation_config.eos_token_id
    ids = ids if isinstance(ids, list) else [ids]
    known = model.get_input_embeddings().weight.shape[0]
    return [token for token in ids if type(token) is int and 0 <= token < known]
