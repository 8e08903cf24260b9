"""Encodes documents as examples: tokenised, labelled, and cut to the context length.

Nothing is lost silently. A document's tokens are cut into consecutive chunks, between paragraphs if possible, else
between sentences, else between words. Each loss token is in exactly one example. Chunks without loss tokens are
dropped.
"""

from array import array
from collections.abc import Iterable, Iterator

import numpy as np

from sebp_edge.basics.labels import IGNORE
from sebp_edge.errors import ModelError
from sebp_edge.lessons.boilerplate import common_spans
from sebp_edge.lessons.conversations import NotShown, is_of_people, render_conversation, render_plain
from sebp_edge.lessons.tokens import Span, Spans, Tokenised, tokenise
from sebp_edge.values.documents import Content, Conversation, Document, LeftOut, PromptCompletion, Unreadable
from sebp_edge.values.example import Example
from sebp_edge.values.preparation_progress import SILENT, Progress


def encode(
    documents: list[Document],
    tokenizer,
    context_length: int,
    *,
    chat_template: bool = False,
    common_lines: frozenset[str] = frozenset(),
    progress: Progress = SILENT,
) -> tuple[list[Example], list[LeftOut]]:
    """Encodes documents as examples of at most `context_length` tokens.

    Args:
        context_length: the maximum number of tokens in one example, 8 or more.
        chat_template: whether to render prompt/completion records with the tokenizer's chat template.
        common_lines: the lines that are boilerplate, from `boilerplate.common_lines`. A completion or an assistant's
            message of such lines only is no boilerplate.

    Returns:
        The examples in order, and the documents that gave none, each with the reason.
    """
    if not tokenizer.is_fast:
        raise ModelError(
            "This model's tokenizer has no fast version, which is needed to cut texts; choose another model."
        )
    encoder = _Encoder(tokenizer, context_length, chat_template, common_lines, progress)
    examples, left_out, is_hidden = [], [], False
    progress.begin("tokenising", sum(document.num_characters for document in documents))
    for number, document in enumerate(documents):
        try:
            found = list(encoder.examples_of(document, number))
        except Unreadable as reason:
            left_out.append(LeftOut(document.source, str(reason)))
            is_hidden |= isinstance(reason, NotShown)
            continue
        if not found:
            left_out.append(LeftOut(document.source, "no tokens to train on"))
        examples += found
    progress.end()
    if is_hidden and not examples:
        raise ModelError(
            "The model's chat template does not show which part of a conversation is the assistant's; "
            "give prompt/completion records or plain texts instead."
        )
    return examples, left_out


class _Encoder:
    """Makes the examples of one document after another; see `encode`."""

    def __init__(
        self, tokenizer, context_length: int, chat_template: bool, common_lines: frozenset[str], progress: Progress
    ):
        self._tokenizer, self._chat_template = tokenizer, chat_template
        self._common_lines, self._progress = common_lines, progress
        self._bos = first_tokens(tokenizer)
        self._capacity = context_length - max(1, len(self._bos))

    def examples_of(self, document: Document, number: int) -> Iterator[Example]:
        """Yields the examples of a document."""
        content = document.as_chat(chat_template=self._chat_template)
        is_chat = isinstance(content, Conversation)
        by_template = is_chat and (bool(self._tokenizer.chat_template) or not is_of_people(content))
        for text, loss_spans, common in self._rendered(content, by_template):
            if by_template:
                parts = tokenise(text, loss_spans, self._tokenizer, split_special_tokens=False)
            elif is_chat:
                parts = tokenise_plain(text, loss_spans, self._tokenizer, self._progress)
            else:
                # In a user's text, "<|eos|>" is text, not the control token.
                parts = tokenise(text, loss_spans, self._tokenizer, split_special_tokens=True, progress=self._progress)
                parts = _with_end(parts, text, self._tokenizer.eos_token_id)
            boilerplate = Spans(common)
            for tokenised, chunk in _chunks(parts, self._capacity):
                ids, labels, in_boilerplate = self._labelled(tokenised, chunk, boilerplate)
                example = Example(ids, labels, number, in_boilerplate, is_chat=is_chat)
                if example.num_loss_tokens:
                    yield example
        if by_template:  # rendered texts are longer
            self._progress.advance(document.num_characters)

    def _rendered(self, content: Content, by_template: bool) -> Iterator[tuple[str, list[Span], list[Span]]]:
        """Yields the texts of a document, with the spans that have loss, and those that are boilerplate."""
        lines = self._common_lines
        if isinstance(content, str):
            yield content, [(0, len(content))], common_spans(content, lines)
        elif isinstance(content, PromptCompletion):
            text = "".join(content)
            spans = [(len(content.prompt), len(text))]
            yield text, spans, _spans_in_answers(text, spans, [content.completion], lines)
        elif by_template:
            answers = (content.messages[turn]["content"].strip() for turn in content.turns)
            for text, spans in render_conversation(content.messages, self._tokenizer, content.tools):
                # Each span holds the next answer.
                yield text, spans, _spans_in_answers(text, spans, answers, lines)
        else:
            # Nothing after the owner's last turn has loss.
            text, spans = render_plain(content.messages[: content.turns[-1] + 1])
            answers = (text[first:last].strip() for first, last in spans)
            yield text, spans, _spans_in_answers(text, spans, answers, lines)

    def _labelled(self, tokenised: Tokenised, chunk: slice, boilerplate: Spans) -> tuple[list[int], list[int], bytes]:
        """Returns `input_ids`, `labels` and `in_boilerplate` of the example that a chunk is."""
        ids, loss_mask, bos = tokenised.ids[chunk].tolist(), tokenised.loss_mask[chunk], self._bos
        # Without a BOS, the token before the chunk takes its place, since the first token needs one that predicts it.
        prefix = bos or tokenised.ids[max(0, chunk.start - 1) : chunk.start].tolist()
        if bos and ids[: len(bos)] == bos:
            prefix = []
        labels = [token if keep else IGNORE for token, keep in zip(ids, loss_mask, strict=True)]
        in_boilerplate = b""
        if boilerplate:
            starts = np.array(tokenised.starts[chunk])
            in_boilerplate = bytes(len(prefix)) + boilerplate.overlap(starts, starts + 1)
        return prefix + ids, [IGNORE] * len(prefix) + labels, in_boilerplate


