"""The main path: texts in, a saved adapter out."""

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

from sebp_edge.ask.answer import NUM_PASSAGES, Answer
from sebp_edge.ask.searched_texts import SearchedTexts
from sebp_edge.basics.files import expand_user
from sebp_edge.basics.interruptions import Interruptions
from sebp_edge.basics.stopping import StopSignal
from sebp_edge.engine.memory.budget import MemoryBudget
from sebp_edge.engine.memory.memory_plan import Plan
from sebp_edge.engine.models.catalog import DEFAULT_MODEL, resolve
from sebp_edge.engine.models.completion import Completion
from sebp_edge.engine.models.sampling import Sampling
from sebp_edge.events import Sink, silent
from sebp_edge.export.export_result import ExportProgress, ExportResult
from sebp_edge.export.exporter import check_options, export
from sebp_edge.lessons.prompts import Messages
from sebp_edge.machine import devices
from sebp_edge.machine.politeness import Politeness
from sebp_edge.reading.readers import read_texts
from sebp_edge.recipe import Recipe, check_seed
from sebp_edge.run import generating, resuming, verify_forgotten
from sebp_edge.run.conditions import absent_gpu
from sebp_edge.run.forgetting import Forgetting
from sebp_edge.run.giving_way import GivingWay
from sebp_edge.run.inspection import Inspection
from sebp_edge.run.job import JobSink
from sebp_edge.run.model_call import ModelCall, OneCall
from sebp_edge.run.model_in_use import AdapterChoice, Current, ModelInUse
from sebp_edge.run.preparation import Preparation
from sebp_edge.run.result import AdaptResult
from sebp_edge.run.saving import Place
from sebp_edge.run.unchanged import UnchangedResult
from sebp_edge.run.verify_forgotten import Verification
from sebp_edge.run.work_ahead import phases_of_export, phases_of_inspection
from sebp_edge.store.adapter_store import AdapterStore
from sebp_edge.store.erasure import Receipt
from sebp_edge.store.names import is_plain
from sebp_edge.store.record import AdapterRecord


