"""Requests of the protocol as dataclasses, checked when they arrive, and refusals with stable codes.

Each parameter is a field: its type is checked, an unknown one is refused. Paths are strings.
"""

import dataclasses
import json
import math
import types
import typing
from pathlib import Path
from typing import TypeVar

from sebp_edge.errors import SebpEdgeError, suggest

PROTOCOL = 1
# Numbers that JSON-RPC 2.0 prescribes, by our code; all others have -32000.
_NUMBERS = {
    "parse_error": -32700,
    "invalid_request": -32600,
    "unknown_method": -32601,
    "invalid_params": -32602,
    "internal": -32603,
    "cancelled": -32800,
}

Kind = TypeVar("Kind")


class Refusal(Exception):
    """A request is refused; becomes the `error` of its answer.

    Attributes:
        code: stable, for programs.
        hint: what the app can do, in one sentence.
        retry: whether the same request may succeed later.
    """

    def __init__(self, code: str, message: str, hint: str = "", *, retry: bool = False):
        super().__init__(message)
        self.code, self.hint, self.retry = code, hint, retry

    def to_dict(self) -> dict:
        """Returns the error as JSON-RPC has it, without user text."""
        data = {"code": self.code, "hint": self.hint, "retry": self.retry}
        return {"code": _NUMBERS.get(self.code, -32000), "message": str(self), "data": data}


def cancelled() -> Refusal:
    """Returns the refusal of a request that the app has cancelled."""
    return Refusal("cancelled", "The request was cancelled.")


def cannot_start(what: str, error: OSError) -> Refusal:
    """Returns the refusal of what needs a process that the system does not start."""
    return Refusal("worker_broken", f"The {what} cannot start: {error.strerror}.", "Close other programs.", retry=True)


def error_of(error: BaseException) -> dict:
    """Returns the `error` of an answer for any error. One that is not deliberate tells where it was raised, no more."""
    if isinstance(error, Refusal):
        return error.to_dict()
    if isinstance(error, SebpEdgeError):
        return {"code": -32000, "message": str(error), "data": error.to_dict()}
    places, at = [], error.__traceback__
    while at is not None:
        places.append(f"{at.tb_frame.f_globals.get('__name__', '?')}:{at.tb_lineno}")
        at = at.tb_next
    where = " < ".join(reversed(places[-4:]))
    return Refusal("internal", f"{type(error).__name__} at {where}.", "Report this; the server goes on.").to_dict()


def shown(error: BaseException) -> dict:
    """Returns an error as a job has it."""
    described = error_of(error)
    return {**described["data"], "message": described["message"]}


@typing.dataclass_transform(frozen_default=True, kw_only_default=True)
class Parameters:
    """Those of a method or of a kind of job; each class of them is a dataclass."""

    def __init_subclass__(cls) -> None:
        dataclasses.dataclass(cls, frozen=True, kw_only=True)


class NoParams(Parameters):
    """No parameters."""


class InitializeParams(Parameters):
    """The first request.

    Attributes:
        protocol: the version of the protocol that the app speaks.
        store: the folder of the adapters; by default the user's own.
        memory_budget: see `Personalizer`.
        offline: whether no model may be downloaded.
        folders: files may be read and written in these only.
        parent: `{"pid": ..., "started": seconds since 1970}` of the app; by default the process that started this one.
        warm_seconds: a worker that is idle for so long ends, and gives its memory back.
        low_priority: whether the worker leaves the processor to other programs.
    """

    protocol: int
    store: str | None = None
    memory_budget: str | int | None = None
    offline: bool = False
    folders: tuple[str, ...] = ()
    parent: dict | None = None
    warm_seconds: float = 300.0
    low_priority: bool = True


class ModelParams(Parameters):
    """Which model; see `Personalizer`."""

    model: str = "tiny"
    recipe: str | None = None
    device: str | None = None
    seed: int = 0
    me: tuple[str, ...] = ()


class TextsParams(ModelParams):
    """Texts: files and folders, and texts themselves."""

    paths: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    name: str | None = None


