"""What an export tells while it runs, and what it returns."""

from dataclasses import asdict, dataclass

from sebp_edge.basics.stopping import Check
from sebp_edge.basics.units import gigabytes
from sebp_edge.events import Sink, TensorWritten, silent


@dataclass(frozen=True)
class ExportProgress:
    """Tells how far an export is, and lets it be stopped.

    Attributes:
        on_event, check: may raise to stop.
    """

    on_event: Sink = silent
    check: Check = lambda: None

    def written(self, number: int, total: int) -> None:
        """Says that so many of all tensors or files are written."""
        self.on_event(TensorWritten(number, total))


@dataclass(frozen=True)
class GainKept:
    """How much of an adapter's gain a quantisation keeps.

    Attributes:
        quant: the quantisation.
        loss_base, loss: the losses of the quantised base model and of the quantised merged model, in nats per token.
        share: (the base model's loss - `loss`) / (the base model's loss - the adapter's), both before quantisation;
            below 0 if the quantised model is worse than the base model. None if the adapter has no gain.
    """

    quant: str
    loss_base: float
    loss: float
    share: float | None


@dataclass(frozen=True)
class ExportResult:
    """An exported adapter.

    Attributes:
        path: the new folder.
        files: the names of the files in it.
        format: "peft", "merged", "gguf", "gguf-lora", "mlx" or "ollama".
        quant: the quantisation; None if the format has none.
        num_bytes: the size of all files.
        seconds: the duration of the export, read back included.
        prompts: how prompts are to be given, as the adapter was trained and judged: "text" to continue, "chat", or
            "question" (see `AdapterRecord.prompts`).
        merged_into: the weights that the adapter was merged into; None if it was not merged.
        read_back_by: the program that has read the files: "llama.cpp", "transformers", "PEFT" or "mlx-lm"; "sebp-edge"
            if that is not installed.
        mean_difference, largest_difference: of log-probabilities, between what that program computes and what the
            files should give, over 200 tokens of a text and the likeliest token before each; None if no model was run.
        same_likeliest: the share of these tokens before which both have the same likeliest token.
        loss_base, loss_adapter, loss: the losses of the base model, with the adapter, and of the exported files, in
            nats per token, on the given texts, or else on general text; None if they were not computed.
        gain_kept: how much of the gain each tried quantisation keeps; empty without texts.
        warnings: what the user should know, a sentence each.
    """

    path: str
    files: tuple[str, ...]
    format: str
    quant: str | None
    num_bytes: int
    seconds: float
    prompts: str
    merged_into: str | None
    read_back_by: str
    mean_difference: float | None
    largest_difference: float | None
    same_likeliest: float | None
    loss_base: float | None
    loss_adapter: float | None
    loss: float | None
    gain_kept: tuple[GainKept, ...]
    warnings: tuple[str, ...]

    @property
    def summary(self) -> str:
        """What was written, who has read it, and how to use it."""
        kind = f"{self.format}, {self.quant}" if self.quant else self.format
        texts_only = " Let it continue a text: it was not trained to chat." if self.prompts == "text" else ""
        return (
            f"Exported to {self.path!r} ({kind}, {gigabytes(self.num_bytes)}), read back by {self.read_back_by}. "
            f"{_USES[self.format]}{texts_only}"
        )

    def to_dict(self) -> dict:
        """Returns the result as JSON-ready values."""
        return asdict(self) | {"summary": self.summary}


# By format.
_USES = {
    "peft": "Load it with PeftModel.from_pretrained.",
    "merged": "transformers and mlx-lm load the folder as a model.",
    "gguf": "llama.cpp and LM Studio load the file.",
    "gguf-lora": "Give the file to llama.cpp with --lora, beside the base model.",
    "mlx": "Give the folder to mlx_lm with --adapter-path, beside the base model.",
    "ollama": "Run: ollama create NAME -f Modelfile, in that folder.",
}
