# The types of client.py, made from the protocol's schema, not written by hand.
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Callable
from typing import Any, Literal, NotRequired, Self, TypedDict, overload

_OnText = Callable[[str], None] | None
_NoResult = TypedDict("_NoResult", {})
_WorkerState = TypedDict("_WorkerState", {"pid": int, "memory": int | None, "requests": int})
_StatusResult = TypedDict("_StatusResult", {"pid": int, "memory": int, "worker": _WorkerState | None, "job": str | None,
    "queued": int, "problem": dict[str, Any] | None})
_InitializeResult = TypedDict("_InitializeResult", {"protocol": int, "version": str, "schema": str, "pid": int,
    "methods": list[str]})
_FoldersResult = TypedDict("_FoldersResult", {"folders": list[str]})
_Job = TypedDict("_Job", {"id": str, "kind": str, "name": str | None, "state": str, "created": float, "updated": float,
    "phase": str, "progress": float, "seconds_left": float | None, "resumable": bool, "last_event": int, "stored": str |
    None, "error": dict[str, Any] | None, "result": dict[str, Any] | None})
_OneJobResult = TypedDict("_OneJobResult", {"job": _Job})
_JobsResult = TypedDict("_JobsResult", {"jobs": list[_Job]})
_LoadedModel = TypedDict("_LoadedModel", {"model": str, "size": int, "device": str, "dtype": str})
_HealthResult = TypedDict("_HealthResult", {"versions": dict[str, str], "device": str | None, "free_memory": int | None,
    "free_host_memory": int, "loaded": _LoadedModel | None})
_ListedAdapter = TypedDict("_ListedAdapter", {"name": str, "versions": list[int], "active": int | None, "base_model":
    str | None})
_UnreadableAdapter = TypedDict("_UnreadableAdapter", {"name": str, "message": str})
_AdaptersResult = TypedDict("_AdaptersResult", {"adapters": list[_ListedAdapter], "unreadable":
    list[_UnreadableAdapter]})
_ProbeFigures = TypedDict("_ProbeFigures", {"items": int, "before": int, "after": int, "lost": int})
_WordFigures = TypedDict("_WordFigures", {"keystrokes": int, "saved_before": int, "saved_after": int,
    "saved_more_lowest": float | None, "saved_more_highest": float | None, "words": int, "guessed_before": int,
    "guessed_after": int, "guessed_more_lowest": float | None, "guessed_more_highest": float | None, "is_typed": bool})
_SavedVersion = TypedDict("_SavedVersion", {"name": str, "version": int, "active": bool, "adapter_path": str,
    "base_model": str, "model": str, "fingerprint": str, "recipe": dict[str, Any], "documents": int, "examples": int,
    "tokens": int, "heldout_loss_before": float | None, "heldout_loss_after": float | None, "seed": int, "verdict": str
    | None, "trained_on_all": bool | None, "general_loss_before": float | None, "general_loss_after": float | None,
    "language": _ProbeFigures | None, "facts": _ProbeFigures | None, "chat": bool | None, "explanation": str | None,
    "compared_with": int | None, "compared_loss_before": float | None, "compared_loss_after": float | None,
    "best_before": int | None, "best_loss_before": float | None, "best_loss_after": float | None, "is_best": bool |
    None, "refused": int | None, "learnt_on_from": int | None, "packages": dict[str, str] | None, "threads": int | None,
    "quiz": dict[str, int | None] | None, "words": _WordFigures | None, "created": str, "sebp_edge": str, "format":
    int})
_HistoryResult = TypedDict("_HistoryResult", {"name": str, "versions": list[_SavedVersion]})
_ActiveResult = TypedDict("_ActiveResult", {"name": str, "active": int | None})
_NameResult = TypedDict("_NameResult", {"name": str})
_Document = TypedDict("_Document", {"name": str | None, "number": int | None, "hash": str, "tokens": int | None,
    "split": str | None, "absent": bool})
_DocumentsResult = TypedDict("_DocumentsResult", {"name": str, "version": int, "documents": list[_Document]})
_DiffResult = TypedDict("_DiffResult", {"name": str, "old": int, "new": int, "came": list[_Document], "went":
    list[_Document], "changed": list[list[_Document]], "unchanged": int})