def tokenise_plain(text: str, spans: list[Span], tokenizer, progress: Progress = SILENT) -> Iterator[Tokenised]:
    """Yields the tokens of a conversation that `render_plain` rendered, and the token that ends a text after each span.

    So a reply ends as a text does, wherever in the conversation it stands.
    """
    begin = 0
    for first, end in [*spans, (len(text), len(text))]:
        piece = text[begin:end]
        parts = tokenise(piece, [(first - begin, end - begin)], tokenizer, split_special_tokens=True, progress=progress)
        for part in _with_end(parts, piece, tokenizer.eos_token_id) if first < end else parts:
            yield Tokenised(text, part.ids, array("q", (start + begin for start in part.starts)), part.loss_mask)
        begin = end


def _with_end(parts: Iterator[Tokenised], text: str, eos: int | None) -> Iterator[Tokenised]:
    """Yields the parts, and the token that ends the text, if there is one."""
    yield from parts
    if eos is not None:
        yield Tokenised(text, array("i", [eos]), array("q", [len(text)]), bytearray([1]))


def _spans_in_answers(text: str, spans: list[Span], answers: Iterable[str], lines: frozenset[str]) -> list[Span]:
    """Returns the spans of boilerplate in the answers that are in these spans of `text`.

    An answer whose lines are all common has none: it is one of a few answers, and the prompt decides which.
    """
    found = []
    for (first, last), answer in zip(spans, answers, strict=False):
        common, begin = common_spans(answer, lines), text.find(answer, first, last)
        num_lines = sum(1 for line in answer.split("\n") if line.strip())
        if len(common) < num_lines and begin >= 0:  # a chat template may change an answer
            found += [(begin + first, begin + last) for first, last in common]
    return found


def first_tokens(tokenizer) -> list[int]:
    """Returns the tokens that the tokenizer puts before a sequence: usually its BOS, or none."""
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole = tokenizer("a")["input_ids"]
    for position in range(len(whole) - len(plain) + 1):
        if whole[position : position + len(plain)] == plain:
            return whole[:position]
    return []


# ------------------------------------------------------------------------------------------------------------ cutting


def _chunks(parts: Iterable[Tokenised], capacity: int) -> Iterator[tuple[Tokenised, slice]]:
    """Yields consecutive slices of at most `capacity` tokens, each cut at the best boundary in its last three quarters.

    The last token, EOS, is never alone in a slice. A slice is one of the tokens that it comes with, which are few; they
    have the token before it, and are valid until the next slice.
    """
    tokenised, begin = None, 0
    for part in parts:
        if tokenised is None:
            tokenised = part
        else:
            tokenised.extend(part)
        # Whether more tokens follow makes no difference to these cuts.
        while len(tokenised.ids) - begin > capacity + 1:
            cut = _best_cut(tokenised, range(begin + max(1, capacity // 4), begin + capacity + 1))
            yield tokenised, slice(begin, cut)
            begin = cut
        passed = max(0, begin - 1)
        tokenised.drop(passed)
        begin -= passed
    while (total := len(tokenised.ids)) - begin > capacity:
        cut = _best_cut(tokenised, range(begin + max(1, capacity // 4), min(begin + capacity, total - 2) + 1))
        yield tokenised, slice(begin, cut)
        begin = cut
    yield tokenised, slice(begin, total)


def _best_cut(tokenised: Tokenised, candidates: range) -> int:
    """Returns the last of the best candidates."""
    best, found = -1, candidates[-1]
    for token in reversed(candidates):
        boundary = _rate_boundary(tokenised, token)
        if boundary > best:
            best, found = boundary, token
        if best == _PARAGRAPH:
            break
    return found


_PARAGRAPH, _SENTENCE, _WORD, _CHARACTER, _INSIDE = 4, 3, 2, 1, 0
_STOPS, _WIDE_STOPS = (".", "!", "?", "…"), ("。", "！", "？")  # Chinese and Japanese put no space after these.


def _rate_boundary(tokenised: Tokenised, token: int) -> int:
    """Rates a cut before `token`."""
    text, start = tokenised.text, tokenised.starts[token]
    if start == tokenised.starts[token - 1]:
        return _INSIDE  # inside a character of several tokens
    before = text[max(0, start - 16) : start].rstrip(" \t")
    if before.endswith("\n\n"):
        return _PARAGRAPH
    sentence = before.rstrip("\"')]*_”’»」』")
    spaced = text[start - 1 : start].isspace() or text[start : start + 1].isspace()
    if before.endswith("\n") or sentence.endswith(_WIDE_STOPS) or (spaced and sentence.endswith(_STOPS)):
        return _SENTENCE
    return _WORD if spaced else _CHARACTER
