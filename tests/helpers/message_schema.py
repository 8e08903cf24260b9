"""Makes the JSON Schema of all messages from the classes that they are made of; run it to write the file that ships:

    python tests/helpers/message_schema.py              # also `released`, after a release: what must stay from then on

A message of a new class needs an entry in `MESSAGES`; pydantic's models of another protocol go into `OTHERS`.
"""

import json
import sys
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_type_hints

from pydantic import Field, create_model
from pydantic.json_schema import models_json_schema

from sebp_edge import errors
from sebp_edge.ask.answer import Answer
from sebp_edge.cli.doctor_checks import Finding
from sebp_edge.engine.memory.footprint import Footprint
from sebp_edge.engine.memory.memory_options import MemoryOptions
from sebp_edge.engine.memory.memory_plan import Plan
from sebp_edge.engine.models.catalog import CatalogEntry
from sebp_edge.engine.models.completion import Completion
from sebp_edge.engine.models.generation import Generation
from sebp_edge.errors import SebpEdgeError
from sebp_edge.events import PROTOCOL, Event
from sebp_edge.export.export_result import ExportResult
from sebp_edge.recipe import Recipe
from sebp_edge.research.analysis.analysis import Analysis
from sebp_edge.run.downloading import Downloaded
from sebp_edge.run.inspection import Inspection
from sebp_edge.run.result import KEYS, AdaptResult
from sebp_edge.run.unchanged import UnchangedResult
from sebp_edge.run.verify_forgotten import Verification
from sebp_edge.serve import messages
from sebp_edge.serve.served_jobs import ServedJob
from sebp_edge.store.difference import Difference
from sebp_edge.store.erasure import Receipt
from sebp_edge.store.garbage import OldVersion
from sebp_edge.store.record import AdapterRecord
from sebp_edge.store.training_report import KeptSamples, TrainingReport

FILE = Path(__file__).parents[2] / "sebp_edge" / "basics" / "schema.json"
RELEASED = Path(__file__).parents[1] / "messages" / "released.txt"


def hints(kind: type, *without: str) -> dict[str, Any]:
    """Returns the types of a class's fields, paths as strings."""
    names = {each.name for each in fields(kind)} if is_dataclass(kind) else kind.__annotations__
    found = {name: hint for name, hint in get_type_hints(kind).items() if name in names and name not in without}
    return {name: str if hint is Path else hint for name, hint in found.items()}


CHOICE = {"recipe": str, "method": str, "r": int, "dtype": str, **hints(MemoryOptions), "folds_at_once": bool}
CHOICE |= {"peak": int, "host_memory": int, "seconds": float | None, "footprint": Footprint}
Choice = create_model("Choice", **CHOICE)
PLAN = hints(Plan, "requested_budget", "chosen") | CHOICE | dict.fromkeys(("larger", "smaller", "full"), Choice | None)
DOCUMENT = {"name": str | None, "number": int | None, "hash": str, "tokens": int | None, "split": str | None}
Document = create_model("Document", **DOCUMENT, absent=bool)
Source = create_model("Source", document=str, headings=list[str], line=int, text=str, date=str, path=str | None)
SAVED = {"name": str, "version": int, "active": bool, "adapter_path": str}
LOCATED = {"name": str | None, "version": int | None}
CODES = sorted(error.code for error in vars(errors).values() if isinstance(error, type) and hasattr(error, "code"))
HTML = {"html": str | None}
ADAPTED = {
    name: get_type_hints(AdaptResult).get(name) or get_type_hints(getattr(AdaptResult, name).fget)["return"]
    for name in KEYS.split()
} | {"adapter_path": str}

INSPECTION = hints(Inspection, "plan", "authors") | {"plan": create_model("Plan", **PLAN) | None, "summary": str}
DIFFERENCE = hints(Difference) | dict.fromkeys(("came", "went"), list[Document])
DIFFERENCE |= {"changed": list[tuple[Document, Document]]}
REPORT = LOCATED | {"active": bool, "record": AdapterRecord, "training": TrainingReport | None}
REPORT |= {"samples": KeptSamples | None}

