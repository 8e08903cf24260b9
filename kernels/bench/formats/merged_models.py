"""Reads merged exports with the programs that they are for, and compares their loss with ours.

    python kernels/bench/formats/merged_models.py ENVIRONMENTS [MODEL...] [--families] [--record [FILE]]

transformers 4.57 and mlx-lm run in environments of their own in the folder ENVIRONMENTS, which are made with pip if
they are not there. Each model gets a random LoRA adapter, and its merged folder is read on two texts of examples/notes.
--families adds small random models of each family, with each kind of rotary embeddings, whose settings are none of the
programs' defaults. The rows "before" have the config.json and tokenizer that transformers 5 writes by itself, without
the older names.
"""

import copy
import json
import os
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.append(str(Path(__file__).parents[1]))

import evidence
from formats.export import write_adapter
from sebp_edge import Recipe
from sebp_edge.engine.models.catalog import resolve
from sebp_edge.engine.models.loading import load_base_model, local_tokenizer, without_progress_bars
from sebp_edge.export.export_result import ExportProgress
from sebp_edge.export.formats import Merged
from sebp_edge.export.mlx_lm import what_it_lacks
from sebp_edge.export.read_back import CPU, BaseComparison
from sebp_edge.export.settings import check_settings
from sebp_edge.export.source import Source
from sebp_edge.reading.readers import read_texts
from sebp_edge.store.record import AdapterRecord
from sebp_edge.values.reading import Reading

SOURCES = (
    "sebp_edge/export",
    "sebp_edge/engine/models",
    "kernels/bench/formats/export.py",
    "kernels/bench/formats/loss_elsewhere.py",
    __file__,
)
NOTES = evidence.ROOT / "examples" / "notes"
READER = Path(__file__).with_name("loss_elsewhere.py")
# Each environment's name, what pip installs into it, and the program as `loss_elsewhere` calls it.
PROGRAMS = {
    "transformers 4": (["torch", "transformers==4.57.*"], "transformers"),
    "mlx-lm": (["mlx[cpu]" if sys.platform == "linux" else "mlx", "mlx-lm"], "mlx_lm"),
}
LENGTH, NUM_ROWS, TEXT = 128, 2, "The ferry left at six.\nIt was naïve to think that we would catch it."
THETA = 300_000.0
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.05,
    # Not the programs' defaults, so that a lost setting shows.
    "rms_norm_eps": 1e-3,
    "rope_parameters": {"rope_type": "default", "rope_theta": THETA},
}
# The windows of Gemma are shorter than the texts.
GEMMA = {"head_dim": 64, "query_pre_attn_scalar": 64, "sliding_window": 64, "hidden_activation": "gelu_pytorch_tanh"}


def rope(kind: str, **changes) -> dict:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": THETA} | changes}


def gemma_3(kind: str, **changes) -> dict:
    local = {"rope_type": "default", "rope_theta": 3_000.0}
    full = rope(kind, **changes)["rope_parameters"]
    return GEMMA | {"rope_parameters": {"full_attention": full, "sliding_attention": local}}


LLAMA_3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
LONG = {
    "long_factor": [1.0 + number for number in range(32)],
    "short_factor": [1.0 + number / 8 for number in range(32)],
    "original_max_position_embeddings": 512,
}
# The model type of each model, and what differs from `SIZES`.
CASES = {
    "llama": ("llama", {}),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 64}),
    "smollm3": ("smollm3", {}),
    "gemma2": ("gemma2", GEMMA | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}),
    "gemma3_text": ("gemma3_text", gemma_3("default")),
    "phi3": ("phi3", {}),
    "llama, untied": ("llama", {"tie_word_embeddings": False, "head_dim": 32}),
    "llama, Llama 3's scaling": ("llama", rope("llama3", factor=8.0, **LLAMA_3)),
    "llama, linear": ("llama", rope("linear", factor=4.0)),
    "llama, yarn": ("llama", rope("yarn", factor=4.0, original_max_position_embeddings=256)),
    "mistral, window of 64": ("mistral", {"sliding_window": 64}),
    "gemma": ("gemma", {"head_dim": 64}),
    "gemma3_text, linear": ("gemma3_text", gemma_3("linear", factor=4.0)),
    "phi3, half rotated": ("phi3", rope("default", partial_rotary_factor=0.5)),
    "phi3, longrope": ("phi3", rope("longrope", **LONG) | {"original_max_position_embeddings": 512}),
}


def main() -> None:
    parser = evidence.parser(__doc__)
    parser.add_argument("environments", type=Path)
    parser.add_argument("models", nargs="*")
    parser.add_argument("--families", action="store_true")
    options = parser.parse_args()
    programs = {"transformers 5": (Path(sys.executable), "transformers")}
    for name, (packages, program) in PROGRAMS.items():
        programs[name] = make_environment(options.environments / name.replace(" ", "-"), packages), program
    with tempfile.TemporaryDirectory() as folder:
        cases = [(model, Path(model).name, 0.003) for model in options.models]
        for number, (name, (family, changes)) in enumerate(CASES.items() if options.families else ()):
            cases.append((make_model(Path(folder) / f"base-{number}", family, changes), name, 0.05))
        found = []
        for number, case in enumerate(cases):
            found += merged(Path(folder) / str(number), *case)
        rows = list(compared(found, programs))
    evidence.record("merged-models", SOURCES, rows, options.record, on_cpu=True)


