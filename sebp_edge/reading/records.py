"""Turns records into contents: our own kinds, and those of Alpaca, Dolly, ShareGPT, OpenAI and TRL.

A record keeps its meaning or is left out with a reason. The names of keys may be in upper case, as in the header of a
table.
"""

import json
from collections.abc import Iterable, Iterator

from sebp_edge.reading.foreign import foreign_export
from sebp_edge.values.documents import Content, Conversation, Message, PromptCompletion, Unreadable, texts_of

# A prompt and its completion have one of these names each; the first ones are our own.
PROMPTS = ("prompt", "instruction", "question", "query", "input")
COMPLETIONS = ("completion", "answer", "response", "output")
# What a prompt may be about, as in Alpaca's and Dolly's records; it follows the prompt.
CONTEXTS = ("question", "query", "input", "context", "article", "passage")
SYSTEMS = ("system", "system_prompt")
HISTORIES = ("history", "chat_history")
# Whether an answer is to be learnt: TRL's and LLaMA-Factory's names. Tables spell the values out.
VERDICTS = ("label", "kto_tag")
_NO = (False, "false", "0", -1, "-1", "bad")
_CALLS = ("function_call", "function-call", "tool_call")
# The names of roles in other formats: ShareGPT's, Gemini's, OASST's, OpenAI's older ones.
ROLES = {
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "bing", "chatgpt", "bard", "model", "ai", "bot"), "assistant"),
    **dict.fromkeys(_CALLS, "assistant"),
    **dict.fromkeys(("function_response", "function-response", "tool_response"), "tool"),
    **dict.fromkeys(("observation", "function", "ipython"), "tool"),
}
# Number of messages of a conversation: more than any model reads.
MAX_MESSAGES = 100_000
_REASONING = ("reasoning_content", "thinking", "reasoning")
_TEXT_PARTS = ("text", "input_text", "output_text")
_NOT_A_MESSAGE = 'a message without "role" and "content" strings'
_NOT_CALLS = "a call of a tool without its name"
_NOT_PAIRS = '"history" is not a list of pairs'
_NOT_JSON = "a call or a description of a tool that is not JSON"
# The names of fields that may be reported. Others are not quoted, since they may be the user's own words.
_QUOTABLE = {
    *("title", "subject", "topic", "summary", "abstract", "description", "caption", "keywords", "category", "source"),
    *("explanation", "rationale", "reason", "thought", "thoughts", "comment", "comments", "note", "notes", "feedback"),
    *("body", "content", "text", "label", "context", "background", "evidence", "hint", "hints", "critique", "metadata"),
    *(*PROMPTS, *COMPLETIONS, *SYSTEMS, *_REASONING),
}
# Fields of fewer words are numbers, dates, names and categories.
_MIN_WORDS = 4


def read_record(record) -> tuple[Content, set[str]]:
    """Returns the content of a record, and the names of the fields with words in them that were not read.

    A name that may not be quoted is "".
    """
    if not isinstance(record, dict):
        raise Unreadable("neither a text nor a record")
    fields = _Fields(record)
    try:
        content = _content(fields)
        return content, fields.unread(texts_of(content))
    except Unreadable:
        if export := foreign_export(record):
            raise Unreadable(export) from None
        raise


def is_preference(names) -> bool:
    """Whether there are two answers by these names, in lower case, of which one was chosen."""
    return "chosen" in names and "rejected" in names


def prompt_and_completion(names) -> tuple[str, str] | None:
    """Returns which of the names, in lower case, are those of the prompt and its completion; None if one is missing."""
    prompt = next((name for name in PROMPTS if name in names), None)
    completions = ("chosen",) if is_preference(names) else COMPLETIONS
    completion = next((name for name in completions if name in names), None)
    return None if prompt is None or completion is None else (prompt, completion)


