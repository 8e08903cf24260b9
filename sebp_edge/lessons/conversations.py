"""Renders conversations with the model's chat template, and finds the spans that the assistant wrote.

Uses the first of these methods that is sound for the template, and never guesses:

1. generation marks: the template marks the assistant's text (`{% generation %}`);
2. prefixes: the conversation rendered up to a turn, or what all answers share, is a prefix of what is rendered up to
   the next one;
3. turn by turn: for templates that rewrite earlier turns (Qwen3 drops their thoughts), renders one text per assistant
   turn, with loss on that turn only.
"""

import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress

from sebp_edge.errors import ModelError
from sebp_edge.lessons.template_child import Cut, Renderer, Rendering, TemplateRefuses
from sebp_edge.lessons.tokens import Span
from sebp_edge.values.documents import Content, Conversation, Message, Unreadable, turns_with_loss

Messages = Sequence[Message]
Rendered = list[tuple[str, list[Span]]]

# The roles that chat templates know. Error messages quote no other role, since it may be a user's text.
ROLES = ("system", "developer", "user", "assistant", "tool")
# Without marks, each turn is rendered with all messages before it. A conversation takes at most so many messages.
MAX_RENDERED = 5_000_000
# Turns that are rendered in one request, which has the time of one rendering.
TURNS_AT_ONCE = 4

_QUESTION_AND_ANSWER = ({"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"})
# What a message has besides what templates know.
_NOT_SHOWN = {"weight", "author"}
# What turns of people begin with, without a chat template.
PLAIN_NAMES = {"user": "Them:", "assistant": "Me:"}
_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")


class NotShown(Unreadable):
    """The chat template does not show which part of a conversation is the assistant's."""

    def __init__(self):
        super().__init__("the model's chat template does not show which part of it is the assistant's")


def render_conversation(messages: Messages, tokenizer, tools: Sequence[dict] = ()) -> Rendered:
    """Renders a conversation with the tokenizer's chat template.

    Args:
        tools: descriptions of the tools that the assistant may call.

    Returns:
        Pairs of a text and the character spans in it that the assistant wrote, end-of-turn marks included; one for each
        of its turns that has loss.

    Raises:
        ModelError: there is no chat template.
        NotShown: it does not show which part is the assistant's.
        Unreadable: it refuses this conversation, has no place for a part of it, or a message contains a
            control token, which after rendering would look like the template's own.
    """
    template = _ChatTemplate(tokenizer, tools)
    _refuse_control_tokens([messages, tools], tokenizer)
    # Nothing after the assistant's last turn has loss.
    messages = messages[: turns_with_loss(messages)[-1] + 1]
    try:
        return _by_marks(messages, template) or _by_turns(messages, template)
    except TemplateRefuses as error:
        roles = ", ".join(role if (role := message["role"]) in ROLES else "another role" for message in messages[:6])
        raise Unreadable(f"the model's chat template {error} a conversation of {roles}") from error


def is_of_people(content: Content) -> bool:
    """Returns whether this is a conversation of people, which can be rendered without a chat template."""
    return isinstance(content, Conversation) and any("author" in message for message in content.messages)


def render_plain(messages: Messages) -> tuple[str, list[Span]]:
    """Renders a conversation of people without a chat template; see `render_conversation`.

    Each turn begins with "Me:" or "Them:", since `generate` knows nobody's name. A token that ends a text follows each
    span.
    """
    text, spans = "", []
    for message in messages:
        if not message["content"]:
            continue
        text += "\n\n" * bool(text) + PLAIN_NAMES.get(message["role"], "")
        begin = len(text)
        # The blank is the owner's, since many tokens begin with one.
        text += f" {message['content']}"
        if message["role"] == "assistant":
            spans.append((begin, len(text)))
    return text, spans


def plain_message(text: str) -> str:
    """Returns a message to the owner as `render_plain` renders it, up to where the reply begins."""
    return f"{PLAIN_NAMES['user']} {text}\n\n{PLAIN_NAMES['assistant']}"


