"""What the worker does: jobs, and answers, also between the steps of a job.

Answers are given in the main thread. Jobs run in another one, which alone has a low priority; it waits for the answer.
A training of an adapter leaves the base model's weights as they are, and changes the code of its modules. So the model
that answers meanwhile has modules of its own on the same weights, and computes what it would without the training, bit
for bit, with any adapter on it.
"""

import copy
import json
import queue
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from itertools import chain
from pathlib import Path

from sebp_edge.engine.memory.shape_reader import keep_shape
from sebp_edge.engine.memory.this_machine import keep_device
from sebp_edge.engine.models.architecture import longest_sequence
from sebp_edge.engine.models.catalog import resolve
from sebp_edge.engine.models.loading import BaseModel
from sebp_edge.engine.models.row_cache import bytes_per_token
from sebp_edge.engine.models.sampling import Sampling
from sebp_edge.errors import BaseModelMismatch, Interrupted, MachineError, Paused, SebpEdgeError, TrainingStopped
from sebp_edge.events import Event, ModelLoaded, Sink, TensorWritten, TextsRead, finite, silent
from sebp_edge.machine import devices
from sebp_edge.machine.politeness import NICENESS, lower_priority_of_thread, set_session_niceness
from sebp_edge.machine.process import memory_of
from sebp_edge.personalizer import Personalizer
from sebp_edge.recipe import Recipe
from sebp_edge.run import generating
from sebp_edge.run.asking import SearchedTexts, find_reader, quote, search
from sebp_edge.run.downloading import download
from sebp_edge.run.model_in_use import AdapterChoice, ModelInUse
from sebp_edge.serve import messages
from sebp_edge.serve.messages import JOBS, Refusal, cancelled, error_of, parse, shown, texts_of, turns_of
from sebp_edge.serve.methods import METHODS, check_paths, refuse_outside
from sebp_edge.serve.streams import Outbox
from sebp_edge.serve.tasks import Tasks
from sebp_edge.store.adapter import Adapter
from sebp_edge.store.adapter_store import AdapterStore
from sebp_edge.store.stored_jobs import Job
from sebp_edge.values.preparation_progress import Progress

# Of a job that an error ends: the first that fits.
_REFUSED = SebpEdgeError | Refusal
_STATES = ((Interrupted, "interrupted"), (TrainingStopped, "failed"), (_REFUSED, "refused"), (Exception, "failed"))
_Writing = messages.GenerateParams | messages.CompleteParams | messages.AskParams
# Once an app asks, more requests follow: the session has its usual priority for so long, which is changed seldom.
_SECONDS_UNTIL_LOW = 2.0


class TrainedModel(ModelInUse):
    """The model of a job, which lends its weights to the model that answers.

    Attributes:
        can_lend: whether the job leaves the weights as they are.
        is_loading: whether another thread loads them now.
    """

    def __init__(self, own: ModelInUse, served: ModelInUse):
        super().__init__(own.reference, own.recipe, own.device)
        self._served, self.can_lend, self.is_loading = served, True, False
        if served.base is not None:
            served.detach_adapter()
            self.base = twin(served.base)

    def load(self, on_event: Sink, recipe: Recipe | None = None, **options) -> BaseModel:
        """Loads the model; see `ModelInUse.load`. The model that answers has its weights from then on, or none."""
        self.is_loading = True
        try:
            base = super().load(on_event, recipe, **options)
        finally:
            self.is_loading = False
        if recipe is not None:
            self.can_lend = recipe.method == "lora"
        if not self.can_lend:
            self._served.release()
        elif self._served.base is None:
            self._served.base = twin(base)
        return base

    def release(self) -> None:
        """Frees the memory of both, until a training loads it again."""
        super().release()
        self._served.release()
        self.can_lend = False


