"""The formats: how each is written, and how it is read back.

Each is read back by its own program if that is installed, and else by this package, which compares the tensors in the
files with those that were meant.
"""

import json
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from sebp_edge.ask.wording import plain_question
from sebp_edge.basics.files import read_json
from sebp_edge.basics.weights import DTYPES, WeightsFile, read_weights, write_tensors
from sebp_edge.engine.models.gguf.writer import GgufModel
from sebp_edge.engine.models.lora import LoraFactors, read_factors
from sebp_edge.engine.models.older_names import has_older_names
from sebp_edge.errors import ExportError
from sebp_edge.export import gguf_file, llama_cpp, mlx_lm
from sebp_edge.export.child import Predicted
from sebp_edge.export.export_result import ExportProgress
from sebp_edge.export.gguf_tokenizer import GgufTokenizer
from sebp_edge.export.llama_cpp import K_QUANTS, requantise
from sebp_edge.export.model_weights import Read
from sebp_edge.export.ollama import RAW, modelfile
from sebp_edge.export.read_back import Agreement, BaseComparison, agreement, check_agreement, check_tokens, likeliest
from sebp_edge.export.settings import check_for_mlx_lm, check_settings, write_settings
from sebp_edge.export.source import Source
from sebp_edge.lessons.conversations import plain_message

OURSELVES = "sebp-edge"


@dataclass(frozen=True)
class ReadBack:
    """What the program that read the files has shown; no agreement and no loss if it did not run a model."""

    program: str
    agreement: Agreement | None = None
    loss: float | None = None


class Format(ABC):
    """A format of an export; raises an ExportError at once if this adapter cannot be written so."""

    is_adapter = False

    def __init__(self, source: Source):
        self._source = source
        if self.is_adapter and not source.is_lora:
            raise ExportError(
                "This adapter has all weights of a model, so it can only be exported as one: merged, gguf or ollama."
            )

    @property
    def num_bytes(self) -> int:
        """The approximate size of the files."""
        matrices = self._source.weights.factors.matrices.values()
        return sum(4 * (lora_A.numel() + lora_B.numel()) for lora_A, lora_B in matrices)

    @abstractmethod
    def write(self, folder: Path, progress: ExportProgress) -> None:
        """Writes the files into an existing folder."""

    @abstractmethod
    def read_back(self, folder: Path, comparison: BaseComparison) -> ReadBack:
        """Reads the files back; raises an ExportError if they compute something else."""

    def warnings(self) -> Iterator[str]:
        """Yields what the user should know about the written files, a sentence each."""
        yield from ()

    def check_tensors(self, folder: Path, progress: ExportProgress) -> ReadBack:
        """Reads the files back without running a model; raises an ExportError if their tensors are others."""
        for found, expected in self._tensors(folder):
            if not torch.equal(found, expected):
                raise ExportError("The exported files have other weights than were written; nothing was exported.")
            progress.check()
        return ReadBack(OURSELVES)

    @abstractmethod
    def _tensors(self, folder: Path) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields each tensor of the files with the one expected."""

    def _factors(self, found: LoraFactors) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields the matrices of an exported adapter with the saved ones."""
        expected = self._source.weights.factors
        if found.matrices.keys() != expected.matrices.keys() or found.scale != expected.scale:
            raise ExportError("The exported adapter is another one; nothing was exported.")
        for name, matrices in expected.matrices.items():
            yield from zip(found.matrices[name], matrices, strict=True)


class Peft(Format):
    """The adapter in PEFT's layout, without the files of sebp-edge."""

    is_adapter = True
    _FILES = ("adapter_model.safetensors", "adapter_config.json")

    def write(self, folder: Path, progress: ExportProgress) -> None:
        for number, name in enumerate(self._FILES, start=1):
            shutil.copyfile(self._source.folder / name, folder / name)
            progress.written(number, len(self._FILES))

    def read_back(self, folder: Path, comparison: BaseComparison) -> ReadBack:
        found, loss = comparison.with_adapter(folder)
        return _compare("PEFT", likeliest(found), comparison, loss)

    def _tensors(self, folder: Path) -> Iterator[tuple[Tensor, Tensor]]:
        return self._factors(read_factors(folder))