class Personalizer(AbstractContextManager["Personalizer"]):
    """Adapts a language model to its owner's texts, and generates text with it.

        result = Personalizer("llama-3.2-3b").adapt(Path("notes"))

    Only one call at a time may use the model: during one, all methods but `stop`, `pause` and `plan` raise BusyError.
    `stop()`, or an event that was passed as `stop_when`, ends a call, which raises Interrupted. Every other error is a
    SebpEdgeError too; its message says what to do. A training runs on one device, in one process (else see `sparsify`).

    Several methods take these arguments:
        texts: a string, the `pathlib.Path` of a file or folder, a record, or a list of these (see `read_texts`).
        name: the adapter's name in the store, by default "default", or "reader" with the recipe "ask".
        activate_anyway: whether to activate the adapter whatever the gate says.
        adapter: the name of a stored adapter, or an adapter's folder. What writes text keeps using it after the call;
            by default, it uses the adapter that was made or loaded last, if any, and with None the base model.
        version: of the stored adapter; by default the active one.
        on_text: receives text as it is written; an error that it raises ends the call.

    Args:
        model: a known name (`sebp-edge models` lists them), a folder with a model, a GGUF file, a model of Ollama or LM
            Studio ("ollama:llama3.2:3b", "lmstudio:NAME"), or a Hub id.
        recipe: a bundled recipe's name, a TOML file, or a Recipe. By default, that of the version that is learnt on
            from; without one of these texts and this model, "chat" if most texts are conversations, such as chats and
            mails, else "notes".
        device: "cuda", "mps" or "cpu"; by default the best available one.
        store: an AdapterStore, or the folder where adapters are kept; by default the OS's data folder.
        memory_budget: how much memory this process may use while it adapts, "8GB", "7.5GiB" or a number of bytes: of
            the GPU, or of the host on the CPU. If no plan fits into what is free of it, `adapt` loads nothing.
        seed: the random seed.
        me: the owner's name in chats and mails, or a list, since each service may have another one.
        politeness: how trainings give way to other programs; by default, they do not. Its threads are every call's.
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
        self.reference, self.recipe, self.device = resolve(model), Recipe.load(recipe), devices.pick_device(device)
        self.memory_budget = None if memory_budget is None else MemoryBudget.parse(memory_budget)
        self.store = store if isinstance(store, AdapterStore) else AdapterStore(store)
        self.seed, self.me = check_seed(seed), (me,) if isinstance(me, str) else tuple(me)
        self.politeness = (politeness or Politeness()).on(self.device.type)
        self.on_event, self.while_waiting = on_event, lambda: None  # which is called while a training waits
        self.in_use = ModelInUse(self.reference, self.recipe, self.device)
        self._searched, self._calls = SearchedTexts(), OneCall()

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
        least the recipe's margin, and not above that of the active and the best version by more than 2 %.

        If a version of that name is active, the adaptation learns on from it: it trains on new and changed documents
        and on a few others, and does nothing if there are none. If it must start over, a notice says why; a NameInUse
        event says so if the version is of other texts, another model or another recipe. A version that becomes active
        during the call stays active.

        Args:
            texts: None for a recipe that trains on bundled notes.
            out: a new folder to save to instead of the store; there is no active version then.
            fresh: whether to start over, and learn all documents again.
            sync: whether to start over if documents are gone, which stay known otherwise.
            keep_samples: whether to save samples and names of documents, for the version's page; otherwise no text is.

        Raises:
            TrainingStopped: Interrupted, NonFiniteLoss or BudgetExceeded; the best state so far, if there is one, is
                saved as a version that is not active. After the training, the adapter is saved as without a stop.
            StorageError: at the end, it says where the adapter was saved instead.
        """
        place = Place(self.store, name or self.recipe.default_name, None if out is None else expand_user(out))
        options = {"activate_anyway": activate_anyway, "fresh": fresh, "sync": sync, "keep_samples": keep_samples}
        with self.begin_call(stop_when) as call:
            return resuming.run_with_waits(call, texts, partial(resuming.run_adapt, call, place, texts, options))

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
        splits, recipe and seed, and activated if it is better than the base model; otherwise, active is then one that
        was active before and never knew the documents, or none. A call that was killed is completed by the same call.

        Args:
            documents: paths of files, or names, numbers or hashes as in `Adapter.documents`, or a list of these.
            texts: the other documents, unchanged, with these or without; others are left out. By default, they are
                read where they were learnt; give them if they were moved, or were no files.
            near_duplicates: whether to forget near-duplicates too, and documents that hold parts of them.
            on_found: receives what will be removed, before anything is changed; an error that it raises ends the call.

        Raises:
            AdapterError: no version knows a document, or it is not known what versions know.
            TextsError: another document has changed or cannot be read, or none would remain.
            TrainingStopped: as for `adapt`; nothing is forgotten after an error.
        """
        options = {"near_duplicates": near_duplicates, "activate_anyway": activate_anyway}
        with self.begin_call(stop_when) as call:
            run = partial(resuming.run_forget, call, Place(self.store, name), documents, texts, options, on_found)
            return resuming.run_with_waits(call, texts, run)

    def verify_forgotten(self, texts=None, *, name="default", stop_when: threading.Event | None = None) -> Verification:
        """Verifies the newest receipt of `forget`, which takes a training on the documents that remain, on the CPU."""
        with self.begin_call(stop_when) as call:
            return verify_forgotten.run_verify(call, Place(self.store, name), texts)

    def resume(
        self, job: str | None = None, texts=None, *, changed: str = "refuse", stop_when: threading.Event | None = None
    ) -> AdaptResult | UnchangedResult | Receipt:
        """Goes on with a training that was paused, stopped or killed; returns or raises what its call would have.

        On the CPU, the adapter is bit for bit that of a training that nothing has interrupted. This Personalizer needs
        the job's model and device, as `Personalizer(**store.jobs.get(job).arguments())` has. Raises a JobError if the
        job cannot go on as it was begun or runs already, and TextsChanged if documents have changed or are gone.

        Args:
            job: the id of a job in the store; by default the only one that does not run.
            texts: the same texts, if they were no files or were moved. New documents are left for the next adaptation.
            changed: what to do if documents have changed or are gone: "refuse"; "without", to go on without them,
                though it knows what it has learnt of them; or "again", to start over in any case.
        """
        with self.begin_call(stop_when) as call:
            run = partial(resuming.resume, call, self.store.jobs.get(job), texts, changed)
            return resuming.run_with_waits(call, texts, run)

    def stop(self) -> None:
        """Stops the call that runs in another thread, if any, as Ctrl-C would; that call raises Interrupted.

        It checks for a stop several times a second, and while it trains before each layer, or with a graph each step. A
        call that may not have started yet is stopped by its `stop_when`, which is checked when it starts, too.
        """
        self._calls.stop()

    def pause(self) -> bool:
        """Pauses the training that runs in another thread; that call raises Paused with the id of its job.

        It ends as a stopped call would, after its checkpoint, and frees the model's memory. Once it has saved the
        adapter, it returns its result instead, without what was not assessed yet. Returns False if no call runs that
        can be paused: `adapt` into the store, `forget` and `resume` can.
        """
        return self._calls.pause()

    def close(self) -> None:
        """Frees the memory of model, adapter and texts, as the end of a context does; later calls raise ClosedError."""
        with self._calls.closing():
            self._searched = SearchedTexts()
            self.in_use.close()

    def __exit__(self, *error) -> None:
        self.close()

    def plan(
        self,
        texts=None,
        *,
        name: str | None = None,
        gpu: str | int | None = None,
        stop_when: threading.Event | None = None,
    ) -> Plan:
        """Plans an adaptation to `texts` within the memory budget: options, peak memory and estimated time.

        Loads no model. Plans what `adapt` would do with this name; if nothing is new, a notice says so, and the plan is
        for learning all documents again. Without a budget, plans for the memory that is free now; if nothing fits, a
        MachineError says what would. Counts the tokens of a model that has not been downloaded with the bundled model's
        tokenizer, which produces more. With `gpu`, the memory of an absent GPU ("8GB" or a number of bytes), the plan
        is for an NVIDIA GPU with bf16 and unknown speed, in a host with enough memory; `device` is ignored.
        """
        with self._calls.beside(self._make_call, stop_when) as call:
            absent = absent_gpu(gpu, self.memory_budget)
            preparation = Preparation.under(call, texts, name)
            return preparation.plan_for_owner(call.conditions(absent))

    def inspect(self, texts=None, *, name: str | None = None, stop_when: threading.Event | None = None) -> Inspection:
        """Shows what `adapt` would do with `texts`: what is read, the split, examples, memory and time, what to expect.

        Loads no weights and changes nothing. Texts that `adapt` would refuse are inspected too (see `refusal`).
        """
        with self.begin_call(stop_when) as call:
            call.job.begin(phases_of_inspection())
            return Inspection.of(Preparation.under(call, texts, name), call.conditions())

    def generate(
        self,
        prompt: str | Messages,
        *,
        adapter: str | Path | Current | None = Current.ADAPTER,
        version: int | None = None,
        max_new_tokens: int = 200,
        temperature: float = 0.7,
        top_p: float = 0.9,
        top_k: int | None = None,
        repetition_penalty: float = 1.0,
        stop: Sequence[str] = (),
        seed: int | None = None,
        on_text: Callable[[str], None] | None = None,
        stop_when: threading.Event | None = None,
    ) -> str:
        """Continues a text, or answers the last of several messages; returns the new text.

        Messages are rendered with the model's chat template. A text is continued as it is, unless the adapter was
        trained mostly on conversations, or on questions: then it is a user message, or a question without a template.

        Args:
            prompt: a text, or messages: `[{"role": "user", "content": "Where is the key?"}]`, with the roles "system",
                "user" and "assistant", the last one the user's.
            max_new_tokens, temperature, top_p, top_k, repetition_penalty, stop, seed: see `Sampling`.

        Raises:
            TextsError: the prompt is neither a text nor messages, is empty, or is longer than the model's context.
            AdapterError, ModelError: see `load_adapter`, or the logits are not finite.
            Interrupted: the call was stopped, or Ctrl-C was pressed; its `text` is what was generated so far.
        """
        sampling = Sampling(max_new_tokens, temperature, top_p, top_k, repetition_penalty, stop, seed)
        with self.begin_call(stop_when) as call:
            return generating.generate(call, prompt, AdapterChoice(adapter, version), sampling, on_text).text

    def complete(
        self,
        before: str,
        *,
        max_new_tokens: int = 16,
        min_probability: float = 0.6,
        adapter: str | Path | Current | None = Current.ADAPTER,
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
        """
        with self.begin_call(stop_when) as call:
            choice = AdapterChoice(adapter, version)
            return generating.complete(call, before, choice, max_new_tokens, min_probability, on_text)

    def ask(
        self,
        question: str,
        texts,
        *,
        before: Sequence[generating.Turn] = (),
        adapter: str | Path | Current | None = Current.ADAPTER,
        version: int | None = None,
        num_passages: int = NUM_PASSAGES,
        max_new_tokens: int = 60,
        on_text: Callable[[str], None] | None = None,
        stop_when: threading.Event | None = None,
    ) -> Answer:
        """Answers a question from texts, and names the passages that the answer was read in.

        Shows the model the passages that a search in memory finds, and compares its reply with them: one that does not
        stand there, or says the opposite, gives way to a sentence of the best passage. Without a reader, or if no
        passage is about the question, no model is loaded. Only changed files are read again.

        Args:
            texts: of chats and mails, what everybody wrote is searched.
            adapter: by default the model's reader, which the recipe "ask" trains; with None the base model reads.
            before: questions and their answers' texts before this one, which a short question goes on from.
            num_passages: the most passages that the model is shown; fewer if the model's context is too short.
            on_text: receives the model's reply, once it is known to stand in a passage: see `Answer.quoted`.
        """
        greedy, choice = Sampling(max_new_tokens, temperature=0, stop=("\n",)), AdapterChoice(adapter, version)
        with self.begin_call(stop_when) as call:
            return generating.ask(call, question, self._searched, texts, before, choice, greedy, num_passages, on_text)

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

        To compare, it loads the base model in fp32 if the free memory holds that; the model in use is released before.

        Args:
            to: the folder to make, which must not exist.
            format: "gguf", a quantised model for llama.cpp and LM Studio; "ollama", the same with a Modelfile;
                "merged", a model folder of transformers; "peft", "gguf-lora" or "mlx", the adapter alone.
            quant: of gguf and ollama: "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "bf16" or "f16"; by default
                "q8_0". "q4_k_m" and the like need llama.cpp's llama-quantize.
                "smallest" chooses the first that keeps 90 % of the adapter's gain on `texts`.
            texts: texts to measure the gain on; those that the adapter was made from, for example.

        Raises:
            ExportError: it cannot be written in this format, or the files compute something else. Nothing is left then.
        """
        with self.begin_call(stop_when) as call:
            quant = check_options(format, quant, has_texts=texts is not None)
            call.job.begin(phases_of_export())
            saved = self.store.find(adapter, version)
            reading = None if texts is None else read_texts(texts, progress=call.progress)
            self.in_use.release()
            name = adapter if isinstance(adapter, str) and is_plain(adapter) else "adapter"
            progress = ExportProgress(call.notify, call.check)
            result = export(name, saved, self.reference, to, format, quant, reading, progress)
            call.remember_model_of(saved)
            return result

    def load_adapter(self, adapter: str | Path, version: int | None = None) -> AdapterRecord:
        """Puts a saved adapter on the base model instead of the current one; returns its record.

        Raises an AdapterError if it is missing or damaged, and BaseModelMismatch if it is another base model's.
        """
        with self.begin_call() as call:
            return call.load_adapter(adapter, version)

    def begin_call(self, stop_when: threading.Event | None = None) -> AbstractContextManager[ModelCall]:
        """Context of one call, in which no other begins; `sebp_edge.research` has calls that are no methods."""
        return self._calls.begin(self._make_call, stop_when)

    def _make_call(self, signal: StopSignal, interruptions: Interruptions) -> ModelCall:
        job = JobSink(self.on_event)
        return ModelCall(
            reference=self.reference,
            on_gpu=self.device.type == "cuda",
            recipe=self.recipe,
            seed=self.seed,
            store=self.store,
            me=self.me,
            budget=self.memory_budget,
            job=job,
            signal=signal,
            interruptions=interruptions,
            in_use=self.in_use,
            giving_way=GivingWay(self.politeness, self.device, job, signal, self.while_waiting),
        )
