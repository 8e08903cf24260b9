"""Measures how llama.cpp's predictions with exported files differ from ours, for families and for whole models.

    python kernels/bench/formats/export_differences.py [MODEL...] [--families]
                                                         [--quants f32 f16 q8_0 q4_0] [--record [FILE]]

Each model gets a random LoRA adapter, and is compared on 200 tokens of examples/notes. --families adds a small random
model of each family. In a file of type f32 llama.cpp rounds nothing; in others it rounds activations like weights. The
rows "sebp-edge, rounded" are our reader with activations rounded likewise, beside our reader without: what that
rounding alone changes.
"""

import argparse
import copy
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.append(str(Path(__file__).parents[1]))

import evidence
from formats.export import write_adapter
from sebp_edge import Recipe
from sebp_edge.adapters.record import AdapterRecord
from sebp_edge.events import silent
from sebp_edge.export import llama_cpp
from sebp_edge.export.child import Predicted
from sebp_edge.export.formats import Gguf
from sebp_edge.export.gguf_file import open_exported
from sebp_edge.export.read_back import CPU, BaseComparison, agreement, likeliest
from sebp_edge.export.source import Source
from sebp_edge.models.catalog import resolve
from sebp_edge.models.gguf.families import GgufModel
from sebp_edge.models.loading import load_base_model, local_tokenizer, without_progress_bars
from sebp_edge.texts.readers import read_texts

SOURCES = ("sebp_edge/export", "sebp_edge/models/gguf", "sebp_edge/models", "kernels/bench/formats/export.py", __file__)
NOTES = evidence.ROOT / "examples" / "notes"
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
    "rope_parameters": {"rope_type": "default", "rope_theta": 300_000.0},
}
# The windows of Gemma are shorter than the texts.
GEMMA = {"head_dim": 64, "query_pre_attn_scalar": 64, "sliding_window": 64, "hidden_activation": "gelu_pytorch_tanh"}
FAMILIES = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {"head_dim": 64},
    "smollm3": {},
    "gemma2": GEMMA | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "gemma3_text": GEMMA
    | {
        "rope_parameters": {
            "full_attention": SIZES["rope_parameters"],
            "sliding_attention": {"rope_type": "default", "rope_theta": 3_000.0},
        }
    },
    "phi3": {},
}
QUANTS = ("f32", "f16", "q8_0", "q4_0")
FAMILY_QUANTS = ("f16", "q8_0")
_BLOCK = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*")
    parser.add_argument("--families", action="store_true")
    parser.add_argument("--quants", nargs="+", choices=QUANTS, default=QUANTS)
    evidence.add_record_option(parser)
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for model in options.models:
            rows += differences(model, 0.003, options.quants)
        for family in FAMILIES if options.families else ():
            made = make_model(Path(folder) / family, family)
            rows += differences(made, 0.05, [quant for quant in options.quants if quant in FAMILY_QUANTS])
    if options.record:
        evidence.record("export-differences", SOURCES, rows, options.record, on_cpu=True)


def make_model(folder: Path, family: str, changes: dict | None = None) -> Path:
    """Writes a random model of a family, with the bundled tokenizer.

    Args:
        changes: settings other than those in `SIZES`; by default the family's in `FAMILIES`.
    """
    tokenizer = local_tokenizer(resolve("tiny"))
    ids = {f"{role}_token_id": getattr(tokenizer, f"{role}_token_id") for role in ("bos", "eos", "pad")}
    sizes = SIZES | ids | {"vocab_size": len(tokenizer)}
    config = AutoConfig.for_model(family, **copy.deepcopy(sizes | (FAMILIES[family] if changes is None else changes)))
    torch.manual_seed(0)
    with without_progress_bars():
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def differences(model: str | Path, spread: float, quants: list[str]) -> Iterator[dict]:
    """Yields rows for each quantisation of a model with a random adapter."""
    reference = resolve(model)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_adapter(folder / "adapter", load_base_model(reference, Recipe.load("notes"), CPU), spread)
        record = AdapterRecord.read(folder / "adapter")
        source = Source.open("adapter", folder / "adapter", record, reference)
        comparison = BaseComparison(source, read_texts(NOTES), silent, lambda: None)
        rows = comparison.texts.rows
        for quant in quants:
            written = Gguf(source, quant)
            written.write(folder, lambda *_: None, lambda: None)
            file = folder / written.file
            own, loss = comparison.with_weights(open_exported(file, GgufModel(source.config)))
            theirs = llama_cpp.predict(file, rows, [], lambda: None)
            file.unlink()
            about = {"model": reference.name, "quant": quant}
            about |= {"base": comparison.loss_base, "adapter": comparison.loss_adapter, "file": loss}
            found = {"llama.cpp": theirs}
            firsts = {"first_token": first_difference(own, theirs)}
            if quant != "f32":
                rounded = with_rounded_activations(comparison, quant)
                found["sebp-edge, rounded"] = likeliest(rounded)
                firsts["first_token_rounded"] = first_difference(rounded, theirs)
            for program, predicted in found.items():
                row = about | {"program": program} | asdict(agreement(own, predicted, rows))
                row |= firsts if program == "llama.cpp" else {}
                print(*(f"{each:.5f}" if isinstance(each, float) else each for each in row.values()), flush=True)
                yield row


def first_difference(expected: list[Tensor], predicted: Predicted) -> float:
    """Returns the mean difference of log-probabilities after the first token.

    It attends to itself only, so it is where differences in the order of sums grow least.
    """
    differences = [abs(expected[0][0, token].item() - value) for token, value in predicted.likeliest[0]]
    return sum(differences) / len(differences)


def with_rounded_activations(comparison: BaseComparison, quant: str) -> list[Tensor]:
    """Returns the log-probabilities if the inputs of linear layers are rounded as llama.cpp rounds them."""
    round_ = _to_f16 if quant == "f16" else _to_q8_0
    model = comparison.model
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    hooks = [layer.register_forward_pre_hook(lambda _, inputs: (round_(inputs[0]),)) for layer in layers]
    try:
        return comparison.log_probabilities()
    finally:
        for hook in hooks:
            hook.remove()


def _to_f16(values: Tensor) -> Tensor:
    return values.half().float()


def _to_q8_0(values: Tensor) -> Tensor:
    """Rounds blocks to 8 bits; their scale is stored in fp16, after it was used."""
    blocks = values.unflatten(-1, (-1, _BLOCK))
    scales = blocks.abs().amax(-1, keepdim=True) / 127
    return (blocks / scales.clamp(min=1e-30)).round().mul(scales.half().float()).flatten(-2)


if __name__ == "__main__":
    main()