class Merged(Format):
    """A model folder of transformers, in the dtype of the base model's files."""

    _refusal: str | None = None

    @property
    def num_bytes(self) -> int:
        return self._source.model.num_parameters() * self._source.weights.dtype.itemsize

    def write(self, folder: Path, progress: ExportProgress) -> None:
        weights = self._source.weights
        dtype = weights.dtype if weights.dtype.is_floating_point and weights.dtype in DTYPES else torch.float32
        with (folder / "model.safetensors").open("wb") as file:
            write_tensors(
                file, {name: (dtype, shape) for name, shape in weights.shapes.items()}, self._read(dtype, progress)
            )
        write_settings(folder, self._source)

    def _read(self, dtype: torch.dtype, progress: ExportProgress) -> Iterator[Tensor]:
        weights = self._source.weights
        for number, name in enumerate(weights.shapes, start=1):
            yield weights.read(name).to(dtype)
            progress.written(number, len(weights.shapes))

    def read_back(self, folder: Path, comparison: BaseComparison) -> ReadBack:
        check_settings(folder, self._source)
        # The files are rounded to their dtype, so they are compared with what they should hold, not with the adapter.
        dtype = self._source.weights.dtype
        expected, _ = comparison.with_weights(lambda name: self._source.weights.read(name).to(dtype))
        found, loss = comparison.with_model(folder)
        self._refusal = self._ask_mlx_lm(folder, comparison, expected)
        return _compare("transformers", likeliest(found), comparison, loss, expected)

    def _ask_mlx_lm(self, folder: Path, comparison: BaseComparison, expected: list[Tensor]) -> str | None:
        """Reads the folder with mlx-lm, if that is installed; returns a sentence if it cannot read such models."""
        if not mlx_lm.is_installed() or any(mlx_lm.what_it_lacks(self._source.config)):
            return None
        try:
            found = mlx_lm.predict(folder, None, comparison.texts.rows, comparison.progress)
        except ExportError:
            return "mlx-lm, which is installed here, cannot load the folder; load it with transformers."
        _compare("mlx-lm", found, comparison, None, expected)
        return None

    def warnings(self) -> Iterator[str]:
        if not has_older_names(self._source.config):
            yield (
                "transformers before 5 has no names for some settings of this model's rotary embeddings, and computes "
                "something else; load the folder with transformers 5."
            )
        yield from mlx_lm.what_it_lacks(self._source.config)
        yield from filter(None, [self._refusal])

    def check_tensors(self, folder: Path, progress: ExportProgress) -> ReadBack:
        check_settings(folder, self._source)
        return super().check_tensors(folder, progress)

    def _tensors(self, folder: Path) -> Iterator[tuple[Tensor, Tensor]]:
        weights, found = self._source.weights, WeightsFile(folder / "model.safetensors")
        return ((found.stored(name), weights.read(name).to(weights.dtype)) for name in weights.shapes)


