"""The result of an adaptation."""

import math
import shlex
from dataclasses import asdict, dataclass
from pathlib import Path

from sebp_edge.adapters.store import AdapterStore, SavedAdapter
from sebp_edge.texts.documents import LeftOut
from sebp_edge.training.run import GateResult, TrainingRun


@dataclass(frozen=True)
class AdaptResult:
    """The result of an adaptation.

    Attributes:
        kept: whether the test loss fell by more than its standard error, and the adapter was saved and activated.
        name, version, adapter_path: where the adapter is; None if it was not kept. Name and version are also None if it
            was saved outside the store.
        heldout_loss_before, heldout_loss_after: the loss on the test documents, in nats per token.
        standard_error: the standard error of the difference of the two.
        final_loss: with fewer than 20 documents, the loss on all of them after the final training on all of them, in
            nats per token; None if there was no such training.
        documents, examples, tokens: how many of each were used.
        left_out: what was not used, with the reasons.
        padding_share: the share of padding if all examples are padded to the context length.
        tokens_per_second: tokens trained on per second of training, without padding.
        peak_memory_bytes: the process's peak memory: GPU memory, including CUDA's context and all else outside
            torch's allocator, or host memory on the CPU.
        allocator_peak_bytes: the part of it that is tensors on the GPU; None on the CPU.
        predicted_peak_bytes: the peak that the plan predicted for the process; None without a memory budget.
        seconds: the time from the call to the result.
        command: the command that uses the adapter; None if it was not kept.
    """

    kept: bool
    name: str | None
    version: int | None
    adapter_path: Path | None
    heldout_loss_before: float
    heldout_loss_after: float
    standard_error: float
    final_loss: float | None
    documents: int
    examples: int
    tokens: int
    left_out: tuple[LeftOut, ...]
    padding_share: float
    tokens_per_second: float
    peak_memory_bytes: int
    allocator_peak_bytes: int | None
    predicted_peak_bytes: int | None
    seconds: float
    command: str | None

    @classmethod
    def of(
        cls, run: TrainingRun, gate_result: GateResult, saved: SavedAdapter | None, store: AdapterStore, seconds: float
    ) -> "AdaptResult":
        """Collects the figures of a training run."""
        data, trainings = run.dataset, run.progress
        trained = sum(training.tokens for training in trainings)
        return cls(
            kept=saved is not None,
            name=saved.name if saved else None,
            version=saved.version if saved else None,
            adapter_path=saved.path if saved else None,
            heldout_loss_before=gate_result.before.mean,
            heldout_loss_after=gate_result.after.mean,
            standard_error=gate_result.comparison.standard_error,
            final_loss=gate_result.final.mean if gate_result.final else None,
            documents=data.num_documents,
            examples=len(data.examples),
            tokens=data.num_tokens,
            left_out=tuple(data.left_out),
            padding_share=data.padding_share,
            tokens_per_second=trained / sum(training.seconds for training in trainings),
            peak_memory_bytes=run.guard.peak,
            allocator_peak_bytes=run.guard.allocator_peak,
            predicted_peak_bytes=run.guard.predicted,
            seconds=seconds,
            command=_command(saved, run, store) if saved else None,
        )

    @property
    def perplexity_before(self) -> float:
        return _perplexity(self.heldout_loss_before)

    @property
    def perplexity_after(self) -> float:
        return _perplexity(self.heldout_loss_after)

    @property
    def summary(self) -> str:
        """What happened and what to do next, in one sentence."""
        change = f"{self.heldout_loss_before:.3f} to {self.heldout_loss_after:.3f} nats per token"
        if not self.kept and self.final_loss is not None:
            return (
                f"The held-out loss went from {change}, but the loss on all documents after the final training is "
                f"{self.final_loss:.3f}, which is no gain, so the adapter was not kept; try a lower learning rate."
            )
        if not self.kept:
            return (
                f"The held-out loss went from {change} (standard error {self.standard_error:.3f}), which is no "
                "measurable gain, so the adapter was not kept and the active one stays; more text helps most."
            )
        return f"The held-out loss fell from {change}; try it with: {self.command}"

    def to_dict(self) -> dict:
        """Returns the result as JSON-ready values: the last line of `sebp-edge adapt --json`."""
        path = None if self.adapter_path is None else str(self.adapter_path)
        return {"event": "result", **asdict(self), "adapter_path": path, "summary": self.summary}


def _perplexity(loss: float) -> float:
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def _command(saved: SavedAdapter, run: TrainingRun, store: AdapterStore) -> str:
    """Returns the command that uses the adapter: by name if it is in the default store, else by folder."""
    first = "A question" if run.dataset.is_chat else "The first words"
    words = ["sebp-edge", "generate", first]
    if saved.name is not None and store.folder == AdapterStore().folder:
        words += ["--name", saved.name]
    else:
        words += ["--adapter", str(saved.path)]
    if run.base.reference.kind == "local":
        words += ["--model", run.base.reference.location]
    return shlex.join(words)
