"""Methods about what is on this machine: saved adapters, their reports, models, its state. None needs torch.

They run in a thread of their own, since another process may hold the store's lock for a while.
"""

import queue
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from sebp_edge.basics.version import __version__
from sebp_edge.engine.memory.budget import MemoryBudget
from sebp_edge.engine.memory.known_machine import recall_machine
from sebp_edge.engine.models.catalog import CATALOG, resolve
from sebp_edge.engine.models.local_models import find_local_models
from sebp_edge.errors import SebpEdgeError
from sebp_edge.events import finite
from sebp_edge.machine.host import free_host_memory
from sebp_edge.machine.packages import package_versions
from sebp_edge.machine.politeness import Politeness
from sebp_edge.recipe import Recipe, check_seed
from sebp_edge.serve import messages
from sebp_edge.serve.messages import Refusal, error_of
from sebp_edge.store.adapter_store import AdapterStore
from sebp_edge.store.saved import SavedAdapter
from sebp_edge.store.stored_jobs import JobRecord, settings_of


class ServedStore:
    """The store of an app, and its jobs.

    Args:
        settings: a memory budget that is none is refused.

    Attributes:
        requests: the method and parameters of those whose answer nobody has taken from here, by their `id`.
    """

    def __init__(self, settings: messages.InitializeParams):
        budget = settings.memory_budget
        self._memory = None if budget is None else MemoryBudget.parse(budget).size
        self.adapters = AdapterStore(settings.store and Path(settings.store).absolute())
        self._waiting: queue.SimpleQueue[str | int] = queue.SimpleQueue()
        self.requests: dict[str | int, tuple] = {}

    def ask(self, id: str | int, method: str, params: object) -> None:
        """Puts a request behind those that wait."""
        self.requests[id] = method, params
        self._waiting.put(id)

    def answers(self) -> Iterator[tuple[str | int, dict]]:
        """Yields the `id` of each request and its answer, without an end."""
        while True:
            id = self._waiting.get()
            method, params = self.requests[id]
            try:
                answer = {"result": finite(_CALLS[method](self.adapters, params))}
            except Exception as error:
                answer = {"error": error_of(error)}
            yield id, answer

    def keep_job(self, id: str, params: object) -> tuple[str | None, dict]:
        """Keeps what a job is asked to do, if it is a training; returns the adapter's name and the worker's task.

        Texts that are no files are not kept: to go on with the job after this server, the app gives them again.
        """
        if not isinstance(params, messages.TrainingParams):
            return getattr(params, "name", None), asdict(params)
        jobs = self.adapters.jobs
        if (jobs.folder / id).exists():
            raise Refusal("id_taken", "Another job in the store has this id.", "Choose a new id for each job.")
        recipe = Recipe.load(params.recipe)
        if isinstance(params, messages.ForgetParams):
            kind, options = "forget", {"documents": params.documents, "near_duplicates": params.near_duplicates}
            name = params.name or "default"
        else:
            kind, options = "adapt", {key: getattr(params, key) for key in ("fresh", "sync", "keep_samples")}
            name = params.name or recipe.default_name
        adapter, model = self.adapters.adapter(name), resolve(params.model)
        seed = check_seed(params.seed)
        politeness = Politeness.of(params.polite, params.threads, params.gpu_share)
        texts = [{"path": path, "include": (), "exclude": ()} for path in params.paths]
        record = JobRecord(
            kind=kind,
            adapter=adapter.name,
            settings=settings_of(model, recipe, params.device, self._memory, seed, params.me, politeness),
            options=options | {"activate_anyway": params.activate_anyway},
            texts=None if params.texts or not texts else tuple(texts),
            state="queued",
            newest=max(adapter.versions()) if adapter.exists() else 0,
        )
        jobs.begin(record, id)
        return adapter.name, asdict(messages.ResumeJobParams(id=id, paths=params.paths, texts=params.texts))


def list_adapters(store: AdapterStore, params: messages.NoParams) -> dict:
    """Returns each adapter with its active version, and those that cannot be read with the reason."""
    adapters, unreadable = [], []
    for name in store.names():
        try:
            adapter = store.adapter(name)
            active = adapter.active_for(None)
            base_model = None if active is None else active.record.base_model
            adapters.append(
                {"name": name, "versions": adapter.versions(), "active": adapter.active(), "base_model": base_model}
            )
        except SebpEdgeError as error:
            unreadable.append({"name": name, "message": str(error)})
    return {"adapters": adapters, "unreadable": unreadable}


def history(store: AdapterStore, params: messages.AdapterParams) -> dict:
    """Returns the records of all versions of an adapter."""
    adapter = store.adapter(params.name)
    return {"name": adapter.name, "versions": [adapter.open(version).to_dict() for version in adapter.versions()]}


def active(saved: SavedAdapter) -> dict:
    """Returns which version is active now."""
    return {"name": saved.name, "active": saved.version}


def documents(store: AdapterStore, params: messages.AdapterParams) -> dict:
    """Returns the documents of a version, by default the active one."""
    adapter = store.adapter(params.name)
    version = adapter.open(params.version).version
    found = [document.to_dict() for document in adapter.documents(version)]
    return {"name": adapter.name, "version": version, "documents": found}


def report(store: AdapterStore, params: messages.AdapterParams) -> dict:
    """Returns how a version was made and tested, as values and as a page without the owner's text."""
    found = store.adapter(params.name).report(params.version)
    return {"report": found.to_dict(), "html": found.to_html()}


def gc(store: AdapterStore, params: messages.GcParams) -> dict:
    """Returns what is of no use any more, or was, if it is to be deleted."""
    found = store.garbage(params.keep)
    return (store.gc(found) if params.delete else found).to_dict()


def models(store: AdapterStore, params: messages.FoldersParams) -> dict:
    """Returns the models that are known by name, and others that are on this machine."""
    known = [{"name": name, **asdict(entry)} for name, entry in CATALOG.items()]
    return {"known": known, "local": find_local_models(params.folders)}


def health(store: AdapterStore, params: messages.NoParams) -> dict:
    """Returns versions, the device that is used by default, and free memory in bytes.

    The device is None until a worker has found a GPU, or that there is none.
    """
    target, free = recall_machine(None) or (None, None)
    return {
        "versions": {"sebp_edge": __version__, **package_versions()},
        "device": target and target.device,
        "free_memory": free,
        "free_host_memory": free_host_memory(),
    }


_CALLS = {
    "health": health,
    "adapters.list": list_adapters,
    "adapters.history": history,
    "adapters.activate": lambda store, params: active(store.adapter(params.name).activate(params.version)),
    "adapters.rollback": lambda store, params: active(store.adapter(params.name).rollback()),
    "adapters.rename": lambda store, params: {"name": store.adapter(params.name).rename(params.new_name).name},
    "adapters.remove": lambda store, params: {
        "name": params.name,
        "active": store.adapter(params.name).remove(params.version),
    },
    "adapters.documents": documents,
    "adapters.diff": lambda store, params: store.adapter(params.name).diff(params.old, params.new).to_dict(),
    "adapters.export": lambda store, params: (
        store.adapter(params.name).export_archive(params.to, params.version, with_names=params.names).to_dict()
    ),
    "adapters.import": lambda store, params: store.import_archive(params.file, params.name).to_dict(),
    "adapters.gc": gc,
    "report": report,
    "models": models,
    "recipes": lambda store, params: {"recipes": Recipe.names()},
}