def render_prompt(messages: Messages, tokenizer, **variables) -> str:
    """Renders a conversation with the generation prompt, which starts the assistant's answer.

    If the template's own prompt opens a thought that answers without one do not have, it is what these begin with.
    """
    template = _ChatTemplate(tokenizer)
    _refuse_control_tokens(messages, tokenizer)
    try:
        prompt = template.render_all(messages, prompt=True, **variables).text
    except TemplateRefuses as error:
        raise Unreadable(f"it {error} these messages") from error
    with suppress(TemplateRefuses, Unreadable):
        answer = {"role": "assistant", "content": "answer"}
        answered = template.render_all([*messages, answer], **variables).text
        if not answered.startswith(prompt):
            return _before_answers(messages, answer, answered, template, **variables)
    return prompt


def render_end_of_turn(tokenizer) -> str:
    """Returns what the chat template puts after the assistant's text; "" if it refuses a question with an answer."""
    try:
        return _ChatTemplate(tokenizer).render_all(_QUESTION_AND_ANSWER).text.rpartition("answer")[2]
    except TemplateRefuses:
        return ""


class _ChatTemplate:
    """The chat template of a tokenizer, with the tools that the assistant may call."""

    def __init__(self, tokenizer, tools: Sequence[dict] = ()):
        try:
            source = tokenizer.get_chat_template(tools=list(tools) or None)
        except ValueError as error:
            raise ModelError(
                "This model has no chat template, so conversations cannot be used with it; "
                "choose an instruct model, or give plain texts."
            ) from error
        if not isinstance(source, str):
            raise ModelError("This model's chat template is not a text; choose another model, or give plain texts.")
        self.has_marks = bool(_MARK.search(source))
        self.tools = tools
        self._variables = tokenizer.special_tokens_map
        # The process that renders is the tokenizer's, and ends with it. A fork has one of its own.
        renderers = tokenizer.__dict__.setdefault("sebp_edge_renderers", {})
        key = source, os.getpid()
        if key not in renderers:
            renderers[key] = Renderer(source)
        self._renderer = renderers[key]

    def render(self, messages: Messages, cuts: list[Cut], **variables) -> list[Rendering]:
        """Renders the beginnings of a conversation; see `Renderer.render`."""
        shown = [{name: value for name, value in message.items() if name not in _NOT_SHOWN} for message in messages]
        return self._renderer.render(shown, self.tools, self._variables | variables, cuts)

    def render_all(self, messages: Messages, *, prompt: bool = False, **variables) -> Rendering:
        """Renders a conversation."""
        [rendering] = self.render(messages, [(len(messages), prompt)], **variables)
        return rendering


def _refuse_control_tokens(value, tokenizer) -> None:
    control = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    if any(token in text for text in _strings(value) for token in control):
        raise Unreadable("a message spells out one of the model's control tokens")