_OldVersion = TypedDict("_OldVersion", {"name": str, "version": int, "reason": str, "size": int})
_GarbageResult = TypedDict("_GarbageResult", {"keep": int, "versions": list[_OldVersion], "leftovers": list[str],
    "size": int})
_AdapterRecord = TypedDict("_AdapterRecord", {"base_model": str, "model": str, "fingerprint": str, "recipe": dict[str,
    Any], "documents": int, "examples": int, "tokens": int, "heldout_loss_before": float | None, "heldout_loss_after":
    float | None, "seed": int, "verdict": str | None, "trained_on_all": bool | None, "general_loss_before": float |
    None, "general_loss_after": float | None, "language": _ProbeFigures | None, "facts": _ProbeFigures | None, "chat":
    bool | None, "explanation": str | None, "compared_with": int | None, "compared_loss_before": float | None,
    "compared_loss_after": float | None, "best_before": int | None, "best_loss_before": float | None, "best_loss_after":
    float | None, "is_best": bool | None, "refused": int | None, "learnt_on_from": int | None, "packages": dict[str,
    str] | None, "threads": int | None, "quiz": dict[str, int | None] | None, "words": _WordFigures | None, "created":
    str, "sebp_edge": str, "format": int})
_TestLoss = TypedDict("_TestLoss", {"loss": float | None, "lowest": float | None, "highest": float | None, "documents":
    int, "tokens": int})
_Gains = TypedDict("_Gains", {"over_base": float | None, "over_base_at_least": float | None, "over_active": float |
    None, "over_active_at_least": float | None, "margin": float, "tolerance": float, "not_comparable": str, "over_best":
    float | None, "over_best_at_least": float | None})
_Tested = TypedDict("_Tested", {"base": _TestLoss, "active": _TestLoss | None, "adapted": _TestLoss, "gains": _Gains,
    "boilerplate_base": float | None, "boilerplate_adapted": float | None, "refit_loss": float | None,
    "boilerplate_share": float | None})
_Curve = TypedDict("_Curve", {"phase": str, "best_epoch": int, "steps": list[int], "losses": list[float],
    "evaluated_after": list[int], "validation": list[float]})
_Texts = TypedDict("_Texts", {"documents": int, "examples": int, "tokens": int, "splits": dict[str, int], "left_out":
    dict[str, int]})
_RowCounts = TypedDict("_RowCounts", {"context_length": int, "padded": int, "tokens": int, "active": int, "loss": int,
    "padding_in_forward": bool | None})
_Cost = TypedDict("_Cost", {"device": str, "budget": int | None, "predicted": int | None, "peak": int, "allocator_peak":
    int | None, "seconds": float, "training_seconds": float, "tokens_per_second": float | None})
_CopiedRun = TypedDict("_CopiedRun", {"run": int, "base_run": int})
_LearntOn = TypedDict("_LearntOn", {"version": int, "new": int, "changed": int, "replayed": int, "gone": int})
_TrainingReport = TypedDict("_TrainingReport", {"tested": _Tested | None, "curves": list[_Curve], "texts": _Texts,
    "rows": _RowCounts, "cost": _Cost, "copies": list[_CopiedRun] | None, "expectation": str, "concerns": list[str],
    "learnt_on": _LearntOn | None, "format": int})
_Sample = TypedDict("_Sample", {"document": str, "beginning": str, "base": str, "before": str | None, "after": str})
_LeftOut = TypedDict("_LeftOut", {"source": str, "reason": str})
_Answered = TypedDict("_Answered", {"question": str, "answer": str, "reply": str, "right": bool})
_KeptSamples = TypedDict("_KeptSamples", {"samples": list[_Sample], "left_out": list[_LeftOut], "copies": list[str],
    "answers": list[_Answered], "format": int})
_VersionReport = TypedDict("_VersionReport", {"name": str | None, "version": int | None, "active": bool, "record":
    _AdapterRecord, "training": _TrainingReport | None, "samples": _KeptSamples | None})
_ReportResult = TypedDict("_ReportResult", {"report": _VersionReport, "html": str})
_KnownModel = TypedDict("_KnownModel", {"name": str, "repository": str | None, "parameters": float | None, "licence":
    str, "description": str, "open_alternative": str | None})
