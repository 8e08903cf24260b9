"""Turns records into contents: texts, prompts with their completions, and conversations, under the usual names.

A record keeps its meaning or is left out with a reason. The names of keys may be in upper case, as in the header of a
table.
"""

from sebp_edge.reading.foreign import foreign_export
from sebp_edge.values.documents import Content, Conversation, Message, PromptCompletion, Unreadable

# A prompt and its completion have one of these names each; the first ones are our own.
PROMPTS = ("prompt", "instruction", "question", "query", "input")
COMPLETIONS = ("completion", "answer", "response", "output")
# What a prompt may be about, as in Alpaca's and Dolly's records; it follows the prompt.
CONTEXTS = ("question", "query", "input", "context", "article", "passage")
SYSTEMS = ("system", "system_prompt")
# Whether an answer is to be learnt: TRL's and LLaMA-Factory's names. Tables spell the values out.
VERDICTS = ("label", "kto_tag")
_NO = (False, "false", "0", -1, "-1", "bad")
# What records and messages may have besides that changes what is said, and what to do about it.
_NOT_READ = {
    **dict.fromkeys(("history", "chat_history"), 'give all turns as "messages"'),
    **dict.fromkeys(("choices", "options"), "write them into the question"),
    **dict.fromkeys(("tools", "functions", "tool_calls", "function_call"), "leave out what is about tools"),
    **dict.fromkeys(
        ("reasoning_content", "thinking", "reasoning"), "write thoughts into the answer, or leave them out"
    ),
    "train_detail": 'mark whole messages with "weight"',
}
# The names of roles in other formats: ShareGPT's, Gemini's, OASST's.
ROLES = {
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "bing", "chatgpt", "bard", "model", "ai", "bot"), "assistant"),
}
_OF_TOOLS = {
    *("tool", "function", "function_call", "function-call", "tool_call", "function_response", "function-response"),
    *("tool_response", "observation", "ipython"),
}
_KNOWN_ROLES = frozenset({"system", "developer", "user", "assistant", *ROLES, *_OF_TOOLS})
# Number of messages of a conversation: more than any model reads.
MAX_MESSAGES = 100_000
_TEXT_PARTS = ("text", "input_text", "output_text")
_NOT_A_MESSAGE = 'a message without "role" and "content" strings'

# The fields of a record or a message by their names in lower case, without those that are null.
Fields = dict


def read_record(record) -> Content:
    """Returns the content of a record."""
    if not isinstance(record, dict):
        raise Unreadable("neither a text nor a record")
    fields = _fields(record)
    try:
        return _content(fields)
    except Unreadable:
        if export := foreign_export(record):
            raise Unreadable(export) from None
        raise


def prompt_and_completion(names) -> tuple[str, str] | None:
    """Returns which of the names, in lower case, are those of the prompt and its completion; None if one is missing."""
    prompt = next((name for name in PROMPTS if name in names), None)
    completion = next((name for name in COMPLETIONS if name in names), None)
    return None if prompt is None or completion is None else (prompt, completion)


def _fields(record: dict) -> Fields:
    fields = {}
    for key, value in record.items():
        if value is not None and fields.setdefault(_lower(key), value) is not value:
            raise Unreadable("an object that has a key twice")
    return fields


def _lower(name):
    return name.strip().lower() if isinstance(name, str) else name


def _content(fields: Fields) -> Content:
    if "chosen" in fields and "rejected" in fields:
        raise Unreadable('a preference; give the answer to learn as "completion"')
    for name in ("messages", "conversations"):
        if name in fields:
            return _conversation(fields, _read_messages(fields[name], name))
    if (keys := prompt_and_completion(fields)) is not None:
        return _answer(fields, *keys)
    if "text" in fields:
        if isinstance(role := fields.get("role"), str) and _lower(role) in _KNOWN_ROLES:
            raise Unreadable('one message of a conversation; save its conversation as a record with "messages"')
        return _string(fields, "text")
    raise Unreadable('no "text", "prompt" and "completion", or "messages"')


