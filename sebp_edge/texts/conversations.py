"""Renders conversations with the model's chat template, and finds the spans that the assistant wrote.

Uses the first of these methods that is sound for the template, and never guesses:

1. generation marks: the template marks the assistant's text (`{% generation %}`);
2. prefixes: the conversation rendered up to a turn is a prefix of the whole rendering;
3. turn by turn: for templates that rewrite earlier turns (Qwen3 drops their thoughts), renders one text per assistant
   turn, with loss on that turn only.
"""

import re
from itertools import groupby

from jinja2.exceptions import TemplateError

from sebp_edge.errors import ModelError
from sebp_edge.texts.documents import Unreadable
from sebp_edge.texts.tokens import Span

Messages = tuple[dict[str, str], ...]
Rendered = list[tuple[str, list[Span]]]

# The roles that chat templates know. Error messages quote no other role, since it may be a user's text.
ROLES = ("system", "developer", "user", "assistant", "tool")

_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")


def render_conversation(messages: Messages, tokenizer) -> Rendered:
    """Renders a conversation with the tokenizer's chat template.

    Returns:
        Pairs of a text and the character spans in it that the assistant wrote, end-of-turn marks included.

    Raises:
        ModelError: there is no chat template, or it does not show which part is the assistant's.
        Unreadable: the template refuses this conversation, or a message contains a control token, which after rendering
            would look like the template's own.
    """
    _refuse_control_tokens(messages, tokenizer)
    # Nothing after the assistant's last turn has loss.
    messages = messages[: _assistant_turns(messages)[-1] + 1]
    try:
        return _by_marks(messages, tokenizer) or _by_prefixes(messages, tokenizer) or _turn_by_turn(messages, tokenizer)
    except TemplateError as error:
        roles = ", ".join(role if (role := message["role"]) in ROLES else "another role" for message in messages[:6])
        raise Unreadable(f"the model's chat template refuses a conversation of {roles}") from error


def render_prompt(messages: Messages, tokenizer) -> str:
    """Renders a conversation with the generation prompt, which starts the assistant's answer.

    Raises:
        ModelError: there is no chat template.
        Unreadable: see `render_conversation`.
    """
    _template(tokenizer)
    _refuse_control_tokens(messages, tokenizer)
    try:
        return _render(messages, tokenizer, prompt=True)
    except TemplateError as error:
        raise Unreadable("the template refuses these roles in this order") from error


def render_end_of_turn(tokenizer) -> str:
    """Returns what the chat template puts after the assistant's text; "" if it refuses a question with an answer."""
    answer = "answer"
    turns = ({"role": "user", "content": "question"}, {"role": "assistant", "content": answer})
    try:
        return _render(turns, tokenizer).rpartition(answer)[2]
    except TemplateError:
        return ""


def _refuse_control_tokens(messages: Messages, tokenizer) -> None:
    control = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    if any(token in text for message in messages for text in message.values() for token in control):
        raise Unreadable("a message spells out one of the model's control tokens")


def _by_marks(messages: Messages, tokenizer) -> Rendered | None:
    if not _MARK.search(_template(tokenizer)):
        return None
    encoding = tokenizer.apply_chat_template(
        list(messages),
        return_dict=True,
        return_assistant_tokens_mask=True,
        tokenizer_kwargs={"return_offsets_mapping": True, "verbose": False},
    )
    tokens = zip(encoding["assistant_masks"], encoding["offset_mapping"], strict=True)
    runs = [[offset for _, offset in run] for marked, run in groupby(tokens, key=lambda token: token[0]) if marked]
    # transformers drops marked spans that begin or end with whitespace that the token offsets leave out.
    if len(runs) != len(_assistant_turns(messages)):
        return None
    return [(_render(messages, tokenizer), [(run[0][0], run[-1][1]) for run in runs])]


def _by_prefixes(messages: Messages, tokenizer) -> Rendered | None:
    whole, spans = _render(messages, tokenizer), []
    for turn in _assistant_turns(messages):
        before, after = _render_before_and_after(messages, turn, tokenizer)
        if not (whole.startswith(after) and after.startswith(before)):
            return None
        spans.append((len(before), len(after)))
    return [(whole, spans)]


def _turn_by_turn(messages: Messages, tokenizer) -> Rendered:
    rendered = []
    for turn in _assistant_turns(messages):
        before, after = _render_before_and_after(messages, turn, tokenizer)
        if not after.startswith(before):
            raise ModelError(
                "The model's chat template does not show which part of a conversation is the assistant's; "
                "give prompt/completion records or plain texts instead."
            )
        rendered.append((after, [(len(before), len(after))]))
    return rendered


def _assistant_turns(messages: Messages) -> list[int]:
    return [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]


def _render_before_and_after(messages: Messages, turn: int, tokenizer) -> tuple[str, str]:
    """Renders the conversation up to the beginning and up to the end of an assistant's turn."""
    if turn == 0:
        raise Unreadable("it begins with the assistant, whose text the model's chat template does not mark")
    return _render(messages[:turn], tokenizer, prompt=True), _render(messages[: turn + 1], tokenizer)


def _template(tokenizer) -> str:
    try:
        return tokenizer.get_chat_template()
    except ValueError as error:
        raise ModelError(
            "This model has no chat template, so conversations cannot be used with it; "
            "choose an instruct model, or give plain texts."
        ) from error


def _render(messages: Messages, tokenizer, *, prompt: bool = False) -> str:
    return tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=prompt)
