"""The main path: texts in, a saved adapter out."""

import functools
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from itertools import chain
from pathlib import Path

from sebp_edge.adapters.store import AdapterRecord, AdapterStore, SavedAdapter
from sebp_edge.errors import (
    BaseModelMismatch,
    BudgetExceeded,
    BusyError,
    Interrupted,
    MachineError,
    NonFiniteLoss,
    RecipeError,
    TextsError,
    TrainingStopped,
)
from sebp_edge.events import AdapterSaved, Event, MemoryPlanned, ModelLoaded, Notice, Sink, TextsRead, silent
from sebp_edge.insight.analysis import Analysis, analyze
from sebp_edge.models import machine
from sebp_edge.models.adaptation import Adaptation, load
from sebp_edge.models.catalog import DEFAULT_MODEL, resolve
from sebp_edge.models.generation import generate_text
from sebp_edge.models.loading import BaseModel, load_base_model, refuse_unknown_tokens, tokenizer_at_hand
from sebp_edge.models.process import memory_of
from sebp_edge.planning.budget import MemoryBudget, Plan, make_plan
from sebp_edge.planning.shape import read_shape
from sebp_edge.planning.target import Target
from sebp_edge.recipe import Recipe
from sebp_edge.result import AdaptResult
from sebp_edge.texts.dataset import Dataset, make_dataset
from sebp_edge.texts.readers import Reading, read_texts
from sebp_edge.training.limit import MemoryLimit
from sebp_edge.training.loop import Progress
from sebp_edge.training.spending import FASTEST
from sebp_edge.training.trial import Judgement, Trial
from sebp_edge.units import gigabytes


class _StopAsked(KeyboardInterrupt):
    """The app that embeds it asked for the end."""


def _alone(method: Callable) -> Callable:
    """A method that uses the model; while another call of one does, in whatever thread, it refuses."""

    @functools.wraps(method)
    def run(personalizer: "Personalizer", *arguments, **options):
        if not personalizer._in_use.acquire(blocking=False):
            raise BusyError(
                "This Personalizer is at work already; wait until that call is back, end it with stop(), or make "
                "another Personalizer."
            )
        try:
            return method(personalizer, *arguments, **options)
        finally:
            personalizer._in_use.release()

    return run


