"""Recognises a model's chat template, and writes it as a Modelfile for Ollama.

Ollama renders prompts with Go's templates, not with the model's Jinja template. The formats here are a closed list. A
model's template has one of them if it renders test chats in the same way, up to where the next answer begins.
"""

from dataclasses import dataclass
from typing import Literal

from sebp_edge.errors import ExportError
from sebp_edge.export.gguf_tokenizer import adds_bos
from sebp_edge.lessons.conversations import render_prompt
from sebp_edge.values.documents import Unreadable

Messages = list[dict[str, str]]
_CONTENT = ".Content"
RAW = "{{ .Prompt }}"
# Templates that write today's date take this one, which stands in Llama 3.1's own template.
_DATE = "26 Jul 2024"


@dataclass(frozen=True)
class ChatFormat:
    """How a chat is written; ".Content" stands for a message's text.

    Attributes:
        system, user, assistant: how the messages of each role are written.
        begin: what stands before the next answer.
        stop: what ends an answer.
        joined_with: the user's message that the system message is a part of, instead of one by itself; `system` is then
            what precedes the user's text.
        always_system: whether a chat without a system message has an empty one.
    """

    system: str
    user: str
    assistant: str
    begin: str
    stop: str
    joined_with: Literal["first", "last"] | None = None
    always_system: bool = False

    @property
    def template(self) -> str:
        """The format as a Go template of Ollama."""
        system, user, assistant = (
            text.replace(_CONTENT, "{{ $m.Content }}") for text in (self.system, self.user, self.assistant)
        )
        before, roles = "", [("user", user), ("assistant", assistant)]
        first = "(index $.Messages 0)"
        if self.joined_with:
            position = "(eq $i 1)" if self.joined_with == "first" else "(eq (len (slice $.Messages $i)) 1)"
            joined = self.system.replace(_CONTENT, f"{{{{ {first}.Content }}}}")
            joined = f'{{{{ if and {position} (eq {first}.Role "system") }}}}{joined}{{{{ end }}}}'
            roles[0] = ("user", user.replace("{{ $m.Content }}", joined + "{{ $m.Content }}"))
        else:
            roles.insert(0, ("system", system))
        if self.always_system:
            before = f'{{{{ if ne {first}.Role "system" }}}}{self.system.replace(_CONTENT, "")}{{{{ end }}}}'
        branches = "".join(f'{{{{ if eq $m.Role "{role}" }}}}{text}{{{{ end }}}}' for role, text in roles)
        return f"{before}{{{{ range $i, $m := .Messages }}}}{branches}{{{{ end }}}}{self.begin}"

    def render(self, messages: Messages) -> str:
        """Renders a chat up to where the next answer begins, as the template does."""
        has_system = messages[0]["role"] == "system"
        text = self.system.replace(_CONTENT, "") if self.always_system and not has_system else ""
        for number, message in enumerate(messages):
            written = getattr(self, message["role"]) if not (self.joined_with and message["role"] == "system") else ""
            joined = ""
            is_place = number == (1 if self.joined_with == "first" else len(messages) - 1)
            if self.joined_with and has_system and message["role"] == "user" and is_place:
                joined = self.system.replace(_CONTENT, messages[0]["content"])
            text += written.replace(_CONTENT, joined + message["content"])
        return text + self.begin


def _marked(begin: str, end: str, model: str = "assistant", **options) -> ChatFormat:
    """Returns a format whose messages stand between two marks; ROLE stands for the role."""
    roles = {role: begin.replace("ROLE", role) + _CONTENT + end for role in ("system", "user", "assistant")}
    roles["assistant"] = roles["assistant"].replace("assistant", model)
    return ChatFormat(**roles | {"begin": begin.replace("ROLE", model), "stop": end.strip()} | options)


def _mistral(space: str, end: str, joined_with: Literal["first", "last"]) -> ChatFormat:
    return ChatFormat(
        system=f"{_CONTENT}\n\n",
        user=f"[INST]{space}{_CONTENT}{end}",
        assistant=f"{space}{_CONTENT}</s>",
        begin="",
        stop="</s>",
        joined_with=joined_with,
    )