class Worker:
    """Does one task after the other; answers also between the steps of a job."""

    def __init__(self, tasks: Tasks, outbox: Outbox):
        self._tasks, self._outbox = tasks, outbox
        self._settings: dict = {}
        self._served: Personalizer | None = None  # which answers
        self._searched = SearchedTexts()
        self._job: Personalizer | None = None  # which runs a job
        self._jobs: ThreadPoolExecutor | None = None  # its only thread
        self._handed: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()  # None once the job has ended
        self._lowers_priority, self._is_low, self._answered = True, False, 0.0

    def run(self) -> None:
        """Works until the process ends."""
        while True:
            self._do(self._tasks.next())

    def _do(self, task: dict) -> None:
        match task["do"]:
            case "settings":
                self._settings = {"store": task["store"], "memory_budget": task["memory_budget"]}
                self._lowers_priority = task["low_priority"]
                lower = lower_priority_of_thread if self._lowers_priority else None
                self._jobs = ThreadPoolExecutor(1, "sebp-edge job", lower)
            case "answer":
                self._answer(task)
            case "job":
                job = self._jobs.submit(self._run_job, task)
                job.add_done_callback(lambda _: self._handed.put(None))
                while (answer := self._handed.get()) is not None:
                    answer()
                job.result()
                self._be_low(False)

    def _tell(self, tells: str, **values) -> None:
        self._outbox.wait_for_room()
        self._outbox.send({"tells": tells, **values})

    def _tell_loaded(self) -> None:
        used = next((one.in_use for one in (self._job, self._served) if one and one.in_use.base), None)
        about = used and {"model": used.reference.public_name, "size": used.loaded_bytes}
        self._tell("loaded", loaded=used and about | {"device": used.device.type, "dtype": used.base.precision})

    # ------------------------------------------------------------------------------------------------------------ jobs

    def _run_job(self, task: dict) -> None:
        state, facts = "done", {}
        try:
            self._tell("running")
            facts["result"] = finite(self._call_of(task)(stop_when=self._tasks.job_stop).to_dict())
        except Paused:
            state = "paused"
        except Exception as error:
            state, facts["error"] = next(state for kind, state in _STATES if isinstance(error, kind)), shown(error)
        self._job = None
        self._tell_loaded()
        self._tell("ended", state=state, facts=facts)
        if state == "done" and self._served is not None:
            keep_shape(self._served.reference)

    def _call_of(self, task: dict) -> Callable:
        """Returns the call of a Personalizer that is the job, without `stop_when`."""
        on_event, folders = partial(self._on_event, task["id"]), [*map(Path, task["folders"])]
        if task["stored"] is None:
            params = parse(JOBS[task["kind"]], task["params"], task["kind"])
            self._refuse_outside = partial(check_paths, params, folders)
            self._refuse_outside()
            if isinstance(params, messages.DownloadParams):
                return lambda stop_when: download(resolve(params.model), on_event)
            job, options = self._personalizer(params, on_event=on_event), ("format", "quant", "version")
            if isinstance(params, messages.VerifyParams) and not params.paths:
                refuse_outside(_learnt_from(job.store.adapter(params.name), None), folders)
            self._begin(job, params.model)
            if isinstance(params, messages.VerifyParams):
                return partial(job.verify_forgotten, texts_of(params), name=params.name)
            chosen = {key: getattr(params, key) for key in options}
            return partial(job.export, params.name, params.to, texts=texts_of(params), **chosen)
        params = parse(messages.ResumeJobParams, task["params"], "jobs.resume")
        store = AdapterStore(self._settings["store"])
        stored = store.jobs.get(task["stored"])
        arguments = stored.arguments()
        self._refuse_outside = partial(refuse_outside, _paths_of(stored, params, store), folders)
        self._refuse_outside()
        job = Personalizer(**arguments, store=self._settings["store"], on_event=on_event)
        self._begin(job, arguments["model"])
        return partial(job.resume, task["stored"], texts_of(params), changed=params.changed)

    def _begin(self, job: Personalizer, model: str) -> None:
        """Makes a job share its weights with the model that answers."""
        if self._served is None:
            keep_device(job.device)
        served = self._serving(Personalizer(model, device=job.device.type, store=job.store))
        job.in_use = TrainedModel(job.in_use, served.in_use)
        job.while_waiting = self._while_waiting
        self._job = job

    def _on_event(self, id: str, event: Event) -> None:
        """Tells an event of the job, and does what waits: the training goes on afterwards."""
        # Again: somebody may have put a link into the place of a folder meanwhile.
        if isinstance(event, TextsRead | TensorWritten):
            self._refuse_outside()
        if isinstance(event, ModelLoaded):
            self._tell_loaded()
        self._tell("event", event=finite(event.of_job(id).to_dict()))
        self._while_waiting()

    def _while_waiting(self) -> None:
        """Answers what waits; pauses the job if that is asked for."""
        job = self._job  # None if it needs no model
        while not (job and job.in_use.is_loading) and (task := self._tasks.next_within_job()) is not None:
            self._be_low(False)
            answered = Future()
            self._handed.put(lambda task=task, done=answered: done.set_result(self._answer(task)))
            answered.result()
            self._answered = time.monotonic()
            if job and job.memory_budget is not None:  # of which the training needs all
                self._served.in_use.detach_adapter()
        if time.monotonic() - self._answered > _SECONDS_UNTIL_LOW:
            self._be_low(True)
        if self._tasks.job_pause.is_set():
            job.pause()

    def _be_low(self, is_low: bool) -> None:
        """Lowers the priority of the worker's session, or takes that back for an answer."""
        if self._lowers_priority and is_low != self._is_low:
            self._is_low = is_low
            set_session_niceness(NICENESS if is_low else 0)

    # --------------------------------------------------------------------------------------------------------- answers

    def _answer(self, task: dict) -> None:
        id, method = task["id"], task["method"]
        try:
            params = parse(METHODS[method], task["params"], method)
            check_paths(params, [*map(Path, task["folders"])])
            answer = {"result": finite(_ANSWERS[method](self, params, id))}
        except Interrupted as error:
            is_cut = self._tasks.answering == id and self._tasks.ends_job
            why = _busy("The running job ends.") if is_cut else cancelled()
            answer = {"error": why.to_dict()}
            answer["error"]["data"]["text"] = error.text
        except Exception as error:
            if self._job is not None and (isinstance(error, MachineError) or devices.ran_out_of_memory(error)):
                error = _busy("The running job leaves too little memory.")
            if isinstance(error, BaseModelMismatch) and self._job is None:
                self._served.in_use.release()  # its files may have been changed or put back since it was loaded
            answer = {"error": error_of(error)}
        self._tasks.stops.pop(id)
        self._tasks.answering = None
        self._tell_loaded()
        self._tell("answer", id=id, **answer)

    def _generate(self, params: messages.GenerateParams, id: str | int) -> dict:
        prompt = params.prompt if params.prompt is not None else list(params.messages)
        options = ("max_new_tokens", "temperature", "top_p", "top_k", "repetition_penalty", "stop")
        sampling = Sampling(**{key: getattr(params, key) for key in options}, seed=params.sampling_seed)
        served, rest = self._served_with_weights(params, id), self._streamed(params, id)
        choice = AdapterChoice(rest["adapter"], rest["version"])
        with served.begin_call(rest["stop_when"]) as call:
            return asdict(generating.generate(call, prompt, choice, sampling, rest["on_text"]))

    def _complete(self, params: messages.CompleteParams, id: str | int) -> dict:
        served = self._served_with_weights(params, id)
        found = served.complete(params.before, **self._streamed(params, id, ("max_new_tokens", "min_probability")))
        return {"text": found.text, **asdict(found)}

    def _ask(self, params: messages.AskParams, id: str | int) -> dict:
        turns, one, index = turns_of(params), self._personalizer(params), self._index(params, id)
        if params.adapter is None and find_reader(one.store, one.reference) is None:
            # Needs no model, so that it may be about another one than the running job.
            return asdict(quote(params.question, index, before=turns[-1][0] if turns else ""))
        rest = self._streamed(params, id, ("max_new_tokens",))
        if params.adapter is None:
            del rest["adapter"]  # for the reader
        return asdict(self._served_with_weights(params, id).ask(params.question, index, before=turns, **rest))

    def _search(self, params: messages.SearchParams, id: str | int) -> dict:
        return asdict(search(params.question, self._index(params, id), params.num_passages, params.before))

    def _index(self, params: messages.AskParams | messages.SearchParams, id: str | int):
        return self._searched.index(texts_of(params), Progress(check=partial(self._refuse_stopped, id)))

    def _streamed(self, params: _Writing, id: str | int, options: tuple[str, ...] = ()) -> dict:
        """Returns the arguments of a call that writes text: these options, the adapter, and what chunks go to."""
        return {key: getattr(params, key) for key in options} | {
            "adapter": params.adapter,
            "version": None if params.adapter is None else params.version,
            "on_text": lambda chunk: self._tell("chunk", id=id, text=chunk),
            "stop_when": self._tasks.stops[id],
        }

    def _look_ahead(self, params: messages.TextsParams, id: str | int) -> dict:
        """Plans or inspects, and remembers of the model and the machine what a planner needs to do so itself."""
        one, options = self._personalizer(params), {"name": params.name, "stop_when": self._tasks.stops[id]}
        if isinstance(params, messages.PlanParams):
            found = one.plan(texts_of(params), gpu=params.gpu, **options)
        else:
            found = one.inspect(texts_of(params), **options)
        keep_shape(one.reference)
        if self._served is None:
            keep_device(one.device)
        return found.to_dict()

    # ---------------------------------------------------------------------------------------------------------- models

    def _personalizer(self, params: messages.ModelParams, **options) -> Personalizer:
        own = {key: getattr(params, key) for key in ("recipe", "device", "seed", "me")}
        return Personalizer(params.model, **own, **self._settings, **options)

    def _serving(self, new: Personalizer) -> Personalizer:
        """Returns the Personalizer that answers with a model, which `new` names; there is one at a time."""
        old = self._served
        if old is None or (old.reference, old.device) != (new.reference, new.device):
            if self._job is not None:
                raise _busy("The running job is about another model.")
            if old is not None:
                old.in_use.release()
            self._served = new
        return self._served

    def _served_with_weights(self, params: _Writing, id: str | int) -> Personalizer:
        served = self._serving(self._personalizer(params))
        if self._job is not None and served.in_use.base is None:
            if not self._job.in_use.can_lend:
                raise _busy("The running job needs the model for itself.")
            self._job.in_use.load(silent, watch=lambda load: load(partial(self._refuse_stopped, id)))
        if self._job is not None and (budget := self._job.memory_budget) is not None:
            used, characters = memory_of(served.device).used, len(json.dumps(asdict(params)))
            if not has_room(served.in_use.base, budget.size, used, characters, params.max_new_tokens):
                raise _busy("The running job leaves too little memory.")
        return served

    def _refuse_stopped(self, id: str | int) -> None:
        if self._tasks.stops[id].is_set():
            raise Interrupted("Stopped; nothing was changed.")