class Gguf(Format):
    """A quantised model in one GGUF file."""

    def __init__(self, source: Source, quant: str):
        super().__init__(source)
        self.quant, self.file = quant, f"{source.name}-{quant}.gguf"
        self._model = GgufModel(source.config)
        self._tokenizer = GgufTokenizer(source.tokenizer, source.config.vocab_size, self._model.arch)

    @property
    def num_bytes(self) -> int:
        return int(self._source.model.num_parameters() * gguf_file.BITS.get(self.quant, 16) / 8)

    def write(self, folder: Path, progress: ExportProgress) -> None:
        own = "f16" if self.quant in K_QUANTS else self.quant
        path = folder / (".f16" if self.quant in K_QUANTS else self.file)
        gguf_file.write_model(
            path, self._source.name, self._model, self._tokenizer, self._source.weights, own, progress
        )
        if self.quant in K_QUANTS:
            requantise(path, folder / self.file, self.quant, progress)
            path.unlink()

    def warnings(self) -> Iterator[str]:
        if self._model.context_length < self._source.config.max_position_embeddings:
            yield (
                f"The file says that the model reads {self._model.context_length:,} tokens, since llama.cpp has no "
                "sliding windows for this family and would compute longer texts otherwise."
            )

    def rounded(self, read: Read) -> Read:
        """Returns a reader that rounds weights as a file of this quantisation does."""
        shapes = self._source.weights.shapes

        def rounded(name: str) -> Tensor:
            kind = gguf_file.kind_of(name, shapes[name], self.quant, shapes)
            values = gguf_file.quantised(self._model.convert(name, read(name)), kind)
            return self._model.restore(name, gguf_file.dequantised(values, kind))

        return rounded

    def read_back(self, folder: Path, comparison: BaseComparison) -> ReadBack:
        path = folder / self.file
        expected, loss = comparison.with_weights(gguf_file.open_exported(path, self._model))
        if not llama_cpp.is_installed():
            same = agreement(comparison.expected, likeliest(expected), comparison.texts.rows)
            if self.quant in ("f16", "bf16"):
                check_agreement(OURSELVES, same, self.quant)
            return ReadBack(OURSELVES, same, loss)
        texts = list(map(self._tokenizer.composed, comparison.texts.texts))
        found = llama_cpp.predict(path, comparison.texts.rows, texts, comparison.progress)
        check_tokens(found, [self._source.tokenizer.backend_tokenizer.encode(text).ids for text in texts])
        return _compare("llama.cpp", found, comparison, loss, None if self.quant == "f16" else expected, self.quant)

    def _tensors(self, folder: Path) -> Iterator[tuple[Tensor, Tensor]]:
        found = gguf_file.open_exported(folder / self.file, self._model)
        if self.quant in K_QUANTS:  # llama.cpp's own rounding
            return ((tensor, tensor) for tensor in map(found, self._source.weights.shapes))
        expected = self.rounded(self._source.weights.read)
        return ((found(name), expected(name)) for name in self._source.weights.shapes)


class Ollama(Gguf):
    """A GGUF file, and the Modelfile from which Ollama makes a model.

    It renders prompts as `generate` does: in the model's chat form only if the adapter was trained on that.
    """

    def __init__(self, source: Source, quant: str):
        super().__init__(source, quant)
        prompts = source.record.prompts
        needs_chat = prompts != "text" and bool(source.tokenizer.chat_template)
        raw = {"text": RAW, "chat": plain_message(RAW), "question": plain_question(RAW)}[prompts]
        self._modelfile = modelfile(source.tokenizer, self.file, needs_chat=needs_chat, raw=raw)

    def write(self, folder: Path, progress: ExportProgress) -> None:
        super().write(folder, progress)
        (folder / "Modelfile").write_text(self._modelfile, encoding="utf-8")


class GgufLora(Format):
    """The adapter alone in a GGUF file, for llama.cpp's --lora."""

    is_adapter = True

    def __init__(self, source: Source):
        super().__init__(source)
        self._model = GgufModel(source.config)
        self._model.refuse_adapter()
        self._tokenizer = GgufTokenizer(source.tokenizer, source.config.vocab_size, self._model.arch)
        self._file = f"{source.name}-lora.gguf"

    def write(self, folder: Path, progress: ExportProgress) -> None:
        gguf_file.write_lora(folder / self._file, self._model, self._source.weights.factors, progress)

    def read_back(self, folder: Path, comparison: BaseComparison) -> ReadBack:
        if not llama_cpp.is_installed():
            return self.check_tensors(folder, comparison.progress)
        # llama.cpp needs a base model too, which is deleted afterwards.
        base, weights = folder / ".base", self._source.weights.of_base()
        quietly = ExportProgress(on_event=lambda event: comparison.progress.check())
        gguf_file.write_model(base, "base", self._model, self._tokenizer, weights, "f16", quietly)
        found = llama_cpp.predict(base, comparison.texts.rows, [], comparison.progress, lora=folder / self._file)
        base.unlink()
        return _compare("llama.cpp", found, comparison, comparison.loss_adapter, quant="f16")

    def _tensors(self, folder: Path) -> Iterator[tuple[Tensor, Tensor]]:
        return self._factors(
            gguf_file.read_lora(folder / self._file, self._model, self._source.weights.factors.matrices)
        )


