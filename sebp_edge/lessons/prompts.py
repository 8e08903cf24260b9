"""Encodes prompts as training encodes documents."""

from itertools import chain
from typing import NamedTuple

from sebp_edge.errors import TextsError
from sebp_edge.lessons.conversations import PLAIN_NAMES, render_end_of_turn, render_plain, render_prompt
from sebp_edge.lessons.examples import first_tokens, tokenise_plain
from sebp_edge.values.documents import Unreadable, check_text

ROLES = ("system", "user", "assistant")
Messages = list[dict[str, str]]


class EncodedPrompt(NamedTuple):
    """The token ids of a prompt, and the ids of the tokens that end the generated text."""

    input_ids: list[int]
    end_ids: list[int]


def check_prompt(prompt: str | Messages) -> None:
    """Raises a TextsError unless `prompt` is a text, or a list of messages that ends with one from the user."""
    if isinstance(prompt, str):
        check_text(prompt, "The prompt")
        if not prompt:
            raise TextsError("The prompt is empty; give the first words of a text, or a question.")
        return
    if not isinstance(prompt, list):
        raise TextsError(f"The prompt must be a text or a list of messages, but is of type {type(prompt).__name__}.")
    if not prompt:
        raise TextsError("The list of messages is empty; give at least one message from the user.")
    for number, message in enumerate(prompt, start=1):
        _check_message(message, number)
    if prompt[-1]["role"] != "user" or not prompt[-1]["content"]:
        raise TextsError("The last message must be from the user and not empty.")


def _check_message(message, number: int) -> None:
    """Raises a TextsError for a faulty message, without quoting it."""
    if not isinstance(message, dict) or message.keys() != {"role", "content"}:
        raise TextsError(f'Message {number} is not of the form {{"role": ..., "content": ...}}.')
    if message["role"] not in ROLES:
        raise TextsError(f"Message {number} has an unknown role; choose from {', '.join(ROLES)}.")
    if not isinstance(message["content"], str):
        kind = type(message["content"]).__name__
        raise TextsError(f"The content of message {number} must be a text, but is of type {kind}.")
    check_text(message["content"], f"Message {number}")


def encode_prompt(prompt: str | Messages, tokenizer, *, chat: bool) -> EncodedPrompt:
    """Encodes a prompt that passed `check_prompt`.

    Args:
        chat: whether to render a text as a user's message, as for an adapter that was trained on chats: with the
            tokenizer's chat template, or as people's messages if there is none. Messages are always rendered with the
            template, if there is one.
    """
    bos, eos = first_tokens(tokenizer), tokenizer.eos_token_id
    ends = [] if eos is None else [eos]
    if isinstance(prompt, str):
        if not chat:
            return EncodedPrompt(encode_texts([prompt], tokenizer)[0], ends)
        prompt = [{"role": "user", "content": prompt}]
    if chat and not tokenizer.chat_template:
        text, spans = render_plain(prompt)
        text += "\n\n" * bool(text) + PLAIN_NAMES["assistant"]
        parts = tokenise_plain(text, spans, tokenizer)
        return EncodedPrompt([*bos, *chain.from_iterable(part.ids for part in parts)], ends)
    try:
        text = render_prompt(tuple(prompt), tokenizer)
    except Unreadable as reason:
        raise TextsError(f"The model's chat template cannot be used for this prompt: {reason}.") from None
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    prefix = [] if ids[: len(bos)] == bos else bos
    return EncodedPrompt(prefix + ids, ends + end_of_turn(tokenizer))


def encode_texts(texts: list[str], tokenizer) -> list[list[int]]:
    """Encodes beginnings of documents as in training, with BOS if the tokenizer has one."""
    # "<|eos|>" in a text is text, not the control token.
    options = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
    bos = first_tokens(tokenizer)
    return [bos + ids for ids in tokenizer(texts, **options)["input_ids"]] if texts else []


def end_of_turn(tokenizer) -> list[int]:
    """Returns the control token that ends the assistant's turn, which need not be the EOS; [] if there is none."""
    if not tokenizer.chat_template:
        return []
    ids = tokenizer(render_end_of_turn(tokenizer), add_special_tokens=False)["input_ids"]
    control = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    return next(([number] for number in ids if number in control), [])
