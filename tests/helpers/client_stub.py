"""Makes the types of the client in Python from the schema of the protocol; run it to write the file that ships:

python tests/helpers/client_stub.py              # after tests/helpers/message_schema.py
"""

import textwrap
from pathlib import Path

from message_schema import RESULTS, make_schema

from sebp_edge.serve.methods import METHODS

FILE = Path(__file__).parents[2] / "sebp_edge" / "serve" / "client.pyi"
STUB = """# The types of client.py, made from the protocol's schema, not written by hand.
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Callable
from typing import Any, Literal, NotRequired, Self, TypedDict, overload

_OnText = Callable[[str], None] | None
{types}
class ServerError(Exception):
    data: dict[str, Any]
    code: str
    hint: str
    retry: bool

class Client:
    process: Process
    @classmethod
    async def start(cls, command: tuple[str, ...] = (), **settings: Any) -> Self: ...
{calls}
    async def request(self, method: str, params: dict[str, Any], on_text: _OnText = None) -> dict[str, Any]: ...
    def events(self, job: str, since: int = 0) -> AsyncIterator[{event}]: ...
    async def close(self) -> None: ...
    async def __aenter__(self) -> Self: ...
    async def __aexit__(self, *error: object) -> None: ...
"""
CALL = """    @overload
    async def call(self, method: Literal[{names}], *, on_text: _OnText = None, **params: Any) -> {kind}: ..."""
KINDS = {"string": "str", "integer": "int", "number": "float", "boolean": "bool", "null": "None"}
KINDS |= {"object": "dict[str, Any]"}


def stub() -> str:
    """Returns the file that ships: the public names of client.py, and the result of each method."""
    definitions, found = make_schema()["$defs"], {}

    def name_of(name: str) -> str:
        """Returns a definition's name in Python, which is declared then."""
        if name not in found:
            required = definitions[name].get("required", ())
            types = {key: type_of(value) for key, value in definitions[name].get("properties", {}).items()}
            fields = (f'"{key}": {kind if key in required else f"NotRequired[{kind}]"}' for key, kind in types.items())
            line = f'_{name} = TypedDict("_{name}", {{{", ".join(fields)}}})'
            found[name] = "\n".join(textwrap.wrap(line, 120, subsequent_indent="    ", break_long_words=False))
        return f"_{name}"

    def type_of(value: dict) -> str:
        """Returns the type of what a part of the schema allows."""
        match value:
            case {"$ref": path}:
                return name_of(path.rpartition("/")[2])
            case {"const": constant}:
                return f"Literal[{constant!r}]"
            case {"enum": constants}:
                return f"Literal[{', '.join(map(repr, constants))}]"
            case {"anyOf": parts}:
                return " | ".join(map(type_of, parts))
            case {"type": list(kinds)}:
                return " | ".join(type_of({"type": kind}) for kind in kinds)
            case {"type": "array"}:
                return f"list[{type_of(value.get('items') or value.get('prefixItems', [{}])[0])}]"
            case {"type": "object", "additionalProperties": dict(inner)}:
                return f"dict[str, {type_of(inner)}]"
        return KINDS.get(value.get("type"), "Any")

    calls: dict[str, list[str]] = {}
    for method in METHODS:
        calls.setdefault(name_of(RESULTS[method].__name__), []).append(f'"{method}"')
    shown = "\n".join(CALL.format(names=", ".join(names), kind=kind) for kind, names in calls.items())
    event = name_of("JobEvent")
    return STUB.format(types="\n".join(found.values()), calls=shown, event=event)


if __name__ == "__main__":
    FILE.write_text(stub(), encoding="ascii")