class Mlx(Format):
    """The adapter as mlx-lm reads it, with `mlx_lm.generate --adapter-path`: its matrices are the transposed ones."""

    is_adapter = True

    def __init__(self, source: Source):
        super().__init__(source)
        if source.reference.is_gguf:
            raise ExportError("mlx-lm loads no GGUF file to put the adapter on; use --format merged, which it loads.")
        check_for_mlx_lm(source)

    def write(self, folder: Path, progress: ExportProgress) -> None:
        factors, tensors = self._source.weights.factors, {}
        for name, (lora_A, lora_B) in factors.matrices.items():
            layer = name.removesuffix(".weight")
            tensors[f"{layer}.lora_a"] = lora_A.T.contiguous()
            tensors[f"{layer}.lora_b"] = lora_B.T.contiguous()
        save_file(tensors, folder / "adapters.safetensors", metadata={"format": "mlx"})
        config = {
            "fine_tune_type": "lora",
            "num_layers": self._source.config.num_hidden_layers,
            "lora_parameters": {
                "rank": factors.r,
                "scale": factors.scale,
                "dropout": 0.0,
                "keys": sorted({_path_in_block(name) for name in factors.matrices}),
            },
        }
        (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        progress.written(1, 1)

    def read_back(self, folder: Path, comparison: BaseComparison) -> ReadBack:
        if not mlx_lm.is_installed():
            return self.check_tensors(folder, comparison.progress)
        found = mlx_lm.predict(self._source.base_path, folder, comparison.texts.rows, comparison.progress)
        return _compare("mlx-lm", found, comparison, comparison.loss_adapter)

    def warnings(self) -> Iterator[str]:
        yield from mlx_lm.what_it_lacks(self._source.config)

    def _tensors(self, folder: Path) -> Iterator[tuple[Tensor, Tensor]]:
        tensors = read_weights(folder / "adapters.safetensors")
        layers = {name.removesuffix(".lora_a") for name in tensors if name.endswith(".lora_a")}
        matrices = {f"{layer}.weight": (tensors[f"{layer}.lora_a"].T, tensors[f"{layer}.lora_b"].T) for layer in layers}
        lora = read_json(folder / "adapter_config.json")["lora_parameters"]
        return self._factors(LoraFactors(lora["rank"], lora["scale"] * lora["rank"], matrices))


# By name; those that are quantised also take a quantisation.
FORMATS: dict[str, Callable[..., Format]] = {
    "peft": Peft,
    "merged": Merged,
    "gguf": Gguf,
    "gguf-lora": GgufLora,
    "mlx": Mlx,
    "ollama": Ollama,
}
QUANTISED = ("gguf", "ollama")


def _compare(
    program: str,
    found: Predicted,
    comparison: BaseComparison,
    loss: float | None,
    expected: list[Tensor] | None = None,
    quant: str | None = None,
) -> ReadBack:
    """Compares a program's predictions with those expected, by default the adapter's; refuses other ones."""
    same = agreement(expected or comparison.expected, found, comparison.texts.rows)
    check_agreement(program, same, quant)
    return ReadBack(program, same, loss)


def _path_in_block(name: str) -> str:
    """Returns a layer's path within its block, as `self_attn.q_proj`."""
    path = name.removesuffix(".weight").split(".")
    number = next(position for position, part in enumerate(path) if part.isdigit())
    return ".".join(path[number + 1 :])