class _Fields(dict):
    """The fields of a record by their names in lower case, without those that are null."""

    def __init__(self, record: dict):
        for key, value in record.items():
            if value is not None and self.setdefault(_lower(key), value) is not value:
                raise Unreadable("an object that has a key twice")
        self._taken = {"name"}
        self.unread_in_messages: set[str] = set()

    def take(self, *names: str):
        """Returns the first of these fields that is there; marks it as read."""
        name = next((name for name in names if name in self), names[0])
        self._taken.add(name)
        return self.get(name)

    def take_string(self, name: str) -> str:
        if not isinstance(value := self.take(name), str):
            raise Unreadable(f'"{name}" is not a string')
        return value

    def take_messages(self, name: str) -> Iterator["_Fields"]:
        messages = self.take(name)
        if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
            raise Unreadable(f'"{name}" is not a list of messages')
        _refuse_long(messages)
        return map(_Fields, messages)

    def unread(self, texts: Iterable[str] = ()) -> set[str]:
        """Returns which were not read, also of messages; texts are those that were read, which a field may repeat."""
        left = [name for name in self.keys() - self._taken if _has_words(self[name])]
        left = [name for name in left if not any(self[name] in text for text in texts if isinstance(self[name], str))]
        return {name if name in _QUOTABLE else "" for name in left} | self.unread_in_messages


def _lower(name):
    return name.strip().lower() if isinstance(name, str) else name


def _strings(value) -> list[str]:
    """Returns the strings in a list or an object, and in the lists directly in it."""
    values = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    return [text for each in values for text in (each if isinstance(each, list) else [each]) if isinstance(text, str)]


def _has_words(value) -> bool:
    if isinstance(value, list):
        return any(_has_words(each) for each in value if isinstance(each, str))
    return isinstance(value, str) and len(value.split(maxsplit=_MIN_WORDS)) >= _MIN_WORDS


def _content(fields: _Fields) -> Content:
    if is_preference(fields):
        return _preferred(fields)
    for name in ("messages", "conversations"):
        if name in fields:
            return _conversation(fields, _read_messages(fields, name))
    if (keys := prompt_and_completion(fields)) is not None:
        prompt, completion = keys
        return _answer(fields, prompt, completion)
    if "text" in fields:
        if isinstance(role := fields.get("role"), str) and _lower(role) in _KNOWN_ROLES:
            raise Unreadable('one message of a conversation; save its conversation as a record with "messages"')
        return fields.take_string("text")
    raise Unreadable('no "text", "prompt" and "completion", or "messages"')


def _preferred(fields: _Fields) -> Content:
    """Returns the chosen answer after what it answers; the rejected one is not learnt."""
    fields.take("rejected")
    if isinstance(fields["chosen"], dict):  # as in LLaMA-Factory's conversations
        fields["chosen"] = [fields["chosen"]]
    before = next((_read_messages(fields, name) for name in ("messages", "conversations") if name in fields), [])
    messages = before + _as_messages(fields, "chosen", "assistant")
    asked = max((at for at, message in enumerate(messages) if message["role"] == "user"), default=None)
    if asked is not None:  # also where "chosen" repeats the prompt, as in TRL's records without one
        return _conversation(fields, _without_loss(messages[:asked]) + messages[asked:])
    if (keys := prompt_and_completion(fields)) is None:
        raise Unreadable('a preference without a "prompt"; give the answer to learn as "completion"')
    return _answer(fields, *keys)


def _conversation(fields: _Fields, messages: list[Message]) -> Conversation:
    """Returns a conversation that begins with the record's system message and earlier turns, if it has any."""
    for name in VERDICTS:
        if (verdict := _lower(fields.get(name))) in _NO:
            is_false = verdict in (0, "false", "0")
            raise Unreadable(f'an answer that is not to be learnt ("{name}" is {"false" if is_false else verdict})')
    before: list[Message] = []
    system = fields.take(*SYSTEMS)
    if system is not None and not isinstance(system, str):
        raise Unreadable('"system" is not a string')
    if system and system.strip() and messages[:1] != [{"role": "system", "content": system}]:
        before.append({"role": "system", "content": system})
    messages = before + _history(fields) + messages
    if not any(message["role"] == "assistant" for message in messages):
        raise Unreadable("no message from the assistant")
    found = Conversation(tuple(messages), _tools(fields))
    if not found.turns:
        raise Unreadable("no message from the assistant is to be learnt")
    return found


