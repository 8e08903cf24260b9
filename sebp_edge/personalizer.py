"""The main path: texts in, a saved adapter out."""

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from enum import Enum
from pathlib import Path

from sebp_edge.adapters.erasure import Receipt
from sebp_edge.adapters.forget import Forgetting, Remaining, forget
from sebp_edge.adapters.names import is_plain
from sebp_edge.adapters.record import AdapterRecord
from sebp_edge.adapters.saved import SavedAdapter
from sebp_edge.adapters.store import AdapterStore
from sebp_edge.errors import (
    BaseModelMismatch,
    BudgetExceeded,
    BusyError,
    Interrupted,
    MachineError,
    ModelError,
    NonFiniteLoss,
    OptionError,
    StorageError,
    TextsError,
    TrainingStopped,
)
from sebp_edge.events import AdapterSaved, Event, Notice, Sink, silent
from sebp_edge.export.export import check_options, export
from sebp_edge.export.result import ExportResult
from sebp_edge.files import expand_user
from sebp_edge.interruptions import Interruptions
from sebp_edge.machine import devices
from sebp_edge.memory.budget import MemoryBudget
from sebp_edge.memory.guard import MemoryGuard
from sebp_edge.memory.options import FASTEST, MemoryOptions
from sebp_edge.memory.plan import Plan
from sebp_edge.memory.shape_reader import read_shape
from sebp_edge.models.adaptation import Adaptation, load, saved_bytes
from sebp_edge.models.catalog import DEFAULT_MODEL, resolve
from sebp_edge.models.generation import generate_text
from sebp_edge.models.libraries import quiet_libraries
from sebp_edge.models.loading import BaseModel, has_own_tokenizer, local_tokenizer
from sebp_edge.models.sampling import Sampling, check_seed
from sebp_edge.questions.asking import prompt_for
from sebp_edge.questions.interviews import InterviewCache
from sebp_edge.recipe import Recipe
from sebp_edge.research import lr_range
from sebp_edge.research.analysis.analysis import Analysis, analyze
from sebp_edge.research.lr_range import LearningRateRange
from sebp_edge.research.lr_sweep import run_range_test
from sebp_edge.research.pruning.pruned_model import attach
from sebp_edge.research.pruning.semi_structured import semi_structured
from sebp_edge.run.assessment import Assessment, Assessor
from sebp_edge.run.inspection import Inspection
from sebp_edge.run.model_in_use import ModelInUse
from sebp_edge.run.preparation import PlannedTraining, Preparation
from sebp_edge.run.replies import interview
from sebp_edge.run.result import AdaptResult
from sebp_edge.run.saving import NewVersion, describe_location, make_record, save, save_best_state
from sebp_edge.run.start import latest_history
from sebp_edge.run.texts_comparison import compare_with_active
from sebp_edge.run.unchanged import UnchangedResult, remember_texts
from sebp_edge.run.version_texts import VersionTexts
from sebp_edge.stopping import StopRequested, StopSignal
from sebp_edge.texts.folders import Folder
from sebp_edge.texts.prompts import Messages, check_prompt, encode_prompt
from sebp_edge.texts.readers import Reading, read_texts
from sebp_edge.texts.split_history import SplitHistory
from sebp_edge.training.gate import Gate, GateResult
from sebp_edge.training.run import TrainingRun


class _Current(Enum):
    ADAPTER = "the adapter in use"