_ModelsResult = TypedDict("_ModelsResult", {"known": list[_KnownModel], "local": list[str]})
_RecipesResult = TypedDict("_RecipesResult", {"recipes": list[str]})
_Reason = TypedDict("_Reason", {"reason": str, "sources": list[str], "counts": list[str]})
_BadlyRead = TypedDict("_BadlyRead", {"document": str, "tokens_per_character": float})
_Part = TypedDict("_Part", {"name": str, "documents": int, "tokens": int})
_Piece = TypedDict("_Piece", {"text": str, "trained": bool})
_RenderedExample = TypedDict("_RenderedExample", {"document": str, "tokens": int, "trained_tokens": int, "pieces":
    list[_Piece]})
_Footprint = TypedDict("_Footprint", {"weights": int, "adapter": int, "gradients": int, "optimizer": int, "activations":
    int, "loss": int, "graphs": int, "context": int, "reserve": int})
_Choice = TypedDict("_Choice", {"recipe": str, "method": str, "r": int, "dtype": str, "max_rows": int, "checkpoints":
    int, "offload": bool, "chunked_blocks": bool, "small_buffers": bool, "dequantised_blocks": int, "streamed_blocks":
    int, "moments_in_8_bits": bool, "folds_at_once": bool, "peak": int, "host_memory": int, "seconds": float | None,
    "footprint": _Footprint})
_Plan = TypedDict("_Plan", {"model": str, "device": str, "budget": int, "larger": _Choice | None, "smaller": _Choice |
    None, "full": _Choice | None, "gpu": int | None, "recipe": str, "method": str, "r": int, "dtype": str, "max_rows":
    int, "checkpoints": int, "offload": bool, "chunked_blocks": bool, "small_buffers": bool, "dequantised_blocks": int,
    "streamed_blocks": int, "moments_in_8_bits": bool, "folds_at_once": bool, "peak": int, "host_memory": int,
    "seconds": float | None, "footprint": _Footprint})
_InspectResult = TypedDict("_InspectResult", {"event": Literal['inspection'], "model": str, "recipe": str, "documents":
    int, "examples": int, "tokens": int, "characters": int, "left_out": list[_Reason], "copies": int, "near_duplicates":
    list[list[str]], "boilerplate_share": float | None, "templates": list[str], "drawings": list[str],
    "tokens_per_character": float | None, "badly_read": list[_BadlyRead], "own_tokenizer": bool, "split": list[_Part],
    "concerns": list[str], "beginning": str, "refusal": str, "expectations": list[str], "fitting_recipe": str,
    "exports": list[str], "own_words": int, "others_words": int, "rendered": list[_RenderedExample], "plan": _Plan |
    None, "summary": str})
_PlanResult = TypedDict("_PlanResult", {"model": str, "device": str, "budget": int, "larger": _Choice | None, "smaller":
    _Choice | None, "full": _Choice | None, "gpu": int | None, "recipe": str, "method": str, "r": int, "dtype": str,
    "max_rows": int, "checkpoints": int, "offload": bool, "chunked_blocks": bool, "small_buffers": bool,
    "dequantised_blocks": int, "streamed_blocks": int, "moments_in_8_bits": bool, "folds_at_once": bool, "peak": int,
    "host_memory": int, "seconds": float | None, "footprint": _Footprint})
_Source = TypedDict("_Source", {"document": str, "headings": list[str], "line": int, "text": str, "date":
    NotRequired[str], "path": NotRequired[str | None]})
_AskResult = TypedDict("_AskResult", {"text": str, "found": bool, "quoted": bool, "sources": list[_Source], "sentence":
    str, "line": int | None, "sentences": list[str]})
_Hit = TypedDict("_Hit", {"passage": _Source, "strength": float})
_SearchResult = TypedDict("_SearchResult", {"found": bool, "hits": list[_Hit]})
_GenerateResult = TypedDict("_GenerateResult", {"text": str, "prompt_tokens": int, "new_tokens": int, "finish":
    Literal['stop', 'length'], "probability": float | None})
_CompleteResult = TypedDict("_CompleteResult", {"text": str, "words": list[str], "probabilities": list[float],
    "num_tokens": int})
_JobEvent = TypedDict("_JobEvent", {"job": str, "number": int, "phase": str, "progress": float, "seconds_left": float |
    None, "event": dict[str, Any]})