_LLAMA_3 = "<|start_header_id|>ROLE<|end_header_id|>\n\n"
FORMATS = {
    "chatml": _marked("<|im_start|>ROLE\n", "<|im_end|>\n"),
    "llama-3": _marked(_LLAMA_3, "<|eot_id|>"),
    "llama-3.1": _marked(
        _LLAMA_3,
        "<|eot_id|>",
        system=(
            f"{_LLAMA_3.replace('ROLE', 'system')}Cutting Knowledge Date: December 2023\nToday Date: {_DATE}\n\n"
            f"{_CONTENT}<|eot_id|>"
        ),
        always_system=True,
    ),
    "gemma": _marked(
        "<start_of_turn>ROLE\n", "<end_of_turn>\n", "model", system=f"{_CONTENT}\n\n", joined_with="first"
    ),
    "phi-3": _marked("<|ROLE|>\n", "<|end|>\n"),
    "mistral-1": _mistral(" ", " [/INST]", "first"),
    "mistral-3": _mistral(" ", "[/INST]", "last"),
    "mistral-3-first": _mistral(" ", "[/INST]", "first"),
    "mistral-tekken": _mistral("", "[/INST]", "last"),
    "mistral-tekken-first": _mistral("", "[/INST]", "first"),
}
_CHATS = [
    [{"role": "user", "content": "Where is it?"}],
    [
        {"role": "user", "content": "Where is it?"},
        {"role": "assistant", "content": "Here."},
        {"role": "user", "content": "And now?"},
    ],
]
_SYSTEM = {"role": "system", "content": "Be brief."}


def modelfile(tokenizer, file: str, *, needs_chat: bool, raw: str = RAW) -> str:
    """Returns the Modelfile of an exported GGUF file in the same folder.

    Args:
        needs_chat: whether the adapter was trained on chats. Without them, the Modelfile has no chat form, in which the
            adapter was neither trained nor judged.
        raw: the template for an adapter that was not trained on chats.
    """
    if not needs_chat:
        return f'FROM ./{file}\nTEMPLATE """{raw}"""\n'
    found = _recognise(tokenizer) if tokenizer.chat_template else None
    if found is None:
        raise ExportError(
            f"This model's chat template has no known form ({', '.join(FORMATS)}); use --format gguf, which keeps the "
            "template for programs that read Jinja."
        )
    chat_format, system = found
    default = f'SYSTEM """{system}"""\n' if system else ""
    return f'FROM ./{file}\nTEMPLATE """{chat_format.template}"""\n{default}PARAMETER stop "{chat_format.stop}"\n'


def _recognise(tokenizer) -> tuple[ChatFormat, str] | None:
    """Returns the format of a tokenizer's chat template and its default system message; None if it is unknown."""

    def render(chat: Messages) -> str | None:
        try:
            return render_prompt(chat, tokenizer, date_string=_DATE).removeprefix(bos)
        except Unreadable:  # templates refuse a system message, for example
            return None

    # Ollama adds the BOS token itself, if the tokenizer adds it to texts.
    bos = tokenizer.bos_token if adds_bos(tokenizer) else ""

    rendered = [(chat, render(chat)) for chat in _CHATS]
    with_system = [(chat, render(chat)) for chat in ([_SYSTEM, *chat] for chat in _CHATS)]
    for chat_format in FORMATS.values():
        if any(found not in (None, chat_format.render(chat)) for chat, found in with_system):
            continue
        system = _default_system(chat_format, rendered[0][1])
        default = [{"role": "system", "content": system}] if system else []
        if all(found == chat_format.render([*default, *chat]) for chat, found in rendered):
            return chat_format, system
    return None


def _default_system(chat_format: ChatFormat, rendered: str | None) -> str:
    """Returns the system message that a template adds to a chat without one; "" if it adds none."""
    before, after = chat_format.system.split(_CONTENT)
    if chat_format.joined_with or chat_format.always_system or not (rendered or "").startswith(before):
        return ""
    system = rendered.removeprefix(before).partition(after)[0]
    return "" if '"""' in system else system