def _strings(value) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for each in value.items():
            yield from _strings(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _strings(each)


def _by_marks(messages: Messages, template: _ChatTemplate) -> Rendered | None:
    if not template.has_marks:
        return None
    text, spans = template.render_all(messages)
    written = [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]
    if spans is None or len(spans) != len(written):
        return None
    turns = turns_with_loss(messages)
    _refuse_lost(text, messages, turns, template.tools)
    return [(text, [span for span, turn in zip(spans, written, strict=True) if turn in turns])]


def _by_turns(messages: Messages, template: _ChatTemplate) -> Rendered:
    """Renders up to the beginning and up to the end of each turn.

    Returns one text if each of these is a prefix of the next one, else a text for each turn.
    """
    turns = turns_with_loss(messages)
    if len(turns) * len(messages) > MAX_RENDERED:
        raise Unreadable("a conversation of so many turns that this model's chat template takes too long; split it")
    if turns[0] == 0:
        raise Unreadable("it begins with the assistant, whose text the model's chat template does not mark")
    whole, spans, apart = "", [], []
    for turn, (before, after) in zip(turns, _before_and_after(messages, turns, template), strict=True):
        if not after.startswith(before):
            before = _before_answers(messages[:turn], messages[turn], after, template)
        if not (apart or after.startswith(whole)):
            apart = [(whole[:end], [(begin, end)]) for begin, end in spans]
        whole = after
        spans.append((len(before), len(after)))
        if apart:
            apart.append((whole, spans[-1:]))
    if not apart:
        _refuse_lost(whole, messages, turns, template.tools)
        return [(whole, spans)]
    for turn, (text, _) in zip(turns, apart, strict=True):
        _refuse_lost(text, messages[: turn + 1], [turn], template.tools)
    return apart


def _before_and_after(messages: Messages, turns: Sequence[int], template: _ChatTemplate) -> Iterator[tuple[str, str]]:
    for begin in range(0, len(turns), TURNS_AT_ONCE):
        some = turns[begin : begin + TURNS_AT_ONCE]
        cuts = [cut for turn in some for cut in ((turn, True), (turn + 1, False))]
        texts = [rendering.text for rendering in template.render(messages[: some[-1] + 1], cuts)]
        yield from zip(texts[::2], texts[1::2], strict=True)


def _before_answers(messages: Messages, answer: Message, rendered: str, template: _ChatTemplate, **variables) -> str:
    """Returns what stands before an answer whatever it says: what it shares with another one, without a thought.

    Prompts of thinking models open a thought, and templates write a last answer otherwise than an earlier one.
    """
    said = answer["content"].rpartition("</think>")[2].strip()
    other = {"role": "assistant", "content": "b" if said.startswith("a") else "a"}
    both = zip(rendered, template.render_all([*messages, other], **variables).text, strict=False)
    before = rendered[: next((at for at, (one, another) in enumerate(both) if one != another), 0)]
    has_all = all(_find(message["content"], before) is not None for message in messages)
    if not (has_all and rendered[len(before) :].lstrip().startswith(said)):
        if "reasoning_content" in answer or said != answer["content"].strip():
            raise Unreadable("the model's chat template begins answers without a thought, and this one has one")
        raise NotShown
    return before


def _refuse_lost(text: str, messages: Messages, turns: Sequence[int], tools: Sequence[dict]) -> None:
    """Refuses a rendered conversation that lacks a part: many templates ignore what they do not know.

    Args:
        turns: the indices of the messages with loss, which must be there; templates leave out the reasoning of earlier
            ones.
    """
    at = 0
    for message in messages:
        if (role := message["role"]) != "assistant":
            found = _find(message["content"], text, at)
            if found is None:
                raise _no_place_for(f"messages of the role {role}" if role in ROLES else "messages of this role")
            at = found
    # Templates that take thoughts out of an answer keep what follows them.
    if any(_find(messages[turn]["content"].rpartition("</think>")[2], text) is None for turn in turns):
        raise _no_place_for("answers of the assistant")
    calls = [call["function"]["name"] for message in messages for call in message.get("tool_calls", ())]
    described = [name for tool in tools if isinstance(name := tool.get("function", {}).get("name"), str)]
    for names, what in ((calls, "calls of tools"), (described, "descriptions of tools")):
        if any(_find(name, text) is None for name in names):
            raise _no_place_for(what)
    if any(_find(messages[turn].get("reasoning_content", ""), text) is None for turn in turns):
        raise _no_place_for('"reasoning_content"')


def _no_place_for(what: str) -> Unreadable:
    return Unreadable(f"the model's chat template has no place for {what}")


def _find(part: str, text: str, begin: int = 0) -> int | None:
    """Returns where a part ends in a text, as it is or in JSON, after `begin` if possible; None if it is not there."""
    part = part.strip()
    for form in (part, json.dumps(part, ensure_ascii=False)[1:-1]):
        for first in (begin, 0):
            if (at := text.find(form, first)) >= 0:
                return at + len(form)
    return None