class ServerError(Exception):
    data: dict[str, Any]
    code: str
    hint: str
    retry: bool

class Client:
    process: Process
    @classmethod
    async def start(cls, command: tuple[str, ...] = (), **settings: Any) -> Self: ...
    @overload
    async def call(self, method: Literal["ping", "shutdown", "unload", "cancel", "jobs.remove", "jobs.unsubscribe"], *, on_text: _OnText = None, **params: Any) -> _NoResult: ...
    @overload
    async def call(self, method: Literal["status"], *, on_text: _OnText = None, **params: Any) -> _StatusResult: ...
    @overload
    async def call(self, method: Literal["initialize"], *, on_text: _OnText = None, **params: Any) -> _InitializeResult: ...
    @overload
    async def call(self, method: Literal["folders"], *, on_text: _OnText = None, **params: Any) -> _FoldersResult: ...
    @overload
    async def call(self, method: Literal["jobs.start", "jobs.get", "jobs.pause", "jobs.resume", "jobs.cancel", "jobs.subscribe"], *, on_text: _OnText = None, **params: Any) -> _OneJobResult: ...
    @overload
    async def call(self, method: Literal["jobs.list"], *, on_text: _OnText = None, **params: Any) -> _JobsResult: ...
    @overload
    async def call(self, method: Literal["health"], *, on_text: _OnText = None, **params: Any) -> _HealthResult: ...
    @overload
    async def call(self, method: Literal["adapters.list"], *, on_text: _OnText = None, **params: Any) -> _AdaptersResult: ...
    @overload
    async def call(self, method: Literal["adapters.history"], *, on_text: _OnText = None, **params: Any) -> _HistoryResult: ...
    @overload
    async def call(self, method: Literal["adapters.activate", "adapters.rollback", "adapters.remove"], *, on_text: _OnText = None, **params: Any) -> _ActiveResult: ...
    @overload
    async def call(self, method: Literal["adapters.rename"], *, on_text: _OnText = None, **params: Any) -> _NameResult: ...
    @overload
    async def call(self, method: Literal["adapters.documents"], *, on_text: _OnText = None, **params: Any) -> _DocumentsResult: ...
    @overload
    async def call(self, method: Literal["adapters.diff"], *, on_text: _OnText = None, **params: Any) -> _DiffResult: ...
    @overload
    async def call(self, method: Literal["adapters.export", "adapters.import"], *, on_text: _OnText = None, **params: Any) -> _SavedVersion: ...
    @overload
    async def call(self, method: Literal["adapters.gc"], *, on_text: _OnText = None, **params: Any) -> _GarbageResult: ...
    @overload
    async def call(self, method: Literal["report"], *, on_text: _OnText = None, **params: Any) -> _ReportResult: ...
    @overload
    async def call(self, method: Literal["models"], *, on_text: _OnText = None, **params: Any) -> _ModelsResult: ...
    @overload
    async def call(self, method: Literal["recipes"], *, on_text: _OnText = None, **params: Any) -> _RecipesResult: ...
    @overload
    async def call(self, method: Literal["inspect"], *, on_text: _OnText = None, **params: Any) -> _InspectResult: ...
    @overload
    async def call(self, method: Literal["plan"], *, on_text: _OnText = None, **params: Any) -> _PlanResult: ...
    @overload
    async def call(self, method: Literal["ask"], *, on_text: _OnText = None, **params: Any) -> _AskResult: ...
    @overload
    async def call(self, method: Literal["search"], *, on_text: _OnText = None, **params: Any) -> _SearchResult: ...
    @overload
    async def call(self, method: Literal["generate"], *, on_text: _OnText = None, **params: Any) -> _GenerateResult: ...
    @overload
    async def call(self, method: Literal["complete"], *, on_text: _OnText = None, **params: Any) -> _CompleteResult: ...
    async def request(self, method: str, params: dict[str, Any], on_text: _OnText = None) -> dict[str, Any]: ...
    def events(self, job: str, since: int = 0) -> AsyncIterator[_JobEvent]: ...
    async def close(self) -> None: ...
    async def __aenter__(self) -> Self: ...
    async def __aexit__(self, *error: object) -> None: ...
