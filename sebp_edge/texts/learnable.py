"""Refuses examples that teach a model nothing, or something that spoils what it generates."""

from collections import Counter
from collections.abc import Iterable, Sequence

from sebp_edge.errors import ModelError, TextsError
from sebp_edge.texts.documents import Conversation, Document, LeftOut, as_chat
from sebp_edge.texts.examples import Example
from sebp_edge.texts.prompts import end_of_turn


def refuse_unlearnable(
    examples: list[Example],
    documents: list[Document],
    tokenizer,
    *,
    chat_template: bool,
    left_out: Sequence[LeftOut] = (),
) -> None:
    """Refuses to train on these examples of the documents.

    Args:
        left_out: what was not used; documents that gave no example come last.

    Raises:
        TextsError: no token has loss.
        ModelError: the end of a text or of an answer never has loss, or a text begins with two start tokens.
    """
    if not any(example.num_loss_tokens for example in examples):
        unused = () if examples else left_out[-len(documents) :]
        reasons = Counter(item.reason for item in unused).most_common(1)
        why = "".join(f" (for {count} of them: {reason})" for reason, count in reasons)
        raise TextsError(
            f"No token of these {len(documents)} documents has loss{why}, so there is nothing to train on; give texts, "
            f"or records with completions or answers{', or choose another model' if why else ''}."
        )
    start = tokenizer.bos_token_id
    if start is not None and any(list(example.input_ids[:2]) == [start, start] for example in examples):
        raise ModelError(
            "This model's tokenizer and chat template begin a text with two start tokens, which no model expects; "
            "remove one of them from the template, or choose another model."
        )
    chats, texts = [], []
    for example in examples:
        content = as_chat(documents[example.document].content, chat_template=chat_template)
        (chats if isinstance(content, Conversation) else texts).append(example)
    _refuse_endless(texts, chats, tokenizer)


def refuse_endless_answers(examples: list[Example], tokenizer) -> None:
    """Refuses answers to questions, in chats or without a chat template, that the model would never learn to end.

    Raises:
        ModelError: the end of an answer never has loss.
    """
    _refuse_endless(*(([], examples) if tokenizer.chat_template else (examples, [])), tokenizer)


def _refuse_endless(texts: list[Example], chats: list[Example], tokenizer) -> None:
    ends = set() if tokenizer.eos_token_id is None else {tokenizer.eos_token_id}
    if texts and not _learns_one_of(ends, texts):
        raise ModelError(
            "This model's tokenizer has no token that ends a text, so the adapter would never learn where to stop; set "
            "eos_token in its tokenizer_config.json, or choose another model."
        )
    if chats and not _learns_one_of(ends | set(end_of_turn(tokenizer)), chats):
        raise ModelError(
            "This model's chat template leaves the token that ends an answer without loss, so the adapter would never "
            "learn where to stop; choose another model, or give plain texts."
        )


def _learns_one_of(ends: set[int], examples: Iterable[Example]) -> bool:
    return any(end in example.labels[1:] for example in examples for end in ends)