class Personalizer:
    """Makes a language model learn its owner's texts.

        result = Personalizer("llama-3.2-3b").adapt("./notes")

    One call at a time uses its model: `adapt`, `analyze`, `generate` and `load_adapter` raise BusyError meanwhile.

    Args:
        model: a known name (`sebp-edge models` lists them), a folder with a model, or a Hub id.
        recipe: a bundled recipe's name, a TOML file, or a Recipe.
        device: "cuda", "mps" or "cpu"; by default the best there is.
        store: where adapters are kept, also as a folder; by default the OS's data folder.
        memory_budget: what this process may hold while it adapts, of the GPU's memory or of the host's on the CPU:
            "8GB", "7.5GiB", a number of bytes. Where nothing fits, into it or into what other programs leave of it,
            `adapt` refuses before it loads anything. None sets no limit.
        seed: of everything random.
        on_event: is called with every event (see `sebp_edge.events`).
    """

    def __init__(
        self,
        model: str | Path = DEFAULT_MODEL,
        *,
        recipe: str | Path | Recipe = "notes",
        device: str | None = None,
        memory_budget: str | int | MemoryBudget | None = None,
        store: AdapterStore | str | Path | None = None,
        seed: int = 0,
        on_event: Sink = silent,
    ):
        self.reference = resolve(model)
        self.recipe = Recipe.load(recipe)
        self.device = machine.pick_device(device)
        self.memory_budget = None if memory_budget is None else MemoryBudget.parse(memory_budget)
        self.store = store if isinstance(store, AdapterStore) else AdapterStore(store)
        self.seed = check_seed(seed)
        self.on_event = on_event
        self._in_use = threading.Lock()
        self._stop_asked: threading.Event | None = None
        self._base: BaseModel | None = None
        self._adaptation: Adaptation | None = None
        self._folder: Path | None = None
        self._chat = False

    @_alone
    def adapt(self, texts, *, name: str = "default", out: str | Path | None = None) -> AdaptResult:
        """Learns `texts`; the adapter is saved if it is better on documents that it has not seen.

        Args:
            texts: a text, the path of a file or folder, a record, or a list of these (see `read_texts`).
            name: the adapter's name in the store; each adaptation is a new version of it.
            out: a new folder to save to instead.

        Raises:
            SebpEdgeError: one of its kinds, with what to do. Interrupted, NonFiniteLoss and BudgetExceeded come after
                the best state so far, if there is one, has been saved as a version that is not active.
        """
        begin, out = time.perf_counter(), None if out is None else Path(out).expanduser()
        self.store.check_writable(name, out)
        with self._listening_to_stop():
            reading = read_texts(texts)
            plan = None if self.memory_budget is None else self._announced(self._plan(reading))
            recipe, spending = (plan.chosen.recipe, plan.chosen.spending) if plan else (self.recipe.settled(), FASTEST)
            with self._limit(plan) as limit:
                base = self._load(recipe)
                dataset = self._encode(reading, base)
                trial = Trial(base, dataset, recipe, self.seed, self._tell, spending, limit)
                with self._setting_aside(trial, name):
                    judgement = trial.train_and_judge()
        saved = self._keep(trial, judgement, name, out) if judgement.verdict.kept else self._give_up(trial)
        return AdaptResult.of(trial, judgement, saved, self.store, time.perf_counter() - begin)

    def stop(self) -> None:
        """Stops an `adapt` that runs in another thread at its next event, mostly a step, as Ctrl-C would.

        There `adapt` raises Interrupted. Where none is running, or its training is over, nothing happens.
        """
        if (asked := self._stop_asked) is not None:
            asked.set()

    def plan(self, texts, *, gpu: str | int | None = None) -> Plan:
        """How `texts` would be learnt within the memory budget, what that takes and about how long; nothing is loaded.

        Without a budget, it is the memory that is free now. The tokens of a model that is still to be downloaded are
        counted by the bundled model's tokenizer, which makes more of them.

        Args:
            gpu: the memory of a GPU that is not here, "8GB" or a number of bytes, to plan for that: an NVIDIA GPU with
                bf16, whose speed is not known, beside as much of the host's memory as it takes. `device` plays no part.

        Raises:
            SebpEdgeError: one of its kinds; MachineError if nothing fits, with what would.
        """
        size = None if gpu is None else self._checked(gpu)
        return self._plan(read_texts(texts), size)

    @_alone
    def analyze(self, texts, *, examples: int = 16) -> Analysis:
        """How sparse the base model's gradients are on `texts`; no adapter takes part, and nothing is changed.

        Args:
            texts: as `adapt` takes them.
            examples: how many to look at, at most; the seed draws them.

        Raises:
            SebpEdgeError: one of its kinds, with what to do.
        """
        reading = read_texts(texts)
        handled = sys.exception()
        with self._limit(None):
            base = self._load()
            dataset = self._encode(reading, base)
            if self._adaptation is not None:
                self._adaptation.detach()
            try:
                return analyze(base, dataset, examples, self.seed, self.on_event)
            except BaseException as error:
                if not self._ran_out_of_memory(error, handled):
                    raise
                raise MachineError(
                    f"The memory of this {self.device.type.upper()} ran out in a dense backward pass over "
                    f"{dataset.context_length} tokens; choose a smaller model or a shorter context."
                ) from error
            finally:
                self._put_back(base)

    @_alone
    def generate(
        self,
        prompt: str,
        *,
        adapter: str | Path | None = None,
        version: int | None = None,
        max_new_tokens: int = 200,
        temperature: float = 0.7,
        top_p: float = 0.9,
        seed: int | None = None,
        on_text: Callable[[str], None] | None = None,
    ) -> str:
        """Continues `prompt` with the adapter just made or loaded, or with the base model if there is none.

        Args:
            adapter: the name of a stored adapter, or an adapter's folder.
            version: of the stored adapter; by default the active one.
            max_new_tokens, temperature, top_p, seed, on_text: see `generate_text`.

        Raises:
            TextsError: the prompt is no text.
            RecipeError: one of the numbers is out of its range.
            AdapterError, ModelError: see `load_adapter` and `generate_text`.
        """
        check_prompt(prompt)
        check_sampling(max_new_tokens, temperature, top_p)
        if adapter is not None:
            self._load_adapter(adapter, version)
        base = self._load()
        return generate_text(
            self._adaptation.model if self._adaptation else base.model,
            base.tokenizer,
            prompt,
            chat=self._chat,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            seed=None if seed is None else check_seed(seed),
            on_text=on_text,
        )

    @_alone
    def load_adapter(self, adapter: str | Path, version: int | None = None) -> AdapterRecord:
        """Puts a saved adapter on the base model, in place of any other.

        Raises:
            AdapterError: there is no such adapter; BaseModelMismatch: it was made for another base model.
        """
        return self._load_adapter(adapter, version)

    # ------------------------------------------------------------------------------------------------- its own steps

    def _load_adapter(self, adapter: str | Path, version: int | None) -> AdapterRecord:
        folder, record = self.store.find(adapter, version)
        base = self._load()
        if record.fingerprint != base.fingerprint:
            raise BaseModelMismatch(
                f"The adapter was made for {record.base_model}, and {base.reference.public_name} is another model; "
                f"use it with {record.model!r}."
            )
        if self._adaptation is not None:
            self._adaptation.detach()
        try:
            self._adaptation = load(base, folder)
        except BaseException:
            self._put_back(base)
            raise
        self._folder, self._chat = folder, record.recipe.get("chat_template", False)
        return record

    def _load(self, recipe: Recipe | None = None) -> BaseModel:
        """The base model; in another precision than it is loaded in, if a plan's recipe asks for that."""
        if recipe is not None and self._base is not None and self._base.in_4bit != recipe.load_in_4bit:
            self._base = self._adaptation = None
            machine.give_memory_back(self.device)
        if self._base is None:
            if self.device.type == "cpu" and (problem := machine.driver_problem()):
                self._tell(Notice(problem))
            base = self._base = load_base_model(self.reference, recipe or self.recipe, self.device)
            dtype = "nf4" if base.in_4bit else str(base.dtype).removeprefix("torch.")
            self._tell(ModelLoaded(self.reference.name, base.num_parameters, self.device.type, dtype))
        return self._base

    def _checked(self, gpu: str | int) -> int:
        """Bytes of a GPU that is not here, which a memory budget must not exceed."""
        size = MemoryBudget.parse(gpu, "GPU's memory").size
        if self.memory_budget is not None and self.memory_budget.size > size:
            raise MachineError(
                f"The memory budget is {self.memory_budget}, but the GPU has {gigabytes(size)}; give a budget within "
                "that, or none."
            )
        return size

    def _plan(self, reading: Reading, gpu: int | None = None) -> Plan:
        shape = read_shape(self.reference)
        dataset = make_dataset(reading, tokenizer_at_hand(self.reference), self.recipe, shape.longest)
        if gpu is not None:
            budget = self.memory_budget or MemoryBudget(gpu)
            return make_plan(shape, dataset, self.recipe, self.seed, Target.elsewhere(gpu), budget)
        # A model that is loaded is part of the plan already.
        loaded = 0 if self._base is None else sum(weight.nbytes for weight in self._base.model.parameters())
        held = memory_of(self.device)
        free = machine.free_memory(self.device) + held.held
        budget = MemoryBudget(free) if self.memory_budget is None else self.memory_budget.within(free)
        target = Target.here(self.device, held.planned_besides(loaded))
        return make_plan(shape, dataset, self.recipe, self.seed, target, budget)

    def _limit(self, plan: Plan | None) -> MemoryLimit:
        """What may be held: as planned, or without a plan the budget, or without one all that is free."""
        if plan is not None:
            return MemoryLimit(self.device, plan.budget, plan.chosen.peak)
        return MemoryLimit(self.device, self.memory_budget.size if self.memory_budget else None)

    def _announced(self, plan: Plan) -> Plan:
        if plan.stated_budget is not None:
            budget = MemoryBudget(plan.budget, plan.stated_budget)
            self._tell(Notice(f"The memory budget is {budget}; the training keeps to that."))
        chosen, parts = plan.chosen, asdict(plan.chosen.footprint)
        method, max_rows = chosen.recipe.method, chosen.spending.max_rows
        self._tell(MemoryPlanned(method, chosen.how, max_rows, plan.budget, chosen.peak, chosen.seconds, parts))
        return plan

    def _encode(self, reading: Reading, base: BaseModel) -> Dataset:
        limit = getattr(base.model.config, "max_position_embeddings", None)
        data = make_dataset(reading, base.tokenizer, self.recipe, limit)
        refuse_unknown_tokens(base.model, chain.from_iterable(example.input_ids for example in data.examples))
        left_out = tuple(asdict(item) for item in data.left_out)
        self._tell(TextsRead(data.documents, len(data.examples), data.tokens, data.padding_share, left_out))
        return data

    @contextmanager
    def _listening_to_stop(self) -> Iterator[None]:
        """Within it `stop` is heard: by each event that is told."""
        self._stop_asked = threading.Event()
        try:
            yield
        except _StopAsked as asked:
            raise Interrupted("Stopped before the training began; nothing was changed.") from asked
        finally:
            self._stop_asked = None

    def _tell(self, event: Event) -> None:
        self.on_event(event)
        if (asked := self._stop_asked) is not None and asked.is_set():
            asked.clear()
            raise _StopAsked

    @contextmanager
    def _setting_aside(self, trial: Trial, name: str) -> Iterator[None]:
        """The adapter in use makes room for a trial. Whatever stops that, it comes back; what was learnt is saved."""
        handled = sys.exception()
        if self._adaptation is not None:
            self._adaptation.detach()
        try:
            yield
        except (KeyboardInterrupt, NonFiniteLoss, BudgetExceeded) as stop:
            machine.let_go(stop, handled)
            raise self._stopped(stop, trial, name) from stop
        except BaseException as error:
            out_of_memory = self._ran_out_of_memory(error, handled)
            self._give_up(trial)
            if not out_of_memory:
                raise
            raise self._ran_out(trial) from error

    def _ran_out_of_memory(self, error: BaseException, handled: BaseException | None) -> bool:
        """Whether memory ran out; then what was computed is given back, but for what an error before it holds."""
        if not machine.ran_out_of_memory(error):
            return False
        machine.let_go(error, handled)
        machine.give_memory_back(self.device)
        return True

    def _give_up(self, trial: Trial) -> None:
        """Goes back to the adapter that was in use before the trial, if there was one."""
        trial.detach()
        self._put_back(trial.base)

    def _put_back(self, base: BaseModel) -> None:
        self._adaptation = load(base, self._folder) if self._folder else None

    def _keep(self, trial: Trial, judgement: Judgement, name: str, out: Path | None) -> SavedAdapter:
        """Saves and activates the trial's adapter, and goes on with it."""
        record = self._record(trial, judgement)
        try:
            if out is None:
                saved = self.store.save(trial.adaptation, record, name, activate=True)
            else:
                saved = self.store.save_to(trial.adaptation, record, out)
        except BaseException:
            self._give_up(trial)
            raise
        self._adaptation, self._folder, self._chat = trial.adaptation, saved.path, self.recipe.chat_template
        self.on_event(AdapterSaved(saved.name, saved.version, str(saved.path), saved.active))
        return saved

    def _stopped(self, stop: BaseException, trial: Trial, name: str) -> TrainingStopped:
        """Saves the best state so far as a version that is not active, and says so in the error it returns."""
        kind, why = (Interrupted, "Interrupted.") if isinstance(stop, KeyboardInterrupt) else (type(stop), str(stop))
        progress = trial.progress[-1] if trial.progress else Progress()
        if not progress.steps or (kind is NonFiniteLoss and not progress.best_epoch):
            self._give_up(trial)
            return kind(f"{why} This training had no better state yet, so nothing was saved.")
        try:
            saved = self.store.save(trial.adaptation, self._record(trial, None), name, activate=False)
        finally:
            self._give_up(trial)
        self.on_event(AdapterSaved(saved.name, saved.version, str(saved.path), saved.active))
        return kind(
            f"{why} The best state so far is saved as version {saved.version} of the adapter {name!r}; "
            "it is not active."
        )

    def _ran_out(self, trial: Trial) -> MachineError:
        """What to say where not even a single example fits into memory."""
        has_begun = any(progress.steps for progress in trial.progress)
        when = "while training" if has_begun else "before the first step"
        smaller, others = "Choose a smaller model or a shorter context", "close other programs"
        ways = f"{smaller}, or {others}"
        if self.memory_budget is not None:
            ways = f"{smaller}, {others}, or raise the memory budget of {self.memory_budget}"
        return MachineError(f"The memory of this {self.device.type.upper()} ran out {when}; nothing was saved. {ways}.")

    def _record(self, trial: Trial, judgement: Judgement | None) -> AdapterRecord:
        base, data = trial.base, trial.dataset
        return AdapterRecord(
            base_model=base.reference.public_name,
            model=base.reference.name,
            fingerprint=base.fingerprint,
            recipe=asdict(trial.recipe),
            documents=data.documents,
            examples=len(data.examples),
            tokens=data.tokens,
            heldout_loss_before=judgement.before.mean if judgement else None,
            heldout_loss_after=judgement.after.mean if judgement else None,
            seed=self.seed,
        )


def check_seed(seed: int) -> int:
    """Returns `seed` if random generators take it, else raises a RecipeError."""
    if not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise RecipeError(f"The seed must be a whole number from 0 to 2^63 - 1, but is {seed!r}.")
    return seed


def check_prompt(prompt: str) -> None:
    """Raises a TextsError if `prompt` is no text that a tokenizer takes."""
    if not isinstance(prompt, str):
        raise TextsError(f"The prompt must be a text, but is of type {type(prompt).__name__}.")
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise TextsError(f"The prompt is no Unicode text (character {error.start}); give it in UTF-8.") from None


def check_sampling(max_new_tokens: int, temperature: float, top_p: float) -> None:
    """Raises a RecipeError if no text can be made with one of these."""
    if type(max_new_tokens) is not int or max_new_tokens < 1:
        raise RecipeError(f"max_new_tokens must be a whole number of at least 1, but is {max_new_tokens!r}.")
    if not 0 <= temperature < math.inf:
        raise RecipeError(f"temperature must be a number from 0 on, but is {temperature!r}.")
    if not 0 < top_p <= 1:
        raise RecipeError(f"top_p must be a number above 0 and at most 1, but is {top_p!r}.")