class Personalizer:
    """Adapts a language model to its owner's texts, and generates text with it.

        result = Personalizer("llama-3.2-3b").adapt(Path("notes"))

    Only one call at a time may use the model: during a call, `adapt`, `forget`, `analyze`, `lr_range`, `generate`,
    `export` and `load_adapter` raise BusyError. `stop()` ends the running call from another thread; that call raises
    Interrupted. To stop a call that may not have started yet, pass an event to it and set it: `adapt(texts,
    stop_when=event)`.

    A training runs on one device, in one process: `adapt` raises a MachineError if torchrun or accelerate has started
    several. On several GPUs, researchers train with `sparsify` in a loop of their own.

    Args:
        model: a known name (`sebp-edge models` lists them), a folder with a model, a GGUF file, a model of Ollama or LM
            Studio ("ollama:llama3.2:3b", "lmstudio:NAME"), or a Hub id.
        recipe: a bundled recipe's name, a TOML file, or a Recipe.
        device: "cuda", "mps" or "cpu"; by default the best available one.
        store: an AdapterStore, or the folder where adapters are kept; by default the OS's data folder.
        memory_budget: how much memory this process may use while it adapts, "8GB", "7.5GiB" or a number of bytes: GPU
            memory, or host memory on the CPU. If no plan fits into it, or into what other programs leave of it, `adapt`
            raises before it loads anything. None sets no limit.
        seed: the random seed.
        on_event: receives every event (see `sebp_edge.events`).

    Raises:
        SebpEdgeError: an argument is invalid.
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
        self.device = devices.pick_device(device)
        self.memory_budget = None if memory_budget is None else MemoryBudget.parse(memory_budget)
        self.store = store if isinstance(store, AdapterStore) else AdapterStore(store)
        self.seed = check_seed(seed)
        self.on_event = on_event
        self.in_use = ModelInUse(self.reference, self.recipe, self.device)
        self._lock = threading.Lock()
        self._signal = StopSignal()  # of the running call, or of the last one

    def adapt(
        self,
        texts,
        *,
        name: str = "default",
        out: str | Path | None = None,
        keep_anyway: bool = False,
        fresh: bool = False,
        sync: bool = False,
        keep_samples: bool = False,
        stop_when: threading.Event | None = None,
    ) -> AdaptResult | UnchangedResult:
        """Adapts the model to `texts`, judges the result, saves it, and activates it if the gate keeps it.

        The gate keeps an adapter if, with 95 % confidence, its loss on test documents is below the base model's by at
        least the recipe's margin, and not above the active version's by more than 2 %. What it does not keep is saved
        as a version that is not active.

        If a version of that name is active, the adaptation learns on from it: it trains on new and changed documents
        and on a few others, and does nothing if there are none. Documents that are gone stay known. It starts over if
        the model, the seed or a value of the recipe that the weights depend on is another one, if the version has no
        judged state to learn on from, or if all weights are trained; a notice says why. If the version was made from
        other texts, for another model or with another recipe, a NameInUse event says so first; a sink that raises an
        error ends the call then, and nothing has changed.

        If another version becomes active during the call, with which the new one was not compared, the new one is
        saved but not activated (see `overtaken_by`), unless `keep_anyway` is set.

        Args:
            texts: a string, the `pathlib.Path` of a file or folder, a record, or a list of these (see `read_texts`).
            name: the adapter's name in the store; each adaptation is a new version of it.
            out: a new folder to save to instead of the store; there is no active version then.
            keep_anyway: whether to activate the adapter whatever the gate says.
            fresh: whether to start over, and learn all documents again.
            sync: whether to forget documents that are gone: if there are any, the adaptation starts over.
            keep_samples: whether to save the result's samples and the names of documents with the version, for its
                page; they are user text. Otherwise no text is saved.
            stop_when: an event that stops this call once it is set (see `stop`).

        Raises:
            SebpEdgeError: one of its subclasses; the message says what to do. Before Interrupted, NonFiniteLoss and
                BudgetExceeded, the best state so far, if there is one, is saved as a version that is not active. If the
                training is over, the adapter is saved, and activated if the gate keeps it, and Interrupted says so. A
                StorageError at the end says where the adapter was saved instead.
        """
        begin, out = time.perf_counter(), None if out is None else expand_user(out)
        devices.refuse_several_processes()
        self.store.check_writable(name, out)
        with Interruptions() as interruptions, self._exclusive_call(stop_when):
            preparation = self._preparation(self._signal, name if out is None else None)
            reading = preparation.read(texts)
            active = None
            if out is None:
                active = compare_with_active(self.store, name, self.reference, self.recipe, self.seed, reading)
            if active is not None and not fresh and active.is_unchanged(sync=sync):
                remember_texts(self.store, active, reading)
                return UnchangedResult.of(active)
            if active is not None and active.name_in_use is not None:
                self._notify(active.name_in_use)
            if out is None and not fresh:
                preparation = preparation.starting_at(active, self.store, sync=sync)
            return self._adapt(
                preparation,
                reading,
                name,
                out,
                interruptions,
                begin,
                keep_anyway=keep_anyway,
                keep_samples=keep_samples,
                compares=out is None,
            )

    def forget(
        self,
        documents: str | Path | Sequence[str | Path],
        texts=None,
        *,
        name: str = "default",
        near_duplicates: bool = False,
        keep_anyway: bool = False,
        on_found: Callable[[Forgetting], None] | None = None,
        stop_when: threading.Event | None = None,
    ) -> Receipt:
        """Makes an adapter forget documents: trains without them, then removes every version that knew them.

        If the active version knows them, a new one is trained from the base model on its other documents, with its
        splits, recipe and seed. The gate compares that one with the base model only, and activates it if it is better.
        If it is not, it stays inactive, and the older versions are removed nevertheless: active is then one that was
        active before and never knew the documents, or none. A call that was killed is completed by the same call.

        Args:
            documents: paths of files, or names, numbers or hashes as in `Adapter.documents`, or a list of these.
            texts: as for `adapt`: the other documents, unchanged; these may be there or not. What the active version
                has not learnt is left out. By default, they are read where they were learnt; give them if their files
                were moved, or if they were no files.
            name: the adapter's name in the store.
            near_duplicates: whether to forget near-duplicates too, and documents that hold parts of them.
            keep_anyway: whether to activate the new version whatever the gate says.
            on_found: receives what will be removed, before anything is changed; an error that it raises ends the call.
            stop_when: an event that stops this call once it is set (see `stop`).

        Raises:
            AdapterError: there is no such adapter, no version knows a document, or it is not known what versions know.
            TextsError: another document has changed or cannot be read, or none would remain.
            BaseModelMismatch: the adapter was made for another base model.
            SebpEdgeError: as for `adapt`; nothing is forgotten then.
        """
        devices.refuse_several_processes()
        self.store.check_writable(name, None)
        if isinstance(documents, str | Path):
            documents = [documents]
        if texts is not None:
            texts = [texts] if isinstance(texts, str | Path | Folder | dict) else list(texts)
        with Interruptions() as interruptions, self._exclusive_call(stop_when):
            preparation = self._preparation(self._signal)
            self.store.delete_questions()  # so that those about the other documents are written without these

            def train(remaining: Remaining) -> SavedAdapter:
                return self._train_again(preparation, remaining, name, interruptions, keep_anyway=keep_anyway)

            receipt = forget(
                self.store.adapter(name),
                documents,
                texts,
                preparation.read,
                train,
                with_near_duplicates=near_duplicates,
                is_exact=self.device.type == "cpu",
                on_found=on_found,
            )
            if self.in_use.adapter_folder is not None and not self.in_use.adapter_folder.exists():
                self.in_use.detach_adapter()
                self.in_use.restore_adapter(self.on_event)
            interruptions.outcome = Interrupted(f"Interrupted after forgetting; the receipt is {receipt.path!r}.")
            return receipt

    def stop(self) -> None:
        """Stops the call that runs in another thread, as Ctrl-C would; that call raises Interrupted.

        The call checks for a stop several times a second while texts are read, compared and tokenised, before and
        after the model is loaded, and after each micro-batch of an evaluation, each step of a training, each example of
        an analysis and each generated token.
        `adapt` saves its best state so far as a version that is not active. Once the training is over, a stop ends only
        the assessment of the adapter, which is saved, and activated if the gate keeps it.

        Does nothing if no call is running; the next call is not stopped either. To stop a call that may not have
        started yet, for example because its thread is just starting, pass an event as `stop_when` and set it: it is
        checked when the call starts, and wherever `stop` is.
        """
        self._signal.set()

    def plan(self, texts, *, gpu: str | int | None = None) -> Plan:
        """Plans an adaptation to `texts` within the memory budget: options, peak memory and estimated time.

        Loads no model. Without a budget, plans for the memory that is free now. If the model has not been downloaded,
        tokens are counted with the bundled model's tokenizer, which produces more of them.

        Args:
            texts: as for `adapt`.
            gpu: memory of an absent GPU, "8GB" or a number of bytes. The plan is then for an NVIDIA GPU with bf16 and
                unknown speed, in a host with enough memory; `device` is ignored.

        Raises:
            SebpEdgeError: one of its subclasses; a MachineError if nothing fits; its message says what would.
        """
        preparation = self._preparation(StopSignal())
        size = None if gpu is None else preparation.parse_gpu_memory(gpu)
        with quiet_libraries():
            return preparation.plan(preparation.read(texts), loaded_bytes=self.in_use.loaded_bytes, gpu=size).plan

    def inspect(self, texts, *, name: str = "default", stop_when: threading.Event | None = None) -> Inspection:
        """Shows what `adapt` would do with `texts`: what is read, the split, examples, memory and time, what to expect.

        Loads no weights and changes nothing. Texts that `adapt` would refuse are inspected too, and the reason is in
        `refusal`.

        Args:
            texts: as for `adapt`.
            name: the adapter whose next version this would be. Documents keep their splits of earlier versions, and
                `adapt` learns on from its active version.
            stop_when: an event that stops this call once it is set (see `stop`).

        Raises:
            SebpEdgeError: one of its subclasses, if nothing can be read or the model cannot be used.
        """
        with self._exclusive_call(stop_when):
            preparation = self._preparation(self._signal, name)
            reading = preparation.read(texts)
            active = compare_with_active(self.store, name, self.reference, self.recipe, self.seed, reading)
            preparation = preparation.starting_at(active, self.store, sync=False)
            dataset, planned, refusal = preparation.make_dataset(reading), None, ""
            beginning = preparation.begin(dataset)
            is_unchanged = active is not None and active.is_unchanged(sync=False)
            try:
                if not (is_unchanged or beginning.has_nothing_new):
                    dataset = preparation.ask(dataset, reading)
                    planned = preparation.plan(reading, dataset=dataset, loaded_bytes=self.in_use.loaded_bytes)
            except (MachineError, ModelError, TextsError) as error:
                refusal = str(error)
            return Inspection.of(
                self.reference,
                read_shape(self.reference).parameters,
                self.recipe,
                reading,
                dataset,
                local_tokenizer(self.reference),
                planned and planned.plan,
                beginning=UnchangedResult.of(active).summary
                if is_unchanged
                else " ".join(filter(None, [active and active.warning, preparation.describe_beginning(beginning)])),
                refusal=refusal,
                own_tokenizer=has_own_tokenizer(self.reference),
            )

    def analyze(self, texts, *, examples: int = 16, stop_when: threading.Event | None = None) -> Analysis:
        """Measures how sparse the base model's gradients are on `texts`, without an adapter; changes nothing.

        The model may also be a local folder with an encoder (BERT, RoBERTa, DistilBERT), which cannot be adapted. Its
        loss is that of classes drawn by the seed; a head that it lacks gets random weights.

        Args:
            texts: as for `adapt`.
            examples: maximum number of examples to analyze, drawn by the seed.
            stop_when: an event that stops this call once it is set (see `stop`).

        Raises:
            SebpEdgeError: one of its subclasses; the message says what to do.
        """
        with self._exclusive_call(stop_when), self._make_guard(None):
            preparation = self._preparation(self._signal)
            reading = preparation.read(texts)
            self._signal.check()
            base = self.in_use.load_analyzed(self._notify, self.seed)
            dataset = preparation.encode(reading, base)
            with self._base_model_alone(f"in a dense backward pass over {dataset.context_length} tokens"):
                return analyze(base, dataset, examples, self.seed, self._notify)

    def lr_range(
        self,
        texts,
        *,
        lowest: float = lr_range.LOWEST,
        highest: float = lr_range.HIGHEST,
        steps: int = lr_range.STEPS,
        stop_when: threading.Event | None = None,
    ) -> LearningRateRange:
        """Runs a learning-rate range test (Smith 2017) with the recipe's settings; changes and saves nothing.

        Trains on all of `texts` while the learning rate grows exponentially with every step, until the loss diverges.

        Args:
            texts: as for `adapt`.
            lowest, highest: the learning rates of the first and the last step.
            steps: the number of steps: 20 or more, and 10 or more for each power of ten between the rates.
            stop_when: an event that stops this call once it is set (see `stop`).

        Raises:
            SebpEdgeError: one of its subclasses; the message says what to do.
        """
        rates = lr_range.growing_rates(lowest, highest, steps)
        with self._exclusive_call(stop_when):
            preparation = self._preparation(self._signal)
            reading = preparation.read(texts)
            planned, recipe, options = self._plan_within_budget(preparation, reading)
            with self._make_guard(planned) as guard:
                base = self._load(recipe)
                dataset = preparation.encode(reading, base, planned)
                if not dataset.examples:
                    raise TextsError("These texts have no token to train on; give other texts.")
                with self._base_model_alone("while training"):
                    found = run_range_test(base, dataset, recipe, rates, self.seed, self._notify, options, guard)
        return LearningRateRange.of(base.reference.public_name, recipe.name, self.seed, steps, found)

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
        trained on more conversations than other documents, or on questions: then it is rendered as a user message, or
        as a question if the model has no chat template.

        Args:
            prompt: a text, or messages: `[{"role": "user", "content": "Where is the key?"}]`, with the roles "system",
                "user" and "assistant", the last one the user's.
            adapter: the name of a stored adapter, or an adapter's folder; it stays in use after this call. None uses
                the base model for this call only. The default is the adapter that was made or loaded last, or the base
                model if there is none.
            version: of the stored adapter; by default the active one.
            max_new_tokens, temperature, top_p, top_k, repetition_penalty, stop, seed: see `Sampling`.
            sparse_kernels: whether the layers of a 2:4 model compute with compressed weights, which take 9/16 of the
                memory. Their products are faster with many rows in wide layers, and slower with one.
            on_text: receives the new text in chunks, as it is generated. An error that it raises ends the call.
            stop_when: an event that stops this call once it is set (see `Personalizer.stop`).

        Raises:
            TextsError: the prompt is neither a text nor messages, is empty, or is longer than the model's context.
            OptionError: a sampling option is out of range, or a version was given without an adapter.
            AdapterError, ModelError: see `load_adapter` and `generate_text`.
            SparsityError: there are no sparse kernels for this machine or model, or the model is not 2:4.
            Interrupted: the call was stopped, or Ctrl-C was pressed; its `text` is what was generated so far.
        """
        check_prompt(prompt)
        sampling = Sampling(
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            repetition_penalty=repetition_penalty,
            stop=stop,
            seed=seed,
        )
        is_named = adapter not in (None, _Current.ADAPTER)
        if version is not None and not is_named:
            raise OptionError(f"version={version!r} was given without an adapter; name one with adapter=.")
        with self._exclusive_call(stop_when):
            if is_named:
                self._load_adapter(adapter, version)
            base = self._load()
            with (
                self.in_use.generating(with_adapter=adapter is not None) as rendered_as,
                semi_structured(base.model) if sparse_kernels else nullcontext(),
            ):
                if rendered_as == "question" and isinstance(prompt, str):
                    encoded = prompt_for(prompt, base.tokenizer)
                else:
                    encoded = encode_prompt(prompt, base.tokenizer, chat=rendered_as == "chat")
                return generate_text(
                    base.model, base.tokenizer, *encoded, sampling, on_text=on_text, check=self._signal.check
                )

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
                the adapter was trained for, or else "q8_0". "q4_k_m" and others of that kind need llama.cpp's
                llama-quantize on the path. "smallest" chooses the first that keeps 90 % of the adapter's gain on
                `texts`.
            version: of the stored adapter; by default the active one.
            texts: texts to measure the gain on, as for `adapt`; those that the adapter was made from, for example.
            stop_when: an event that stops this call once it is set (see `stop`).

        Raises:
            SebpEdgeError: one of its subclasses; the message says what to do, and nothing is left behind. An
                ExportError says that the adapter cannot be written in this format, or that another program computes
                something else with the files.
        """
        quant = check_options(format, quant, has_texts=texts is not None)
        with self._exclusive_call(stop_when):
            found = self.store.find(adapter, version)
            folder, record = found.path, found.record
            reading = None if texts is None else read_texts(texts)
            self.in_use.release()
            name = adapter if isinstance(adapter, str) and is_plain(adapter) else "adapter"
            result = export(
                name, folder, record, self.reference, to, format, quant, reading, self._notify, self._signal.check
            )
            if self.store.folder.is_dir():
                self._remember_model(record)
            return result

    def load_adapter(self, adapter: str | Path, version: int | None = None) -> AdapterRecord:
        """Puts a saved adapter on the base model instead of the current one; returns its record.

        Args:
            adapter: the name of a stored adapter, or an adapter's folder.
            version: of the stored adapter; by default the active one.

        Raises:
            AdapterError: there is no such adapter, or it is damaged.
            BaseModelMismatch: it was made for another base model.
        """
        with self._exclusive_call():
            return self._load_adapter(adapter, version)

    # -------------------------------------------------------------------------------------------------------- private

    def _adapt(
        self,
        preparation: Preparation,
        reading: Reading,
        name: str,
        out: Path | None,
        interruptions: Interruptions,
        begin: float,
        *,
        keep_anyway: bool,
        keep_samples: bool = False,
        compares: bool,
    ) -> AdaptResult | UnchangedResult:
        """Trains on texts that were read, judges the result and saves it; `compares` it with the active version."""
        if (unused := devices.unused_gpus(self.device)) is not None:
            self._notify(Notice(unused))
        preparation = self._interviewed(preparation, reading)
        planned, recipe, options = self._plan_within_budget(preparation, reading)
        with self._make_guard(planned) as guard:
            base = self._load(recipe)
            dataset = preparation.encode(reading, base, planned)
            beginning = preparation.begin(dataset)
            if beginning.has_nothing_new:
                return UnchangedResult.of(preparation.active)
            beginning.refuse_other_base(base.fingerprint)
            preparation.announce_beginning(beginning)
            if dataset.asked is not None:
                with self._base_model_alone("while it reads general text"):
                    dataset = preparation.teach(dataset, base, options)
            schedules = preparation.schedule(dataset, planned)
            if recipe.merge_for:
                self._notify(Notice(f"The base model and the adapter are judged as rounded to {recipe.merge_for}."))
            self.store.check_disk_space(len(schedules) * saved_bytes(base, recipe), out)
            run = TrainingRun(
                base,
                dataset,
                schedules,
                recipe,
                preparation.seed,
                self._notify,
                options,
                guard,
                beginning.folders,
                attach=attach,
            )
            memory = VersionTexts() if out else VersionTexts.of(reading, dataset, beginning, self.reference)
            memory = replace(memory, keeps_samples=keep_samples)
            with self._run_attached(run, name, interruptions, memory):
                checks = (self._signal.check, interruptions.deliver)
                assessor = Assessor(run, reading.documents, self.on_event, checks)
                was_active = None if out else self.store.adapter(name).active()
                active = assessor.examine_active(self.store.adapter(name)) if compares else None
                was_active = active.version if active else was_active
                result = run.train(Gate(recipe.margin, dataset.draw.cluster_of, not dataset.concerns, active))
                result = assessor.ask_quiz(result)
                interruptions.defer()
                assessment = self._assess(assessor, result)
        version = NewVersion.of(run, memory, assessment)
        saved, overtaken_by = self._save(
            run, version, result, assessment, memory, name, out, was_active, interruptions, keep_anyway=keep_anyway
        )
        if assessment is None:
            raise interruptions.outcome
        seconds = time.perf_counter() - begin
        return AdaptResult.of(run, result, assessment, saved, self.store, beginning, seconds, overtaken_by)

    def _train_again(
        self,
        preparation: Preparation,
        remaining: Remaining,
        name: str,
        interruptions: Interruptions,
        *,
        keep_anyway: bool,
    ) -> SavedAdapter:
        """Trains from the base model on the documents that remain, and saves that as a version; see `forget`."""
        begin, record = time.perf_counter(), remaining.record
        recipe = Recipe.of_record(record.recipe)
        if self._load(recipe).fingerprint != record.fingerprint:
            raise BaseModelMismatch(
                f"The adapter was made for {record.base_model}, not for these weights of {self.reference.public_name}; "
                f"use {record.model!r}."
            )
        preparation = replace(preparation, recipe=recipe, seed=record.seed, earlier=remaining.history)
        result = self._adapt(
            preparation, remaining.reading, name, None, interruptions, begin, keep_anyway=keep_anyway, compares=False
        )
        return self.store.adapter(name).open(result.version)

    def _interviewed(self, preparation: Preparation, reading: Reading) -> Preparation:
        """Returns the preparation with questions that the model itself writes, if the recipe asks for these."""
        recipe = preparation.recipe
        if recipe.questions != "rules and model":
            return preparation
        if self.memory_budget is not None:  # a training that does not fit is refused before anything is loaded
            with suppress(TextsError):  # the rules alone may make too few questions
                recipe = preparation.plan(reading, loaded_bytes=self.in_use.loaded_bytes).plan.chosen.recipe
        with self._make_guard(None):
            base = self._load(recipe.with_defaults())
            cache = InterviewCache(self.store.questions_folder, self.store.salt(), base.fingerprint)
            with self._base_model_alone("while it writes questions"), self.in_use.generating(with_adapter=False):
                written = interview(base, reading, recipe.context_length, cache, preparation.progress)
        return replace(preparation, interviewed=written)

    def _load(self, recipe: Recipe | None = None) -> BaseModel:
        self._signal.check()
        return self.in_use.load(self._notify, recipe)

    def _load_adapter(self, adapter: str | Path, version: int | None) -> AdapterRecord:
        found = self.store.find(adapter, version)
        self._load()
        self.in_use.load_adapter(found.path, found.record, self.on_event)
        if self.store.folder.is_dir():
            self._remember_model(found.record)
        return found.record

    def _remember_model(self, record: AdapterRecord) -> None:
        """Remembers where the base model of an adapter is, if it was given as a folder or a file."""
        if not self.reference.has_path:
            return
        try:
            self.store.remember_model(record.fingerprint, Path(self.reference.location))
        except StorageError as error:
            self.on_event(Notice(f"{error} The path of the base model is not remembered."))

    def _preparation(self, signal: StopSignal, name: str | None = None) -> Preparation:
        """Returns a preparation; documents keep their splits of earlier versions of the adapter `name`, if given."""
        earlier = SplitHistory() if name is None else latest_history(self.store.adapter(name))
        return Preparation(
            self.reference, self.recipe, self.seed, self.device, self.memory_budget, signal, self._notify, earlier
        )

    def _plan_within_budget(
        self, preparation: Preparation, reading: Reading
    ) -> tuple[PlannedTraining | None, Recipe, MemoryOptions]:
        """Returns the plan, None without a memory budget; and the recipe and options to train with."""
        if self.memory_budget is None:
            return None, preparation.recipe.with_defaults(), FASTEST
        planned = preparation.plan(reading, loaded_bytes=self.in_use.loaded_bytes)
        preparation.announce(planned.plan)
        return planned, planned.plan.chosen.recipe, planned.plan.chosen.options

    def _make_guard(self, planned: PlannedTraining | None) -> MemoryGuard:
        """Returns a guard for the budget of the plan, else for the memory budget, else for all free memory."""
        if planned is not None:
            return MemoryGuard(self.device, planned.plan.budget, planned.plan.chosen.peak)
        return MemoryGuard(self.device, self.memory_budget.size if self.memory_budget else None)

    @contextmanager
    def _exclusive_call(self, stop_when: threading.Event | None = None) -> Iterator[None]:
        """Context in which no other call uses the model, and this one can be stopped."""
        if not self._lock.acquire(blocking=False):
            raise BusyError(
                "This Personalizer is running another call; wait for it, end it with stop(), or use another "
                "Personalizer."
            )
        try:
            self._signal = StopSignal(stop_when)
            self._signal.check()
            with quiet_libraries():
                yield
        except StopRequested as request:
            raise Interrupted("Stopped; nothing was changed.") from request
        finally:
            self._lock.release()

    def _notify(self, event: Event) -> None:
        self.on_event(event)
        self._signal.check()

    @contextmanager
    def _run_attached(
        self, run: TrainingRun, name: str, interruptions: Interruptions, memory: VersionTexts
    ) -> Iterator[None]:
        """Context in which a run's adapter replaces the one in use; restores that on an error.

        If the training was stopped, its best state is saved first.
        """
        outer_error = sys.exception()
        self.in_use.detach_adapter()
        try:
            yield
        except (KeyboardInterrupt, NonFiniteLoss, BudgetExceeded) as stop:
            interruptions.defer()
            devices.clear_frames(stop, outer_error)
            raise self._stopped_error(stop, run, name, memory) from stop
        except BaseException as error:
            out_of_memory = devices.ran_out_of_memory(error)
            if out_of_memory:
                self._release_memory(error, outer_error)
            self._discard_run(run)
            if not out_of_memory:
                raise
            raise self._out_of_memory_error(run) from error

    @contextmanager
    def _base_model_alone(self, when: str) -> Iterator[None]:
        """Context without the adapter in use. If memory runs out, frees it and says `when`."""
        outer_error = sys.exception()
        self.in_use.detach_adapter()
        try:
            yield
        except BaseException as error:
            if not devices.ran_out_of_memory(error):
                raise
            self._release_memory(error, outer_error)
            raise MachineError(
                f"Out of {self.device.type.upper()} memory {when}; choose a smaller model or a shorter context."
            ) from error
        finally:
            self.in_use.restore_adapter(self.on_event)

    def _release_memory(self, error: BaseException, outer_error: BaseException | None) -> None:
        """Frees what was computed before `error`, except what an error that was handled before still references."""
        devices.clear_frames(error, outer_error)
        devices.release_memory(self.device)

    def _discard_run(self, run: TrainingRun) -> None:
        """Detaches the run's adapter and restores the one that was in use, if any."""
        run.detach()
        self.in_use.restore_adapter(self.on_event)

    def _assess(self, assessor: Assessor, result: GateResult) -> Assessment | None:
        """Returns the assessment; None if it was stopped, which does not lose the adapter."""
        try:
            return assessor.assess(result)
        except KeyboardInterrupt:
            return None

    def _save(
        self,
        run: TrainingRun,
        version: NewVersion,
        result: GateResult,
        assessment: Assessment | None,
        memory: VersionTexts,
        name: str,
        out: Path | None,
        was_active: int | None,
        interruptions: Interruptions,
        *,
        keep_anyway: bool,
    ) -> tuple[SavedAdapter, int | None]:
        """Saves the run's adapter; if it is kept, uses it from now on and activates it, unless it is saved to `out`.

        Args:
            was_active: the version that it was compared with; None if there was none.

        Returns:
            The saved adapter; and the version that became active meanwhile and therefore stays, else None.
        """
        record = make_record(run, assessment.general_loss if assessment else None, run.seed, memory)
        overtaken_by = None
        try:
            saved = save(self.store, version, record, name, out=out)
            if out is None and keep_anyway:
                saved = self.store.adapter(name).activate(saved.version)
            elif out is None and result.kept:
                saved, active = self.store.adapter(name).activate_after(saved.version, was_active)
                overtaken_by = None if saved.active else active
        except BaseException:
            self._discard_run(run)
            raise
        if overtaken_by is None and (result.kept or keep_anyway):
            self.in_use.use_adapter(_as_saved(run, saved), saved.path, record)
        else:
            self._discard_run(run)
        interruptions.outcome = Interrupted(
            f"Interrupted after the training: {describe_location(saved)}.", name=saved.name, version=saved.version
        )
        self._notify_saved(saved)
        return saved, overtaken_by

    def _stopped_error(self, stop: BaseException, run: TrainingRun, name: str, memory: VersionTexts) -> TrainingStopped:
        """Saves the best state so far as a version that is not active; returns the error that says so."""
        try:
            error, saved = save_best_state(self.store, run, stop, name, run.seed, memory)
        finally:
            self._discard_run(run)
        if saved is not None:
            self._notify_saved(saved)
        return error

    def _notify_saved(self, saved: SavedAdapter) -> None:
        self._remember_model(saved.record)
        # Not `_notify`, which could still stop the call.
        self.on_event(AdapterSaved(saved.name, saved.version, str(saved.path), saved.active))

    def _out_of_memory_error(self, run: TrainingRun) -> MachineError:
        """Returns the error for a single example that does not fit into memory."""
        has_begun = any(progress.steps for progress in run.progress)
        when = "while training" if has_begun else "before the first step"
        smaller, others = "Choose a smaller model or a shorter context", "close other programs"
        advice = f"{smaller}, or {others}"
        if self.memory_budget is not None:
            advice = f"{smaller}, {others}, or raise the memory budget of {self.memory_budget}"
        return MachineError(f"Out of {self.device.type.upper()} memory {when}; nothing was saved. {advice}.")


def _as_saved(run: TrainingRun, saved: SavedAdapter) -> Adaptation:
    """Returns a run's adaptation, which computes as other programs do with the saved one: nothing is rounded."""
    if run.adaptation.merge_for is None:
        return run.adaptation
    run.detach()
    return load(run.base, saved.path)