# Keys that events and results have had since a later version; those of before lack them.
ADDED: dict[type, dict[str, Any]] = {Answer: {"sentence": str, "line": int | None, "sentences": tuple[str, ...]}}
# The value of `event`, that of `result_of`, and the types of the other keys; those in the second dict may be missing.
MESSAGES: list[tuple[str, str | None, dict[str, Any], dict[str, Any]]] = [
    *(
        (kind.event, None, hints(kind, "time", "job", *ADDED.get(kind, {})), ADDED.get(kind, {}))
        for kind in Event.__subclasses__()
    ),
    ("error", None, {"error": str, "code": str, "message": str, "hint": str, "retry": bool, "exit_code": int}, LOCATED),
    ("text", None, {"text": str}, {}),
    ("state", None, {"state": str, "resumable": bool, "error": dict | None}, {"result": dict}),
    ("result", "adapt", ADAPTED | {"unchanged": Literal[False], "warnings": list[str], "summary": str}, {}),
    ("result", "adapt", hints(UnchangedResult) | {"unchanged": Literal[True], "summary": str}, {}),
    ("result", "export", hints(ExportResult) | {"summary": str}, {}),
    ("result", "forget", hints(Receipt), {}),
    ("result", "verify", hints(Verification), {}),
    ("result", "download", hints(Downloaded), {}),
    ("result", "generate", {"prompt": str | list[dict[str, str]], "text": str}, {}),
    ("result", "ask", {"question": str, **hints(Answer, *ADDED[Answer]), "sources": list[Source]}, ADDED[Answer]),
    ("inspection", None, INSPECTION, {}),
    ("plan", None, PLAN, {}),
    ("analysis", None, hints(Analysis) | {"losses": list[dict], **HTML}, {}),
    ("model", None, {"name": str, "on_this_machine": bool}, {}),
    ("recipe", None, hints(Recipe) | {"learning_rate": float}, {"learning_rates": list[float]}),
    ("finding", None, hints(Finding), {}),
    ("adapter", None, SAVED | hints(AdapterRecord), {"manifest": list[Document]}),
    ("report", None, REPORT | HTML, {}),
    ("diff", None, DIFFERENCE, {}),
    (
        "stored_job",
        None,
        dict.fromkeys(("id", "kind", "adapter", "state", "begun"), str)
        | {"progress": float, "model": str | None, "texts": list[str] | None, "process": int, "size": int},
        {},
    ),
    ("removed_job", None, {"id": str}, {}),
    ("renamed", None, {"name": str, "new_name": str}, {}),
    ("removed", None, {"name": str, "versions": list[int], "active": int | None}, {}),
    ("garbage", None, {"keep": int, "versions": list[dict], "leftovers": list[str], "size": int}, {}),
]


def _params(kind: type):
    """Returns pydantic's model of a request's parameters; those with a default may be missing."""
    types = hints(kind)
    values = {each.name: (types[each.name], ... if each.default is MISSING else each.default) for each in fields(kind)}
    return create_model(kind.__name__, **values)


# Pydantic's models of other protocols, which are defined in the schema, but are no lines of `--json`: those of `serve`.
OTHERS = [_params(each) for name, each in sorted(vars(messages).items()) if name.endswith("Params")]
Job = create_model("Job", **{name: (hint, ...) for name, hint in hints(ServedJob).items()})
OTHERS.append(Job)
OTHERS.append(
    create_model("JobEvent", job=str, number=int, phase=str, progress=float, seconds_left=float | None, event=dict)
)
OTHERS.append(create_model("RefusalData", code=str, hint=str, retry=bool))


def _or_null(hint):
    """Returns a type of JSON, which has no NaN, so that null takes its place."""
    return float | None if hint is float else hint


def _answer(name: str, /, **values):
    """Returns pydantic's model of a method's result."""
    return create_model(name, **{key: (_or_null(hint), ...) for key, hint in values.items()})


Version = _answer("SavedVersion", **SAVED, **hints(AdapterRecord))
Worker = _answer("WorkerState", pid=int, memory=int | None, requests=int)
Loaded = _answer("LoadedModel", model=str, size=int, device=str, dtype=str)
Listed = _answer("ListedAdapter", name=str, versions=list[int], active=int | None, base_model=str | None)
Unreadable = _answer("UnreadableAdapter", name=str, message=str)
Known = _answer("KnownModel", name=str, **hints(CatalogEntry))
STATUS = {"pid": int, "memory": int, "worker": Worker | None, "job": str | None, "queued": int, "problem": dict | None}
HEALTH = {"versions": dict[str, str], "device": str | None, "free_memory": int | None, "free_host_memory": int}
HASH = Annotated[str, Field(alias="schema")]  # the name of one of pydantic's methods
ASKED = {**hints(Answer), "sources": list[Source]}
# The results of the protocol's methods.
RESULTS = {
    **dict.fromkeys(("ping", "shutdown", "unload", "cancel", "jobs.remove", "jobs.unsubscribe"), _answer("NoResult")),
    "status": _answer("StatusResult", **STATUS),
    "initialize": _answer("InitializeResult", protocol=int, version=str, schema_=HASH, pid=int, methods=list[str]),
    "health": _answer("HealthResult", **HEALTH, loaded=Loaded | None),
    "folders": _answer("FoldersResult", folders=list[str]),
    **dict.fromkeys(
        ("jobs.start", "jobs.get", "jobs.pause", "jobs.resume", "jobs.cancel", "jobs.subscribe"),
        _answer("OneJobResult", job=Job),
    ),
    "jobs.list": _answer("JobsResult", jobs=list[Job]),
    "adapters.list": _answer("AdaptersResult", adapters=list[Listed], unreadable=list[Unreadable]),
    "adapters.history": _answer("HistoryResult", name=str, versions=list[Version]),
    **dict.fromkeys(
        ("adapters.activate", "adapters.rollback", "adapters.remove"),
        _answer("ActiveResult", name=str, active=int | None),
    ),
    "adapters.rename": _answer("NameResult", name=str),
    "adapters.documents": _answer("DocumentsResult", name=str, version=int, documents=list[Document]),
    "adapters.diff": _answer("DiffResult", **DIFFERENCE),
    **dict.fromkeys(("adapters.export", "adapters.import"), Version),
    "adapters.gc": _answer("GarbageResult", keep=int, versions=list[OldVersion], leftovers=list[str], size=int),
    "report": _answer("ReportResult", report=_answer("VersionReport", **REPORT), html=str),
    "models": _answer("ModelsResult", known=list[Known], local=list[str]),
    "recipes": _answer("RecipesResult", recipes=list[str]),
    "inspect": _answer("InspectResult", event=Literal["inspection"], **INSPECTION),
    "plan": _answer("PlanResult", **PLAN),
    "ask": _answer("AskResult", **ASKED),
    "search": _answer("SearchResult", found=bool, hits=list[create_model("Hit", passage=Source, strength=float)]),
    "generate": _answer("GenerateResult", **hints(Generation)),
    "complete": _answer("CompleteResult", text=str, **hints(Completion)),
}