class TrainingParams(TextsParams):
    """How a training gives way to other programs: see `Politeness`. `polite` waits for them, with half the threads."""

    polite: bool = False
    threads: int | None = None
    gpu_share: int | None = None


class AdaptParams(TrainingParams):
    """See `Personalizer.adapt`."""

    activate_anyway: bool = False
    fresh: bool = False
    sync: bool = False
    keep_samples: bool = False


class ForgetParams(TrainingParams):
    """See `Personalizer.forget`."""

    documents: tuple[str, ...]
    near_duplicates: bool = False
    activate_anyway: bool = False


class ExportParams(TextsParams):
    """See `Personalizer.export`."""

    to: str
    name: str = dataclasses.field()  # without the default that it has elsewhere
    format: str = "gguf"
    quant: str | None = None
    version: int | None = None


class VerifyParams(TextsParams):
    """See `Personalizer.verify_forgotten`."""

    name: str = "default"
    device: str | None = "cpu"


class DownloadParams(Parameters):
    """The model to get if it is not on this machine."""

    model: str


class PlanParams(TextsParams):
    """See `Personalizer.plan`."""

    gpu: str | None = None


class GenerateParams(ModelParams):
    """See `Personalizer.generate`. Without `adapter`, the base model answers; without `version`, the active one."""

    prompt: str | None = None
    messages: tuple[dict, ...] = ()
    adapter: str | None = None
    version: int | None = None
    max_new_tokens: int = 200
    temperature: float = 0.7
    top_p: float = 0.9
    top_k: int | None = None
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    sampling_seed: int | None = None


class CompleteParams(ModelParams):
    """See `Personalizer.complete`."""

    before: str
    adapter: str | None = None
    version: int | None = None
    max_new_tokens: int = 16
    min_probability: float = 0.6


class AskParams(TextsParams):
    """See `Personalizer.ask`. `before` has earlier questions and answers in turns; without an adapter, the reader."""

    question: str
    before: tuple[str, ...] = ()
    adapter: str | None = None
    version: int | None = None
    max_new_tokens: int = 60


class SearchParams(Parameters):
    """A question, and the texts that are searched. `before` is the question that it goes on from."""

    question: str
    paths: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    before: str = ""
    num_passages: int = 10


class StartJobParams(Parameters):
    """Starts a job, once for each `id`, which the app chooses.

    Attributes:
        kind: "adapt", "forget", "export", "verify" or "download".
        params: those of the kind.
    """

    id: str
    kind: str = "adapt"
    params: dict


class JobParams(Parameters):
    """Which job."""

    id: str


class ResumeJobParams(JobParams):
    """Which job; see `Personalizer.resume`. Texts are needed only if they were no files, or were moved."""

    changed: str = "refuse"
    paths: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()


class RunningJobParams(Parameters):
    """The job that the app believes to be running: another one is left alone."""

    expected_job_id: str


class SubscribeParams(JobParams):
    """Which job, and the number of the last event that the app has seen."""

    since: int = 0


class CancelParams(Parameters):
    """The `id` of a request that need not be answered any more."""

    request: str | int


class AdapterParams(Parameters):
    """Which adapter, and which version of it."""

    name: str
    version: int | None = None


class VersionParams(Parameters):
    """A version of an adapter."""

    name: str
    version: int


class DiffParams(Parameters):
    """Two versions of an adapter; by default the newest one, and the one before it."""

    name: str
    old: int | None = None
    new: int | None = None


class WriteArchiveParams(AdapterParams):
    """A version, and the new file that it is written to; see `Adapter.export_archive`."""

    to: str
    names: bool = False


class ReadArchiveParams(Parameters):
    """A file with a version, and the name that the adapter gets; by default the one in the file."""

    file: str
    name: str | None = None


class GcParams(Parameters):
    """How many of the newest versions of each adapter are kept, and whether the others are deleted, or only named."""

    keep: int = 3
    delete: bool = False


class RenameParams(Parameters):
    """An adapter's name, and its new one."""

    name: str
    new_name: str


class ChangeFoldersParams(Parameters):
    """Folders in which files may be read and written from now on, and those in which they may not be any more."""

    add: tuple[str, ...] = ()
    remove: tuple[str, ...] = ()