def _conversation(fields: Fields, messages: list[Message]) -> Conversation:
    """Returns a conversation that begins with the record's system message, if it has one."""
    _refuse_more(fields)
    for name in VERDICTS:
        if (verdict := _lower(fields.get(name))) in _NO:
            is_false = verdict in (0, "false", "0")
            raise Unreadable(f'an answer that is not to be learnt ("{name}" is {"false" if is_false else verdict})')
    system = next((_string(fields, name) for name in SYSTEMS if name in fields), "")
    if system.strip() and messages[:1] != [{"role": "system", "content": system}]:
        messages = [{"role": "system", "content": system}, *messages]
    if not any(message["role"] == "assistant" for message in messages):
        raise Unreadable("no message from the assistant")
    found = Conversation(tuple(messages))
    if not found.turns:
        raise Unreadable("no message from the assistant is to be learnt")
    return found


def _answer(fields: Fields, prompt: str, completion: str) -> Content:
    """Returns a prompt with its completion; a conversation if there is a system message."""
    asked = "\n\n".join(filter(str.strip, [_string(fields, prompt), *_about(fields, prompt)]))
    answer = _string(fields, completion)
    turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
    conversation = _conversation(fields, turns)
    return PromptCompletion(asked, answer) if len(conversation.messages) == len(turns) else conversation


def _about(fields: Fields, prompt: str) -> list[str]:
    """Returns what the prompt is about and is not in its lines; a "prompt" with a "context" says that itself."""
    names = ("input",) if prompt == "prompt" else CONTEXTS
    texts = [_string(fields, name) for name in names if name != prompt and name in fields]
    return [text for text in texts if f"\n{text}\n" not in f"\n{fields[prompt]}\n"]


def _string(fields: Fields, name: str) -> str:
    if not isinstance(value := fields[name], str):
        raise Unreadable(f'"{name}" is not a string')
    return value


def _refuse_more(fields: Fields) -> None:
    """Raises an Unreadable if something would be lost that changes what is said."""
    for name, advice in _NOT_READ.items():
        if fields.get(name):
            raise Unreadable(f'"{name}" is not read, and changes what is said; {advice}')


# ------------------------------------------------------------------------------------------------------------ messages


def _read_messages(messages, name: str) -> list[Message]:
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise Unreadable(f'"{name}" is not a list of messages')
    if len(messages) > MAX_MESSAGES:
        raise Unreadable(f"a conversation of more than {MAX_MESSAGES:,} messages; split it")
    return [_message(_fields(message)) for message in messages]


def _message(fields: Fields) -> Message:
    """Returns a message of the form that chat templates read; ShareGPT's have "from" and "value"."""
    is_sharegpt = "from" in fields and "role" not in fields
    given, content = fields.get("from" if is_sharegpt else "role"), fields.get("value" if is_sharegpt else "content")
    if not isinstance(given, str):
        raise Unreadable(_NOT_A_MESSAGE)
    role = _lower(given) if _lower(given) in _KNOWN_ROLES else given
    _refuse_more(fields)
    if role in _OF_TOOLS:
        raise Unreadable("a message of a tool, which is not read; leave out what is about tools")
    message: Message = {"role": ROLES.get(role, role), "content": _text(content)}
    if message["role"] == "assistant" and _weight(fields) == 0:
        message["weight"] = 0
    return message | ({"name": name} if isinstance(name := fields.get("name"), str) else {})


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


def _weight(fields: Fields) -> int:
    """Returns whether a message has loss, 1 or 0: OpenAI's "weight", Axolotl's "train" and ms-swift's "loss" say so."""
    weights = [fields[name] for name in ("weight", "train", "loss") if name in fields]
    if any(weight not in (0, 1) for weight in weights):
        raise Unreadable('a message whose "weight" is neither 0 nor 1')
    return 0 if 0 in weights else 1
