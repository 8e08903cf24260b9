"""Makes the TypeScript types of the protocol's messages from their schema; run it to write the file that ships:

python tests/helpers/message_types.py              # after tests/helpers/message_schema.py
"""

import json
import textwrap
from pathlib import Path

from message_schema import RESULTS as ANSWERS
from message_schema import make_schema

from sebp_edge.events import Event
from sebp_edge.serve.messages import JOBS
from sebp_edge.serve.methods import METHODS
from sebp_edge.serve.served_jobs import ACTIVE, ENDED

FILE = Path(__file__).parents[2] / "sebp_edge" / "serve" / "messages.d.ts"
HEAD = """// The messages of `sebp-edge serve`: made from its schema, not written by hand.
// Within a version of the protocol, events and fields are only added: ignore those that you do not know.
"""
RESULTS = (
    "result_adapt",
    "unchanged_adapt",
    "result_forget",
    "result_export",
    "result_verify",
    "result_download",
)  # of jobs
_KEPT = "\1"  # a space at which no line ends
# What the schema leaves open, which no line of `--json` has.
EXACT = {
    ("JobEvent", "event"): "EventMessage",
    ("Job", "kind"): "keyof JobParamsOf",
    ("StartJobParams", "kind"): "keyof JobParamsOf",
    ("StartJobParams", "params"): "JobParamsOf[keyof JobParamsOf]",
    **{(name, "state"): "State" for name in ("Job", "state")},
    **{(name, "error"): "JobError | null" for name in ("Job", "state")},
    **{(name, "result"): "JobResult | null" for name in ("Job", "state")},
}


def typescript() -> str:
    """Returns the file that ships: the events and results of jobs, and the parameters of each method."""
    definitions, found = make_schema()["$defs"], {}

    def name_of(name: str) -> str:
        """Returns a definition's name in TypeScript, which is declared then."""
        named = name if name[0].isupper() else "".join(map(str.capitalize, name.split("_"))) + "Message"
        if name not in found:
            found[name] = ""
            required = definitions[name].get("required", ())
            fields = {
                f"{key}{'' if key in required else '?'}": EXACT.get((name, key)) or type_of(value)
                for key, value in definitions[name].get("properties", {}).items()
            }
            found[name] = _declaration(named, _fields(fields) if fields else "Record<string, never>")
        return named

    def type_of(value: dict) -> str:
        """Returns the type of what a part of the schema allows."""
        match value:
            case {"$ref": path}:
                return name_of(path.rpartition("/")[2])
            case {"const": constant}:
                return json.dumps(constant)
            case {"enum": constants}:
                return " | ".join(map(json.dumps, constants))
            case {"anyOf": parts}:
                return " | ".join(map(type_of, parts))
            case {"type": list(kinds)}:
                return " | ".join(type_of({"type": kind}) for kind in kinds)
            case {"type": "array", "prefixItems": parts}:
                return f"[{', '.join(map(type_of, parts))}]"
            case {"type": "array"}:
                inner = type_of(value.get("items", {}))
                return f"({inner})[]" if " " in inner else f"{inner}[]"
            case {"type": "object", "additionalProperties": dict(inner)}:
                return f"Record<string, {type_of(inner)}>"
            case {"type": kind}:
                kinds = {"object": "Record<string, unknown>", "integer": "number"}
                return kinds.get(kind, kind)
        return "unknown"

    events = [*sorted(kind.event for kind in Event.__subclasses__()), "state"]
    own = {
        "State": " | ".join(map(json.dumps, ["queued", "paused", *sorted(ACTIVE), *sorted(ENDED)])),
        "EventMessage": " | ".join(map(name_of, events)),
        "JobError": f"{name_of('RefusalData')} & {{ message: string }}",
        "WithoutHead<Message>": 'Message extends unknown ? Omit<Message, "v" | "time" | "job"> : never',
        "JobResult": f"WithoutHead<{' | '.join(map(name_of, RESULTS))}>",
        "JobParamsOf": _fields({kind: name_of(params.__name__) for kind, params in JOBS.items()}),
        "Methods": _fields({f'"{name}"': name_of(params.__name__) for name, params in METHODS.items()}),
        "Results": _fields({f'"{name}"': name_of(ANSWERS[name].__name__) for name in METHODS}),
    }
    for name in ("Job", "JobEvent"):
        name_of(name)
    return "\n".join(
        [HEAD, *(_declaration(*each) for each in own.items()), *(found[name] for name in sorted(found)), ""]
    )


def _fields(types: dict[str, str]) -> str:
    kept = (f"{name}: {kind};".replace(" ", _KEPT) for name, kind in types.items())
    return "{ " + " ".join(kept) + " }"


def _declaration(name: str, kind: str) -> str:
    wrapped = textwrap.wrap(f"export type {name} = {kind};", 120, subsequent_indent="  ", break_on_hyphens=False)
    return "\n".join(wrapped).replace(_KEPT, " ")


if __name__ == "__main__":
    FILE.write_text(typescript(), encoding="ascii")