class FoldersParams(Parameters):
    """Folders whose models are listed, too."""

    folders: tuple[str, ...] = ()


# What can be gone on with; the others must be started anew.
TRAININGS = {"adapt": AdaptParams, "forget": ForgetParams}
JOBS = TRAININGS | {"export": ExportParams, "verify": VerifyParams, "download": DownloadParams}


def read_object(data: bytes) -> dict:
    """Reads a JSON object."""
    try:
        found = json.loads(data, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        raise Refusal("parse_error", "The request is not JSON in UTF-8.", "Write one JSON object for each.") from None
    if not isinstance(found, dict):
        raise Refusal("invalid_request", "The request is not a JSON object.", "Batches are not supported.")
    return found


def read(line: bytes) -> dict:
    """Reads a request of JSON-RPC 2.0."""
    message = read_object(line)
    number = message.get("id")
    is_id = type(number) is int or (isinstance(number, str) and len(number) <= 200)
    if message.get("jsonrpc") != "2.0" or not isinstance(message.get("method"), str) or not is_id:
        raise Refusal(
            "invalid_request",
            'The request lacks "jsonrpc": "2.0", a "method", or an "id" that is an integer or a short string.',
        )
    return message


def _refuse_constant(name: str) -> None:
    raise ValueError(name)


def parse(kind: type[Kind], params: object, method: str) -> Kind:
    """Returns parameters as a dataclass."""
    if not isinstance(params, dict):
        raise Refusal("invalid_params", f"The params of {method!r} are not a JSON object.")
    fields = {field.name: field for field in dataclasses.fields(kind)}
    for name in params:
        if name not in fields:
            advice = suggest(name, fields) if fields else "it has none."
            raise Refusal("invalid_params", f"{method!r} has no parameter {name[:40]!r}; {advice}")
    for name, field in fields.items():
        if name not in params and field.default is dataclasses.MISSING:
            raise Refusal("invalid_params", f"{method!r} lacks the parameter {name!r}.")
    values = {}
    for name, value in params.items():
        try:
            values[name] = _value(value, fields[name].type)
        except ValueError as error:
            raise Refusal("invalid_params", f"{name!r} of {method!r} is not {error}.") from None
    return kind(**values)


def texts_of(params: TextsParams | SearchParams | ResumeJobParams) -> list | None:
    """Returns what a Personalizer takes as texts."""
    return [*map(Path, params.paths), *params.texts] or None


def turns_of(params: AskParams) -> list[tuple[str, str]]:
    """Returns the earlier questions with their answers."""
    if len(params.before) % 2:
        raise Refusal("invalid_params", "'before' of 'ask' has a question without its answer.")
    return list(zip(params.before[::2], params.before[1::2], strict=True))


def _value(value: object, kind: object) -> object:
    """Returns a value of JSON as `kind`; raises a ValueError that says what was expected."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:
        if types.NoneType in arguments and value in (None, ""):
            if value is None:
                return None
            raise ValueError("a text of one or more characters")
        kinds = [each for each in arguments if each is not types.NoneType]
        for each in kinds:
            try:
                return _value(value, each)
            except ValueError:
                continue
        raise ValueError(" or ".join(_NAMES.get(each, "a list") for each in kinds))
    if origin is tuple:
        if not isinstance(value, list) or any(type(each) is not arguments[0] for each in value):
            raise ValueError(f"a list of which each is {_NAMES[arguments[0]]}")
        return tuple(_value(each, arguments[0]) for each in value)
    if kind is float and type(value) is int:
        value = float(value) if abs(value) < 2**53 else math.inf
    if type(value) is not kind or (kind is int and abs(value) >= 2**53) or (kind is float and not math.isfinite(value)):
        raise ValueError(_NAMES[kind])
    if kind is dict:
        try:
            json.dumps(value, allow_nan=False)
        except (ValueError, RecursionError):
            raise ValueError("an object of texts and finite numbers") from None
    return value


_NAMES = {str: "a text", int: "a whole number below 2^53", float: "a finite number", bool: "true or false"}
_NAMES |= {dict: "an object"}