def _answer(fields: _Fields, prompt: str, completion: str) -> Content:
    """Returns a prompt with its completion; a conversation if the record has more, or if they are messages."""
    plain = isinstance(fields[prompt], str) and isinstance(fields[completion], str)
    asked, answer = _as_messages(fields, prompt, "user"), _as_messages(fields, completion, "assistant")
    if plain:
        for name in ("choices", "options"):
            if any(text not in fields[prompt] for text in _strings(fields.get(name))):
                raise Unreadable(f'a question whose "{name}" are apart from it; write them into the question')
        texts = [fields[prompt], *_about(fields, prompt)]
        asked[0]["content"] = "\n\n".join(filter(str.strip, texts))
        if isinstance(whole := fields.get("text"), str) and fields[completion] in whole:
            fields.take("text")  # Alpaca's "text" repeats the record
    else:
        asked = _without_loss(asked)
        if not any(message["role"] == "assistant" for message in answer):
            raise Unreadable("no message from the assistant")
    conversation = _conversation(fields, asked + answer)
    if plain and len(conversation.messages) == 2 and not conversation.tools:
        return PromptCompletion(*(message["content"] for message in conversation.messages))
    return conversation


def _as_messages(fields: _Fields, name: str, role: str) -> list[Message]:
    if isinstance(fields[name], str):
        return [{"role": role, "content": fields.take_string(name)}]
    if isinstance(fields[name], list) and all(isinstance(message, dict) for message in fields[name]):
        return _read_messages(fields, name)
    raise Unreadable(f'"{name}" is not a string')


def _about(fields: _Fields, prompt: str) -> list[str]:
    """Returns what the prompt is about and is not in its lines; a "prompt" with a "context" says that itself."""
    names = ("input",) if prompt == "prompt" else CONTEXTS
    texts = [fields.take_string(name) for name in names if name != prompt and name in fields]
    return [text for text in texts if f"\n{text}\n" not in f"\n{fields[prompt]}\n"]


def _history(fields: _Fields) -> list[Message]:
    """Returns the turns before the prompt, which are context and have no loss."""
    name = next((name for name in HISTORIES if name in fields), "history")
    history = fields.take(name) or []
    history = _parsed(history, _NOT_PAIRS) if isinstance(history, str) else history
    if not isinstance(history, list):
        raise Unreadable(_NOT_PAIRS)
    if history and all(isinstance(turn, dict) for turn in history):
        return _without_loss(_read_messages(fields, name))
    _refuse_long(history)
    found: list[Message] = []
    for turn in history:
        if not (isinstance(turn, list | tuple) and len(turn) == 2 and all(isinstance(text, str) for text in turn)):
            raise Unreadable(_NOT_PAIRS)
        asked, answer = turn
        found += [{"role": "user", "content": asked}, {"role": "assistant", "content": answer, "weight": 0}]
    return found


# ------------------------------------------------------------------------------------------------------------ messages


def _read_messages(fields: _Fields, name: str) -> list[Message]:
    found = []
    for given in fields.take_messages(name):
        found.append(_message(given))
        fields.unread_in_messages |= given.unread()
    return found


def _without_loss(messages: list[Message]) -> list[Message]:
    return [message | {"weight": 0} if message["role"] == "assistant" else message for message in messages]


def _refuse_long(messages: list) -> None:
    if len(messages) > MAX_MESSAGES:
        raise Unreadable(f"a conversation of more than {MAX_MESSAGES:,} messages; split it")


