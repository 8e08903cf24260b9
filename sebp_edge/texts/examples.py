"""Documents become examples: tokenised, marked where they are learnt, and cut to the context length.

Nothing is lost silently: a document's tokens are cut into consecutive pieces, at paragraphs if possible, then
sentences, then words; each learnt token is learnt in exactly one example. A piece without a learnt token teaches
nothing and is dropped.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from sebp_edge.errors import ModelError
from sebp_edge.rows.row_plan import IGNORE
from sebp_edge.texts.conversations import render_conversation
from sebp_edge.texts.documents import Completion, Conversation, Document, LeftOut, Unreadable, as_learnt
from sebp_edge.texts.tokens import Tokenised, tokenise


@dataclass(frozen=True)
class Example:
    """One training sequence.

    Attributes:
        input_ids: its tokens, BOS first where the tokenizer sets one; without, a later piece of a text begins with the
            last token of the piece before.
        labels: the same tokens where they are learnt, -100 elsewhere.
        document: which document it comes from.
    """

    input_ids: list[int]
    labels: list[int]
    document: int

    @cached_property
    def num_loss_tokens(self) -> int:
        """Tokens that are predicted and learnt; the first one has nothing before it."""
        return sum(label != IGNORE for label in self.labels[1:])

    @cached_property
    def num_active_tokens(self) -> int:
        """Tokens up to the last one that predicts a learnt one: its active rows."""
        return max((place for place, label in enumerate(self.labels) if label != IGNORE), default=0)


def encode(
    documents: list[Document], tokenizer, context_length: int, *, chat_template: bool = False
) -> tuple[list[Example], list[LeftOut]]:
    """Turns documents into examples of at most `context_length` tokens.

    Args:
        documents: what the readers found; an example's `document` is the index in this list.
        tokenizer: a fast transformers tokenizer.
        context_length: most tokens in one example; 8 or more.
        chat_template: put prompt/completion records into the tokenizer's chat template.

    Returns:
        The examples in order, and the documents that gave none, with the reason.

    Raises:
        ModelError: conversations for a tokenizer without a usable chat template, or a tokenizer without offsets.
    """
    if not tokenizer.is_fast:
        raise ModelError("This model's tokenizer has no fast version, which is needed to cut texts without losing any.")
    examples, left_out = [], []
    bos = first_tokens(tokenizer)
    capacity = context_length - max(1, len(bos))
    for number, document in enumerate(documents):
        try:
            found = [
                example
                for tokenised in _tokenised(document, tokenizer, chat_template)
                for piece in _pieces(tokenised, capacity)
                if (example := _example(tokenised, piece, bos, number)).num_loss_tokens
            ]
        except Unreadable as reason:
            left_out.append(LeftOut(document.source, str(reason)))
            continue
        if not found:
            left_out.append(LeftOut(document.source, "nothing in it to learn"))
        examples += found
    return examples, left_out


def _example(tokenised: Tokenised, piece: slice, bos: list[int], document: int) -> Example:
    ids, learnt = tokenised.ids[piece].tolist(), tokenised.learnt[piece]
    # Without a BOS the token before the piece stands in: a piece's first token is learnt only with one before it.
    prefix = bos or tokenised.ids[max(0, piece.start - 1) : piece.start].tolist()
    if bos and ids[: len(bos)] == bos:
        prefix = []
    labels = [token if keep else IGNORE for token, keep in zip(ids, learnt, strict=True)]
    return Example(prefix + ids, [IGNORE] * len(prefix) + labels, document)


def _tokenised(document: Document, tokenizer, chat_template: bool) -> Iterator[Tokenised]:
    content = as_learnt(document.content, chat_template=chat_template)
    if isinstance(content, Conversation):
        for text, spans in render_conversation(content.messages, tokenizer):
            yield tokenise(text, spans, tokenizer, split_special_tokens=False)
        return
    prompt, completion = content if isinstance(content, Completion) else ("", content)
    text = prompt + completion
    # A user's text may spell out "<|eos|>": there it is text, never the token.
    tokenised = tokenise(text, [(len(prompt), len(text))], tokenizer, split_special_tokens=True)
    if tokenizer.eos_token_id is not None:
        tokenised.append(tokenizer.eos_token_id)
    yield tokenised


def first_tokens(tokenizer) -> list[int]:
    """What the tokenizer puts in front of a sequence: usually its BOS, or nothing."""
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole = tokenizer("a")["input_ids"]
    for position in range(len(whole) - len(plain) + 1):
        if whole[position : position + len(plain)] == plain:
            return whole[:position]
    return []


# ------------------------------------------------------------------------------------------------------------ cutting


def _pieces(tokenised: Tokenised, capacity: int) -> Iterator[slice]:
    """Consecutive slices of at most `capacity` tokens, cut at the best place in the last three quarters of each.

    The last token, EOS, is never alone.
    """
    begin, total = 0, len(tokenised.ids)
    while total - begin > capacity:
        cut = _best_cut(tokenised, range(begin + max(1, capacity // 4), min(begin + capacity, total - 2) + 1))
        yield slice(begin, cut)
        begin = cut
    yield slice(begin, total)


def _best_cut(tokenised: Tokenised, candidates: range) -> int:
    """The last of the best places."""
    best, found = -1, candidates[-1]
    for token in reversed(candidates):
        boundary = _boundary(tokenised, token)
        if boundary > best:
            best, found = boundary, token
        if best == _PARAGRAPH:
            break
    return found


_PARAGRAPH, _SENTENCE, _WORD, _CHARACTER, _INSIDE = 4, 3, 2, 1, 0
_STOPS, _WIDE_STOPS = (".", "!", "?", "…"), ("。", "！", "？")  # Chinese and Japanese put no space after theirs.


def _boundary(tokenised: Tokenised, token: int) -> int:
    """How good a place to cut is in front of `token`."""
    text, start = tokenised.text, tokenised.starts[token]
    if start == tokenised.starts[token - 1]:
        return _INSIDE  # a character that takes several tokens
    before = text[max(0, start - 16) : start].rstrip(" \t")
    if before.endswith("\n\n"):
        return _PARAGRAPH
    sentence = before.rstrip("\"')]*_”’»」』")
    spaced = text[start - 1 : start].isspace() or text[start : start + 1].isspace()
    if before.endswith("\n") or sentence.endswith(_WIDE_STOPS) or (spaced and sentence.endswith(_STOPS)):
        return _SENTENCE
    return _WORD if spaced else _CHARACTER