def make_model(folder: Path, model_type: str, changes: dict) -> Path:
    """Writes a random model of this type and these changes to `SIZES`, with the bundled tokenizer."""
    tokenizer = local_tokenizer(resolve("tiny"))
    ids = {f"{role}_token_id": getattr(tokenizer, f"{role}_token_id") for role in ("bos", "eos", "pad")}
    sizes = SIZES | ids | {"vocab_size": len(tokenizer)} | changes
    torch.manual_seed(0)
    with without_progress_bars():
        AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **copy.deepcopy(sizes))).save_pretrained(
            folder
        )
    tokenizer.save_pretrained(folder)
    return folder


def make_environment(folder: Path, packages: list[str]) -> Path:
    """Returns the interpreter of an environment with these packages, which is made unless it is there."""
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    if not python.is_file():
        venv.create(folder, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "-q", *packages], check=True)
    return python


@dataclass(frozen=True)
class MergedModel:
    """A merged model's folder, with the older names or "before", without them.

    Attributes:
        rows: the token ids of the texts.
        ours: our loss on these, in nats per token.
        tokens: the tokens that we read in TEXT.
        lacks: whether mlx-lm is known to compute something else.
    """

    name: str
    when: str
    folder: Path
    rows: list[list[int]]
    ours: float
    tokens: list[int]
    lacks: bool


def merged(folder: Path, model: str | Path, name: str, spread: float) -> Iterator[MergedModel]:
    """Yields a model merged with a random adapter, with the older names and without them.

    Args:
        spread: the standard deviation of the adapter's lora_B.
    """
    folder.mkdir()
    adapter, reference = folder / "adapter", resolve(model)
    write_adapter(adapter, load_base_model(reference, Recipe.load("notes"), CPU), spread)
    source = Source.open("adapter", adapter, AdapterRecord.read(adapter), reference)
    notes = sorted(read_texts(NOTES).documents, key=lambda document: len(document.own_text))[-NUM_ROWS:]
    comparison = BaseComparison(source, Reading(notes), ExportProgress())
    longest = sorted((example.input_ids for example in comparison.texts.examples), key=len)[-NUM_ROWS:]
    comparison.texts.rows[:] = rows = [list(ids[:LENGTH]) for ids in longest]
    dtype = source.weights.dtype
    expected, _ = comparison.with_weights(lambda key: source.weights.read(key).to(dtype))
    tokens, lacks = source.tokenizer(TEXT)["input_ids"], any(what_it_lacks(source.config))
    after, before = folder / "after", folder / "before"
    after.mkdir()
    Merged(source).write(after, ExportProgress())
    check_settings(after, source)
    before.mkdir()
    (before / "model.safetensors").symlink_to(after / "model.safetensors")
    write_as_before(before, source)
    for where in (after, before):
        yield MergedModel(name, where.name, where, rows, mean_loss(expected, rows), tokens, lacks)


def compared(models: list[MergedModel], programs: dict[str, tuple[Path, str]]) -> Iterator[dict]:
    """Yields a row for each model and program.

    Args:
        programs: the interpreter of each program, and what `loss_elsewhere` calls it.
    """
    for program, (python, called) in programs.items():
        version, found = ask(python, called, [(each.folder, each.rows) for each in models])
        for model, one in zip(models, found, strict=True):
            row = {"model": model.name, "when": model.when, "program": program, "version": version}
            row |= {"tokens": sum(map(len, model.rows)), "ours": model.ours, "loss": one["loss"]}
            row |= {"same_tokens": one["tokens"] == model.tokens, "lacks": model.lacks and program == "mlx-lm"}
            yield evidence.show(row)


def mean_loss(log_probabilities: list[torch.Tensor], rows: list[list[int]]) -> float:
    """Returns the mean loss of all tokens but the rows' first, in nats."""
    chosen = [
        values[:-1].gather(1, torch.tensor(row[1:])[:, None])
        for values, row in zip(log_probabilities, rows, strict=True)
    ]
    return -torch.cat(chosen).double().mean().item()


def write_as_before(folder: Path, source: Source) -> None:
    """Writes config.json and the tokenizer as transformers 5 does by itself."""
    config = json.loads(source.config.to_json_string(use_diff=False))
    config |= {
        "dtype": str(source.weights.dtype).removeprefix("torch."),
        "architectures": [type(source.model).__name__],
    }
    (folder / "config.json").write_text(json.dumps(config))
    source.tokenizer.save_pretrained(folder)


def ask(python: Path, program: str, models: list[tuple[Path, list[list[int]]]]) -> tuple[str, list[dict]]:
    """Returns the version of a program and what it computes with model folders and rows, without the network."""
    quiet = os.environ | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    quiet.pop("PYTHONPATH", None)
    request = {"text": TEXT, "models": [{"folder": str(folder), "rows": rows} for folder, rows in models]}
    command = [python, READER, program]
    done = subprocess.run(command, input=json.dumps(request), capture_output=True, text=True, env=quiet, check=False)
    if done.returncode:
        raise RuntimeError(f"{program} failed: {done.stderr[-500:]}")
    answer = json.loads(done.stdout.splitlines()[-1])
    return answer["version"], answer["found"]


if __name__ == "__main__":
    main()
