"""Turns records into contents: our own kinds, questions with answers, and records as in Alpaca and ShareGPT.

The names of keys may be in upper case, as in the header of a table.
"""

from sebp_edge.texts.documents import Completion, Content, Conversation, Unreadable

# A prompt and its completion have one of these names each; the first ones are our own.
PROMPTS = ("prompt", "question", "instruction", "query", "input")
COMPLETIONS = ("completion", "answer", "response", "output")
# What a prompt may be about, as in Alpaca's and Dolly's records; it follows the prompt.
CONTEXTS = ("input", "context")
# ShareGPT's names of roles.
ROLES = {"human": "user", "gpt": "assistant", "bing": "assistant", "chatgpt": "assistant", "bard": "assistant"}


def record_content(record) -> Content:
    """Returns the content of one record.

    Raises:
        Unreadable: it has none of the known keys, or a value is not a string.
    """
    if not isinstance(record, dict):
        raise Unreadable("neither a text nor a record")
    record = {key.strip().lower() if isinstance(key, str) else key: value for key, value in record.items()}
    for name in ("messages", "conversations"):
        if name in record:
            return Conversation(_messages(record[name], name))
    if (keys := prompt_and_completion(record)) is not None:
        return Completion(_prompt(record, keys[0]), _string(record, keys[1]))
    if "text" in record:
        return _string(record, "text")
    raise Unreadable('no "text", "prompt" and "completion", or "messages"')


def prompt_and_completion(names) -> tuple[str, str] | None:
    """Returns which of the names, in lower case, are those of the prompt and its completion; None if one is missing."""
    prompt = next((name for name in PROMPTS if name in names), None)
    completion = next((name for name in COMPLETIONS if name in names), None)
    return None if prompt is None or completion is None else (prompt, completion)


def _prompt(record: dict, key: str) -> str:
    """Returns the prompt, followed by what it is about; a "prompt" says that itself."""
    prompt = _string(record, key)
    about = [record[name] for name in CONTEXTS if name in record and name != key and key != "prompt"]
    return "\n\n".join([prompt, *(text for text in about if isinstance(text, str) and text.strip())])


def _string(record: dict, key: str) -> str:
    if not isinstance(record[key], str):
        raise Unreadable(f'"{key}" is not a string')
    return record[key]


def _messages(messages, name: str) -> tuple[dict[str, str], ...]:
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise Unreadable(f'"{name}" is not a list of messages')
    found = tuple(map(_message, messages))
    if not any(message["role"] == "assistant" for message in found):
        raise Unreadable("no message from the assistant")
    return found


def _message(message: dict) -> dict[str, str]:
    """Returns a message with "role" and "content"; ShareGPT's have "from" and "value"."""
    if "from" in message and "role" not in message:
        role, content = message["from"], message.get("value")
        role = ROLES.get(role, role) if isinstance(role, str) else None
    else:
        role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not isinstance(content, str):
        raise Unreadable('a message without "role" and "content" strings')
    return {"role": role, "content": content}