def _message(fields: _Fields) -> Message:
    """Returns a message of the form that chat templates read; ShareGPT's have "from" and "value"."""
    is_sharegpt = "from" in fields and "role" not in fields
    given, content = fields.take("from" if is_sharegpt else "role"), fields.take("value" if is_sharegpt else "content")
    if not isinstance(given, str):
        raise Unreadable(_NOT_A_MESSAGE)
    role = given.strip().lower() if given.strip().lower() in _KNOWN_ROLES else given
    message: Message = {"role": ROLES.get(role, role)}
    calls = _calls(fields, content if role in _CALLS else None)
    if role in _CALLS and not calls:
        raise Unreadable(_NOT_CALLS)
    if role in _CALLS or (content is None and calls):
        content = ""
    message["content"] = _text(content)
    if calls:
        message["tool_calls"] = calls
    if message["role"] == "assistant":
        _add_reasoning(message, fields)
        if _weight(fields) == 0:
            message["weight"] = 0
    names = ("name", "tool_call_id") if message["role"] == "tool" else ("name",)
    return message | {key: value for key in names if isinstance(value := fields.take(key), str)}


_KNOWN_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", *ROLES})


def _text(content) -> str:
    """Returns a message's content; parts of text are one text, as in chat templates."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise Unreadable(_NOT_A_MESSAGE)
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, dict) and part.get("type", "text") in _TEXT_PARTS else part
        if not isinstance(text, str):
            raise Unreadable("a message with a part that is not text, such as an image")
        texts.append(text)
    return "".join(texts)


def _add_reasoning(message: Message, fields: _Fields) -> None:
    reasoning = fields.take(*_REASONING)
    if reasoning is not None and not isinstance(reasoning, str):
        raise Unreadable('"reasoning_content" is not a string')
    if reasoning and reasoning.strip():
        message["reasoning_content"] = reasoning


def _weight(fields: _Fields) -> int:
    """Returns whether a message has loss, 1 or 0: OpenAI's "weight", Axolotl's "train" and ms-swift's "loss" say so."""
    if "train_detail" in fields:
        raise Unreadable('a message of which a part is to be learnt ("train_detail")')
    weights = [fields.take(name) for name in ("weight", "train", "loss") if name in fields]
    if any(weight not in (0, 1) for weight in weights):
        raise Unreadable('a message whose "weight" is neither 0 nor 1')
    return 0 if 0 in weights else 1


def _calls(fields: _Fields, function_call: str | None) -> list[dict]:
    """Returns the calls of tools in a message, in OpenAI's form with arguments as objects, which templates expect.

    Args:
        function_call: the value of a ShareGPT message that is a call.
    """
    calls = fields.take("tool_calls")
    if not calls:
        call = fields.take("function_call") if not isinstance(function_call, str) else _parsed(function_call)
        calls = call if isinstance(call, list) else [] if call is None else [call]
    if not isinstance(calls, list):
        raise Unreadable(_NOT_CALLS)
    return [_call(call) for call in calls]


def _call(call) -> dict:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Unreadable(_NOT_CALLS)
    arguments = function.get("arguments", {})
    arguments = _parsed(arguments) if isinstance(arguments, str) and arguments.strip() else arguments or {}
    identity = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return {**identity, "type": "function", "function": {"name": function["name"], "arguments": _plain(arguments)}}


def _tools(fields: _Fields) -> tuple[dict, ...]:
    """Returns the descriptions of the tools that the assistant may call."""
    tools = fields.take("tools", "functions")
    tools = _parsed(tools) if isinstance(tools, str) and tools.strip() else tools or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise Unreadable('"tools" is not a list of descriptions')
    tools = [
        tool if isinstance(tool.get("function"), dict) else {"type": "function", "function": tool} for tool in tools
    ]
    return tuple(_plain(tools))


def _parsed(text: str, reason: str = _NOT_JSON):
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise Unreadable(reason) from None


def _plain(value):
    """Returns a copy of a value that an app gave, as it is in JSON."""
    try:
        return json.loads(json.dumps(value))
    except (ValueError, TypeError, RecursionError):
        raise Unreadable(_NOT_JSON) from None
