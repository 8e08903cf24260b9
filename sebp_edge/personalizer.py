"""The main path: texts in, a saved adapter out."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from pathlib import Path

from sebp_edge.adapters.erasure import Receipt
from sebp_edge.adapters.forget import Forgetting
from sebp_edge.adapters.names import is_plain
from sebp_edge.adapters.record import AdapterRecord
from sebp_edge.adapters.store import AdapterStore
from sebp_edge.ask.answer import NUM_PASSAGES, Answer
from sebp_edge.ask.searched_texts import SearchedTexts
from sebp_edge.basics.files import expand_user
from sebp_edge.basics.stopping import StopRequested, StopSignal
from sebp_edge.errors import BusyError, ClosedError, Interrupted, OptionError
from sebp_edge.events import Sink, silent
from sebp_edge.export.export import check_options, export
from sebp_edge.export.result import ExportResult
from sebp_edge.machine import devices
from sebp_edge.machine.politeness import Politeness
from sebp_edge.memory.budget import MemoryBudget
from sebp_edge.memory.plan import Plan
from sebp_edge.models.catalog import DEFAULT_MODEL, resolve
from sebp_edge.models.completion import Completion
from sebp_edge.models.libraries import quiet_libraries
from sebp_edge.models.sampling import Sampling, check_seed
from sebp_edge.recipe import Recipe
from sebp_edge.research import lr_range
from sebp_edge.research.analysis.analysis import Analysis
from sebp_edge.run.asking import Turn, ask
from sebp_edge.run.call import Call
from sebp_edge.run.generating import complete, generate
from sebp_edge.run.giving_way import GivingWay
from sebp_edge.run.inspection import Inspection
from sebp_edge.run.job import Job
from sebp_edge.run.measuring import analyze_gradients, sweep_learning_rates
from sebp_edge.run.model_in_use import ModelInUse
from sebp_edge.run.preparation import Preparation
from sebp_edge.run.result import AdaptResult
from sebp_edge.run.resuming import resume, run_adapt, run_forget, run_politely
from sebp_edge.run.saving import Place
from sebp_edge.run.unchanged import UnchangedResult
from sebp_edge.texts.folders import Folder
from sebp_edge.texts.prompts import Messages, check_prompt, check_text
from sebp_edge.texts.readers import read_texts


class _Current(Enum):
    ADAPTER = "the adapter in use"


class Personalizer:
    """Adapts a language model to its owner's texts, and generates text with it.

        result = Personalizer("llama-3.2-3b").adapt(Path("notes"))

    Only one call at a time may use the model: during one, all methods but `stop`, `pause` and `plan` raise BusyError.
    `stop()`, or an event that was passed as `stop_when`, ends a call, which raises Interrupted. Every other error is a
    SebpEdgeError too; its message says what to do.

    A training runs on one device, in one process: `adapt` raises a MachineError if torchrun or accelerate has started
    several. On several GPUs, researchers train with `sparsify` in a loop of their own.

    Args:
        model: a known name (`sebp-edge models` lists them), a folder with a model, a GGUF file, a model of Ollama or LM
            Studio ("ollama:llama3.2:3b", "lmstudio:NAME"), or a Hub id.
        recipe: a bundled recipe's name, a TOML file, or a Recipe. By default, that of the version that is learnt on
            from; without one, "chat" if most texts are conversations, such as chats and mails, else "notes".
        device: "cuda", "mps" or "cpu"; by default the best available one.
        store: an AdapterStore, or the folder where adapters are kept; by default the OS's data folder.
        memory_budget: how much memory this process may use while it adapts, "8GB", "7.5GiB" or a number of bytes: of
            the GPU, or of the host on the CPU. If no plan fits into what is free of it, `adapt` loads nothing.
        seed: the random seed.
        me: the owner's name in chats and mails, or a list, since each service may have another one.
        politeness: how trainings give way to other programs; by default, they do not.
        on_event: receives every event (see `sebp_edge.events`).
    """

    def __init__(
        self,
        model: str | Path = DEFAULT_MODEL,
        *,
        recipe: str | Path | Recipe | None = None,
        device: str | None = None,
        memory_budget: str | int | MemoryBudget | None = None,
        store: AdapterStore | str | Path | None = None,
        seed: int = 0,
        me: str | Sequence[str] = (),
        politeness: Politeness | None = None,
        on_event: Sink = silent,
    ):
        self.reference = resolve(model)
        self.recipe = Recipe.load(recipe)
        self.device = devices.pick_device(device)
        self.memory_budget = None if memory_budget is None else MemoryBudget.parse(memory_budget)
        self.store = store if isinstance(store, AdapterStore) else AdapterStore(store)
        self.seed = check_seed(seed)
        self.me = (me,) if isinstance(me, str) else tuple(me)
        self.politeness = (politeness or Politeness()).on(self.device.type)
        self.on_event, self.meanwhile = on_event, lambda: None  # which is called while a training waits
        self.in_use = ModelInUse(self.reference, self.recipe, self.device)
        self._searched = SearchedTexts()
        self._lock, self._is_closed = threading.Lock(), False
        self._signal = StopSignal()  # of the running call, or of the last one

    def adapt(
        self,
        texts=None,
        *,
        name: str | None = None,
        out: str | Path | None = None,
        activate_anyway: bool = False,
        fresh: bool = False,
        sync: bool = False,
        keep_samples: bool = False,
        stop_when: threading.Event | None = None,
    ) -> AdaptResult | UnchangedResult:
        """Adapts the model to `texts`, judges the result, saves it, and activates it if the gate keeps it.

        The gate keeps an adapter if, with 95 % confidence, its loss on test documents is below the base model's by at
        least the recipe's margin, and not above the active version's by more than 2 %. What it does not keep is saved,
        but not activated.

        If a version of that name is active, the adaptation learns on from it: it trains on new and changed documents
        and on a few others, and does nothing if there are none. Documents that are gone stay known. If it must start
        over, a notice says why. If the version was made from other texts, for another model or with another recipe, a
        NameInUse event says so first; a sink that raises an error ends the call then, and nothing has changed. A
        version that became active during the call stays active (see `overtaken_by`), unless `activate_anyway` is set.

        Args:
            texts: a string, the `pathlib.Path` of a file or folder, a record, or a list of these (see `read_texts`).
                None for a recipe that trains on bundled notes.
            name: the adapter's name in the store, by default "default", or "reader" with the recipe "ask"; each
                adaptation is a new version of it.
            out: a new folder to save to instead of the store; there is no active version then.
            activate_anyway: whether to activate the adapter whatever the gate says.
            fresh: whether to start over, and learn all documents again.
            sync: whether to forget documents that are gone: if there are any, the adaptation starts over.
            keep_samples: whether to save samples and names of documents, for the version's page; otherwise no text is.

        Raises:
            TrainingStopped: Interrupted, NonFiniteLoss or BudgetExceeded; the best state so far, if there is one, is
                saved as a version that is not active. If the training is over, the adapter is saved, and activated if
                the gate keeps it, and Interrupted says so.
            StorageError: at the end, it says where the adapter was saved instead.
        """
        devices.refuse_several_processes()
        place = Place(self.store, name or self.recipe.default_name, None if out is None else expand_user(out))
        place.check_writable()
        options = {"activate_anyway": activate_anyway, "fresh": fresh, "sync": sync, "keep_samples": keep_samples}
        with self._exclusive_call(stop_when) as call:
            return run_politely(
                call, texts, lambda interruptions: run_adapt(call, interruptions, place, texts, options)
            )

    def forget(
        self,
        documents: str | Path | Sequence[str | Path],
        texts=None,
        *,
        name: str = "default",
        near_duplicates: bool = False,
        activate_anyway: bool = False,
        on_found: Callable[[Forgetting], None] | None = None,
        stop_when: threading.Event | None = None,
    ) -> Receipt:
        """Makes an adapter forget documents: trains without them, then removes every version that knew them.

        If the active version knows them, a new one is trained from the base model on its other documents, with its
        splits, recipe and seed, and activated if it is better than the base model. If it is not, the older versions are
        removed nevertheless: active is then one that was active before and never knew the documents, or none. A call
        that was killed is completed by the same call.

        Args:
            documents: paths of files, or names, numbers or hashes as in `Adapter.documents`, or a list of these.
            texts: as for `adapt`: the other documents, unchanged, with these or without; others are left out. By
                default, they are read where they were learnt; give them if they were moved, or were no files.
            name: the adapter's name in the store.
            near_duplicates: whether to forget near-duplicates too, and documents that hold parts of them.
            activate_anyway: whether to activate the new version whatever the gate says.
            on_found: receives what will be removed, before anything is changed; an error that it raises ends the call.

        Raises:
            AdapterError: there is no such adapter, no version knows a document, or it is not known what versions know.
            TextsError: another document has changed or cannot be read, or none would remain.
            BaseModelMismatch: the adapter was made for another base model.
            TrainingStopped: as for `adapt`; nothing is forgotten after an error.
        """
        devices.refuse_several_processes()
        place = Place(self.store, name)
        place.check_writable()
        if isinstance(documents, str | Path):
            documents = [documents]
        if texts is not None:
            texts = [texts] if isinstance(texts, str | Path | Folder | dict) else list(texts)
        options = {"near_duplicates": near_duplicates, "activate_anyway": activate_anyway}
        given = (place, list(documents), texts, options, on_found)
        with self._exclusive_call(stop_when) as call:
            return run_politely(call, texts, lambda interruptions: run_forget(call, interruptions, *given))

    def resume(
        self,
        job: str | None = None,
        texts=None,
        *,
        changed: str = "refuse",
        stop_when: threading.Event | None = None,
    ) -> AdaptResult | UnchangedResult | Receipt:
        """Goes on with a training that was paused, stopped or killed; returns what its call would have returned.

        On the CPU, the adapter is bit for bit that of a training that nothing has interrupted. This Personalizer needs
        the job's model and device, as `Personalizer(**store.jobs.get(job).arguments())` has.

        Args:
            job: the id of a job in the store; by default the only one that does not run.
            texts: the same texts, if they were no files or were moved. New documents are left for the next adaptation.
            changed: what to do if documents have changed or are gone: "refuse"; "without", to go on without them,
                though it knows what it has learnt of them; or "again", to start over in any case.

        Raises:
            TextsChanged: documents have changed or are gone.
            JobError: there is no such job, it runs already, or it cannot go on as it was begun.
            TrainingStopped, StorageError: see `adapt`.
        """
        devices.refuse_several_processes()
        with self._exclusive_call(stop_when) as call:
            found = self.store.jobs.get(job)
            return run_politely(call, texts, lambda interruptions: resume(call, interruptions, found, texts, changed))

    def stop(self) -> None:
        """Stops the call that runs in another thread, as Ctrl-C would; that call raises Interrupted.

        The call checks for a stop several times a second while texts are read, compared and tokenised, before and
        after the model is loaded, and after each micro-batch of an evaluation, each step, each analyzed example and
        each generated token. Does nothing if no call is running; the next call is not stopped either. To stop a call
        that may not have started yet, set its `stop_when`, which is checked when it starts, and wherever `stop` is.
        """
        self._signal.set()

    def pause(self) -> bool:
        """Pauses the training that runs in another thread; that call raises Paused with the id of its job.

        It ends after its step, as soon as its checkpoint is written, and frees the model's memory. Returns False if no
        call runs that can be paused: `adapt` into the store, `forget` and `resume` can, until they save the adapter.
        """
        return self._signal.pause()

    def close(self) -> None:
        """Gives the memory of the model, its adapter and searched texts back; later calls raise ClosedError.

        Does nothing the second time. A Personalizer is also a context manager, which closes it.

        Raises:
            BusyError: another call is running; end it with `stop` before.
        """
        with self._exclusive_use():
            self._is_closed, self._searched = True, SearchedTexts()
            self.in_use.close()

    def __enter__(self) -> "Personalizer":
        return self

    def __exit__(self, *error) -> None:
        self.close()

    def plan(self, texts=None, *, gpu: str | int | None = None) -> Plan:
        """Plans an adaptation to `texts` within the memory budget: options, peak memory and estimated time.

        Loads no model. Without a budget, plans for the memory that is free now. Counts the tokens of a model that has
        not been downloaded with the bundled model's tokenizer, which produces more.

        Args:
            texts: as for `adapt`.
            gpu: memory of an absent GPU, "8GB" or a number of bytes. The plan is then for an NVIDIA GPU with bf16 and
                unknown speed, in a host with enough memory; `device` is ignored.

        Raises:
            MachineError: nothing fits; the message says what would.
        """
        self._refuse_closed()
        call = self._make_call(StopSignal())
        size = None if gpu is None else call.parse_gpu_memory(gpu)
        with quiet_libraries():
            return Preparation(*call.with_texts(texts)).plan(gpu=size).plan

    def inspect(self, texts=None, *, name: str | None = None, stop_when: threading.Event | None = None) -> Inspection:
        """Shows what `adapt` would do with `texts`: what is read, the split, examples, memory and time, what to expect.

        Loads no weights and changes nothing. Texts that `adapt` would refuse are inspected too (see `refusal`).

        Args:
            texts: as for `adapt`.
            name: the adapter whose next version this would be. Documents keep their splits of earlier versions, and
                `adapt` learns on from its active version.
        """
        with self._exclusive_call(stop_when) as call:
            return Inspection.of(call, texts, name or self.recipe.default_name)

    def analyze(self, texts, *, examples: int = 16, stop_when: threading.Event | None = None) -> Analysis:
        """Measures how sparse the base model's gradients are on `texts`, without an adapter; changes nothing.

        The model may also be a local folder with an encoder (BERT, RoBERTa, DistilBERT). Its loss is that of classes
        drawn by the seed; a head that it lacks gets random weights.

        Args:
            texts: as for `adapt`.
            examples: maximum number of examples to analyze, drawn by the seed.
        """
        with self._exclusive_call(stop_when) as call:
            return analyze_gradients(call, texts, examples)

    def lr_range(
        self,
        texts,
        *,
        lowest: float = lr_range.LOWEST,
        highest: float = lr_range.HIGHEST,
        steps: int = lr_range.STEPS,
        stop_when: threading.Event | None = None,
    ) -> lr_range.LearningRateRange:
        """Runs a learning-rate range test (Smith 2017) with the recipe's settings; changes and saves nothing.

        Trains on all of `texts` while the learning rate grows exponentially with every step, until the loss diverges.

        Args:
            texts: as for `adapt`.
            lowest, highest: the learning rates of the first and the last step.
            steps: the number of steps: 20 or more, and 10 or more for each power of ten between the rates.
        """
        rates = lr_range.growing_rates(lowest, highest, steps)
        with self._exclusive_call(stop_when) as call:
            return sweep_learning_rates(call, texts, rates)

    def generate(
        self,
        prompt: str | Messages,
        *,
        adapter: str | Path | _Current | None = _Current.ADAPTER,
        version: int | None = None,
        max_new_tokens: int = 200,
        temperature: float = 0.7,
        top_p: float = 0.9,
        top_k: int | None = None,
        repetition_penalty: float = 1.0,
        stop: Sequence[str] = (),
        seed: int | None = None,
        sparse_kernels: bool = False,
        on_text: Callable[[str], None] | None = None,
        stop_when: threading.Event | None = None,
    ) -> str:
        """Continues a text, or answers the last of several messages; returns the new text.

        Messages are rendered with the model's chat template. A text is continued as it is, unless the adapter was
        trained mostly on conversations, or on questions: then it is a user message, or a question without a template.

        Args:
            prompt: a text, or messages: `[{"role": "user", "content": "Where is the key?"}]`, with the roles "system",
                "user" and "assistant", the last one the user's.
            adapter: the name of a stored adapter, or an adapter's folder; it stays in use after this call. None uses
                the base model for this call only. The default is the adapter that was made or loaded last, if any.
            version: of the stored adapter; by default the active one.
            max_new_tokens, temperature, top_p, top_k, repetition_penalty, stop, seed: see `Sampling`.
            sparse_kernels: whether the layers of a 2:4 model compute with compressed weights (see `semi_structured`).
            on_text: receives the new text in chunks, as it is generated. An error that it raises ends the call.

        Raises:
            TextsError: the prompt is neither a text nor messages, is empty, or is longer than the model's context.
            OptionError: a sampling option is out of range, or a version was given without an adapter.
            AdapterError, ModelError: see `load_adapter` and `generate_text`.
            SparsityError: there are no sparse kernels for this machine or model, or the model is not 2:4.
            Interrupted: the call was stopped, or Ctrl-C was pressed; its `text` is what was generated so far.
        """
        check_prompt(prompt)
        sampling = Sampling(max_new_tokens, temperature, top_p, top_k, repetition_penalty, stop, seed)
        is_named = self._is_named(adapter, version)
        with self._exclusive_call(stop_when) as call:
            if is_named:
                call.load_adapter(adapter, version)
            with_adapter = adapter is not None
            return generate(call, prompt, sampling, on_text, with_adapter=with_adapter, sparse_kernels=sparse_kernels)

    def complete(
        self,
        before: str,
        *,
        max_new_tokens: int = 16,
        min_probability: float = 0.5,
        adapter: str | Path | _Current | None = _Current.ADAPTER,
        version: int | None = None,
        on_text: Callable[[str], None] | None = None,
        stop_when: threading.Event | None = None,
    ) -> Completion:
        """Returns the words that the owner would write next, as an editor's ghost text; none if the model is not sure.

        They end with their sentence or line. A word that `before` ends within is completed. What consecutive texts
        begin with is computed once, also by a call that was stopped.

        Args:
            before: the text before the cursor, which may be empty; the model reads the last 4,096 characters at most.
            max_new_tokens: the most tokens to compute after the word that is completed.
            min_probability: of the words together, by the model: that the text goes on with just these.
            adapter, version: as for `generate`.
            on_text: receives each word as soon as the model is sure of it.

        Raises:
            TextsError, OptionError, AdapterError, ModelError, Interrupted: see `generate`.
        """
        check_text(before, "before")
        is_named = self._is_named(adapter, version)
        with self._exclusive_call(stop_when) as call:
            if is_named:
                call.load_adapter(adapter, version)
            return complete(call, before, max_new_tokens, min_probability, on_text, with_adapter=adapter is not None)

    def ask(
        self,
        question: str,
        texts,
        *,
        before: Sequence[Turn] = (),
        adapter: str | Path | _Current | None = _Current.ADAPTER,
        version: int | None = None,
        num_passages: int = NUM_PASSAGES,
        max_new_tokens: int = 60,
        on_text: Callable[[str], None] | None = None,
        stop_when: threading.Event | None = None,
    ) -> Answer:
        """Answers a question from texts, and names the passages that the answer was read in.

        Searches the texts in memory, shows the model the best passages and the question, and compares its reply with
        them: a reply whose words or values are not there gives way to a sentence of the best passage. If no passage is
        about the question, the answer says so, and no model is loaded. Texts that were read before are read again only
        where files have changed.

        Args:
            texts: as for `adapt`; of chats and mails, what everybody wrote is searched.
            before: questions and their answers' texts before this one, which a short question goes on from.
            adapter, version: as for `generate`.
            num_passages: the most passages that the model is shown; fewer if the model's context is too short.
            on_text: receives the model's reply in chunks, before it is compared: see `Answer.quoted`.

        Raises:
            TextsError: the question is empty or longer than the model's context, or see `adapt`.
            AdapterError, ModelError, Interrupted: see `generate`.
        """
        check_prompt(question)
        is_named = self._is_named(adapter, version)
        sampling = Sampling(max_new_tokens, temperature=0, stop=("\n",))
        with self._exclusive_call(stop_when) as call:
            index = self._searched.index(texts, call.progress)
            named = (adapter, version) if is_named else None
            options = {"named": named, "with_adapter": adapter is not None}
            return ask(call, question, index, before, sampling, num_passages, on_text, **options)

    def export(
        self,
        adapter: str | Path,
        to: str | Path,
        *,
        format: str = "gguf",
        quant: str | None = None,
        version: int | None = None,
        texts=None,
        stop_when: threading.Event | None = None,
    ) -> ExportResult:
        """Exports an adapter for other programs, and reads back what was written, on the CPU.

        A merged model is computed a tensor at a time. To compare what the files compute, the base model is loaded in
        fp32 if the free memory holds it; a model that this Personalizer has loaded is released before.

        Args:
            adapter: the name of a stored adapter, or an adapter's folder.
            to: the folder to make, which must not exist.
            format: "gguf", a quantised model for llama.cpp and LM Studio; "ollama", the same with a Modelfile;
                "merged", a model folder of transformers; "peft", "gguf-lora" or "mlx", the adapter alone.
            quant: of gguf and ollama: "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "bf16" or "f16"; by default the one that
                the adapter was trained for, or "q8_0". "q4_k_m" and the like need llama.cpp's llama-quantize.
                "smallest" chooses the first that keeps 90 % of the adapter's gain on `texts`.
            version: of the stored adapter; by default the active one.
            texts: texts to measure the gain on, as for `adapt`; those that the adapter was made from, for example.

        Raises:
            ExportError: the adapter cannot be written in this format, or another program computes something else with
                the files. After any error, nothing is left behind.
        """
        quant = check_options(format, quant, has_texts=texts is not None)
        with self._exclusive_call(stop_when) as call:
            found = self.store.find(adapter, version)
            reading = None if texts is None else read_texts(texts)
            self.in_use.release()
            name = adapter if isinstance(adapter, str) and is_plain(adapter) else "adapter"
            rest = (self.reference, to, format, quant, reading, call.notify, call.signal.check)
            result = export(name, found.path, found.record, *rest)
            if self.store.folder.is_dir():
                call.remember_model(found.record)
            return result

    def load_adapter(self, adapter: str | Path, version: int | None = None) -> AdapterRecord:
        """Puts a saved adapter on the base model instead of the current one; returns its record.

        Args:
            adapter, version: as for `export`.

        Raises:
            AdapterError: there is no such adapter, or it is damaged.
            BaseModelMismatch: it was made for another base model.
        """
        with self._exclusive_call() as call:
            return call.load_adapter(adapter, version)

    def _is_named(self, adapter, version: int | None) -> bool:
        """Whether an adapter was named; raises an OptionError for a version without one."""
        is_named = adapter not in (None, _Current.ADAPTER)
        if version is not None and not is_named:
            raise OptionError(f"version={version!r} was given without an adapter; name one with adapter=.")
        return is_named

    def _make_call(self, signal: StopSignal) -> Call:
        job = Job(self.on_event)
        way = GivingWay(self.politeness, self.device, job, signal, self.meanwhile)
        return Call(self.recipe, self.seed, self.store, self.me, self.memory_budget, self.in_use, signal, job, way)

    @contextmanager
    def _exclusive_call(self, stop_when: threading.Event | None = None) -> Iterator[Call]:
        """Context in which no other call uses the model, and this one can be stopped."""
        with self._exclusive_use():
            self._refuse_closed()
            try:
                self._signal = StopSignal(stop_when)
                self._signal.check()
                call = self._make_call(self._signal)
                with quiet_libraries(), call.job:
                    yield call
                    call.job.finish()
            except StopRequested as request:
                raise Interrupted("Stopped; nothing was changed.") from request

    @contextmanager
    def _exclusive_use(self) -> Iterator[None]:
        if not self._lock.acquire(blocking=False):
            advice = "wait for it, end it with stop(), or use another Personalizer"
            raise BusyError(f"This Personalizer is running another call; {advice}.")
        try:
            yield
        finally:
            self._lock.release()

    def _refuse_closed(self) -> None:
        if self._is_closed:
            raise ClosedError("This Personalizer was closed; make a new one.")
