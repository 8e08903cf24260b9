"""Renders conversations with a chat template, exactly as transformers does, within limits of time, memory and length.

A template is a program that came with a model. Only `serve`, in a child process, runs those of strangers. The child
runs this file by its path: it imports nothing of the package, so that it starts fast.
"""

import faulthandler
import json
import os
import threading
import time
from contextlib import suppress
from datetime import datetime

from jinja2 import nodes, pass_eval_context
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

# Bytes of memory that a child may take, and for each byte of a request.
MEMORY, MEMORY_PER_BYTE = 2**29, 20
# The maximum length of a rendered conversation, in characters: of any, for each message and for each character in it.
LENGTH, LENGTH_PER_MESSAGE, LENGTH_PER_CHARACTER = 100_000, 2_000, 10
# A child that is idle for so many seconds ends.
IDLE_SECONDS = 30
_SECONDS_BETWEEN_LOOKS = 0.5
_REASONING = ("reasoning_content", "thinking", "reasoning")


class TooLong(Exception):
    """A rendered conversation is longer than any template makes it that does not mean harm."""


class Template:
    """A compiled chat template.

    Raises:
        Exception: of any kind; a template may raise whatever it likes, here and in `render`.
    """

    def __init__(self, source: str):
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": lambda form: datetime.now().strftime(form),
            "dict": _Dict(),
            "namespace": _Namespace,
        }
        self._marks = environment.extensions[_Generation.identifier]
        self._template = environment.from_string(source)

    def render(
        self, messages: list[dict], tools: list[dict], variables: dict, *, prompt: bool
    ) -> tuple[str, list | None]:
        """Renders a conversation.

        Args:
            variables: of the template, such as the special tokens by their names.
            prompt: whether to add what begins the assistant's answer.

        Returns:
            The text, and the spans in it that the template marks as the assistant's; None if these are not in it.
        """
        characters = len(json.dumps([messages, tools], ensure_ascii=False))
        longest = LENGTH + LENGTH_PER_MESSAGE * len(messages) + LENGTH_PER_CHARACTER * characters
        self._marks.position, self._marks.found = 0, []
        blocks = []
        for block in self._template.generate(
            messages=[_with_reasoning(message) for message in messages],
            tools=tools or None,
            documents=None,
            add_generation_prompt=prompt,
            **variables,
        ):
            blocks.append(block)
            self._marks.position += len(block)
            if self._marks.position > longest:
                raise TooLong
        text = "".join(blocks)
        text.encode()  # a template may take a character of two surrogates apart
        marks = [(begin, begin + len(part)) for begin, part in self._marks.found if text.startswith(part, begin)]
        return text, marks if len(marks) == len(self._marks.found) else None


def answer(template: Template, request: dict) -> list[tuple[str, list | None]] | None:
    """Returns what a template renders of a request; None if it raises an error."""
    messages, tools, variables = request["messages"], request["tools"], request["variables"]
    try:
        return [template.render(messages[:end], tools, variables, prompt=prompt) for end, prompt in request["cuts"]]
    except Exception:  # it may raise anything, MemoryError and RecursionError too
        return None


def _with_reasoning(message: dict) -> dict:
    """Returns a message without null fields; its reasoning has each name that templates know it by."""
    message = {name: value for name, value in message.items() if value is not None}
    reasoning = next((message[name] for name in _REASONING if name in message), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


class _Generation(Extension):
    """Notes what stands between {% generation %} and {% endgeneration %}: what the assistant wrote.

    Attributes:
        position: the length of the text before the block that is rendered now.
        found: pairs of a position and what was marked there.
    """

    tags = frozenset({"generation"})

    def __init__(self, environment):
        super().__init__(environment)
        self.position, self.found = 0, []

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_note"), [], [], body).set_lineno(line)

    @pass_eval_context
    def _note(self, context, caller):
        marked = caller()
        self.found.append((self.position, marked))
        return marked


class _Dict:
    """`dict` in a template, without the attributes of the class."""

    def __call__(self, *args, **kwargs):
        return dict(*args, **kwargs)

    def fromkeys(self, *args, **kwargs):
        return dict.fromkeys(*args, **kwargs)


class _Namespace(Namespace):
    """`namespace` in a template, without attributes that begin with an underscore."""

    def __init__(*args, **kwargs):  # a name in the namespace may be "self"
        self, *args = args
        values = dict(*args, **kwargs)
        for name in values:
            _refuse_private(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name, value):
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError("a private attribute of a namespace")


def _raise_exception(message):
    raise TemplateError(message)


def _tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


# ----------------------------------------------------------------------------------------------------------- the child


def serve() -> None:
    """Reads a template and then conversations from standard input, and writes the rendered ones to standard output.

    Each request is a line with the number of bytes of JSON that follow; each answer is a line of JSON. What a template
    raises is answered with null.
    """
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    requests, answers = os.fdopen(0, "rb", closefd=False), os.fdopen(os.dup(1), "wb")
    nowhere = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    os.dup2(nowhere.fileno(), 1)
    source, template = "", None
    while True:
        # A thread in C ends the process, whatever the template does.
        faulthandler.dump_traceback_later(IDLE_SECONDS, exit=True, file=nowhere)
        _limit_memory(MEMORY)
        if not (size := requests.readline()):
            return
        _limit_memory(MEMORY + MEMORY_PER_BYTE * int(size))
        request = json.loads(requests.read(int(size)))
        try:
            if isinstance(request, str):
                source, template, result = request, None, True
            else:
                template = template or Template(source)
                result = answer(template, request)
        except Exception:  # compiling a template may raise anything too
            result = None
        answers.write(json.dumps(result).encode() + b"\n")
        answers.flush()


def _end_with(parent: int) -> None:
    """Ends this process after its parent was killed, also while a template renders."""
    while os.getppid() == parent:
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    os._exit(1)


def _limit_memory(size: int) -> None:
    try:
        import resource
    except ImportError:
        return  # on Windows; the parent looks at the memory too
    with suppress(AttributeError, ValueError, OSError):  # on macOS
        resource.setrlimit(resource.RLIMIT_AS, (size, resource.getrlimit(resource.RLIMIT_AS)[1]))


if __name__ == "__main__":
    serve()