def make_schema() -> dict:
    """Returns the JSON Schema: a message is any of `anyOf`."""
    models = [_model(*each) for each in MESSAGES]
    written = [(model, "serialization") for model in (*models, *dict.fromkeys(RESULTS.values()))]
    _, found = models_json_schema([*written, *((model, "validation") for model in OTHERS)])
    definitions = {name: _plain(definition) for name, definition in sorted(found["$defs"].items())}
    optional = {model.__name__: may_lack for model, (*_, may_lack) in zip(models, MESSAGES, strict=True)}
    optional["Source"] = ("date", "path")
    for name, definition in definitions.items():
        if "properties" in definition and not name.endswith("Params"):
            definition["required"] = [each for each in definition["properties"] if each not in optional.get(name, ())]
    definitions["error"]["properties"]["code"]["examples"] = CODES
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Messages of sebp-edge",
        "description": "Each line of --json, and each event of the SDK. Ignore keys and events that you do not know.",
        "anyOf": [{"$ref": f"#/$defs/{model.__name__}"} for model in models],
        "$defs": definitions,
    }


def schema_text() -> str:
    """Returns the file that ships: one definition per line."""
    lines = []
    for key, value in make_schema().items():
        if key == "$defs":
            own = ",\n".join(f"{json.dumps(name)}: {json.dumps(each)}" for name, each in value.items())
            lines.append(f"{json.dumps(key)}: {{\n{own}\n}}")
        else:
            lines.append(f"{json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def surface(schema: dict) -> list[str]:
    """Returns what readers rely on: a line for each key of a definition, with its type, and one for each code."""
    found = [f"code {code}" for code in schema["$defs"]["error"]["properties"]["code"]["examples"]]
    for name, definition in schema["$defs"].items():
        for key, value in definition.get("properties", {}).items():
            may_lack = "" if key in definition.get("required", ()) else "?"
            types = {word: each for word, each in value.items() if word != "examples"}
            found.append(f"{name}.{key}{may_lack} {json.dumps(types)}")
    return sorted(found)


def error_table() -> str:
    """Returns the table of errors for the page for apps."""
    kinds = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, SebpEdgeError)]
    rows = [
        (f"`{kind.code}`", f"`{kind.__name__}`", kind.__doc__.splitlines()[0], "yes" if kind.retry else "no")
        for kind in sorted(kinds, key=lambda kind: kind.code)
    ]
    head = [("code", "error", "means", "retry"), ("---",) * 4]
    return "\n".join(f"| {' | '.join(row)} |" for row in head + rows) + "\n"


def _model(event: str, result_of: str | None, required: dict[str, Any], optional: dict[str, Any]):
    """Returns pydantic's model of a message."""
    known: dict[str, Any] = {"v": Literal[PROTOCOL], "time": float, "job": str, "event": Literal[event]}
    if result_of is not None:
        known["result_of"] = Literal[result_of]
    name = "_".join(filter(None, ["unchanged" if _is_unchanged(required) else event, result_of]))
    values = {key: (_or_null(hint) if key in required else hint, ...) for key, hint in (known | required).items()}
    values |= {key: (Union[hint, None], None) for key, hint in optional.items()}  # noqa: UP007
    return create_model(name, **values)


def _is_unchanged(required: dict[str, Any]) -> bool:
    return required.get("unchanged") == Literal[True]


def _plain(definition):
    """Leaves out titles and defaults, which say nothing that the names do not say."""
    if isinstance(definition, list):
        return [_plain(each) for each in definition]
    if not isinstance(definition, dict):
        return definition
    found = {
        key: {name: _plain(each) for name, each in value.items()} if key == "properties" else _plain(value)
        for key, value in definition.items()
        if key not in ("title", "default", "description")
    }
    types = [each.get("type") for each in found.get("anyOf", ())] if list(found) == ["anyOf"] else []
    if types and all(len(each) == 1 and isinstance(each.get("type"), str) for each in found["anyOf"]):
        return {"type": types}
    return found


if __name__ == "__main__":
    FILE.write_text(schema_text(), encoding="ascii")
    if sys.argv[1:] == ["released"]:
        RELEASED.write_text("\n".join(surface(make_schema())) + "\n", encoding="ascii")