def twin(base: BaseModel) -> BaseModel:
    """Returns a base model with modules of its own and the weights of `base`, which must have no adapter."""
    shared = {id(tensor): tensor for tensor in chain(base.model.parameters(), base.model.buffers())}
    return replace(base, model=copy.deepcopy(base.model, shared))


def has_room(base: BaseModel, budget: int, used: int, characters: int, new_tokens: int) -> bool:
    """Whether the keys and values of an answer fit into a memory budget, beside the `used` bytes.

    A copy of the modules takes none to speak of: 0.8 MB for SmolLM2-135M.

    Args:
        characters: the prompt's as JSON; counted as two to a token, where English has about four.
    """
    tokens = characters // 2 + new_tokens
    tokens = min(tokens, longest_sequence(base.model) or tokens)
    return used + tokens * bytes_per_token(base.model) <= budget


def _paths_of(stored: Job, params: messages.ResumeJobParams, store: AdapterStore) -> list[str]:
    """Returns all that a training may read; to forget, it reads again what the adapter was made from."""
    record = stored.record
    paths = [record.settings["model"], *record.options.get("documents", ()), *params.paths]
    if not params.paths and record.texts is not None:
        paths += [each["path"] for each in record.texts]
    elif not params.paths and record.kind == "forget" and (adapter := store.adapter(record.adapter)).exists():
        paths += _learnt_from(adapter, adapter.active())
    return paths


def _learnt_from(adapter: Adapter, version: int | None) -> list[str]:
    """Returns where the texts of a version are, or of all if that is not known."""
    wheres = adapter.wheres()
    return [str(path) for one in ([version] if version in wheres else wheres) for path in wheres[one].paths]


_ANSWERS = {
    "ask": Worker._ask,
    "search": Worker._search,
    "generate": Worker._generate,
    "complete": Worker._complete,
    "inspect": Worker._look_ahead,
    "plan": Worker._look_ahead,
}


def _busy(message: str) -> Refusal:
    return Refusal("busy", message, "Ask again when the job has ended.", retry=True)
