"""Runs llama.cpp on GGUF files, in child processes, which a damaged file ends.

To read a file, llama.cpp is the package xllamacpp. It listens on a port of this machine only, for as long as the
process runs. To quantise one, it is its own program, which has quantisations that the package gguf can only read.
"""

import json
import os
import shutil
import sys
import urllib.request
from importlib.util import find_spec
from pathlib import Path

from sebp_edge.basics.children import ending_with_this
from sebp_edge.errors import ExportError, OptionError
from sebp_edge.export.child import Predicted, communicate, run
from sebp_edge.export.export_result import ExportProgress

K_QUANTS = ("q2_k", "q3_k_s", "q3_k_m", "q3_k_l", "q4_k_s", "q4_k_m", "q5_k_s", "q5_k_m", "q6_k")
_PROGRAM = "llama-quantize"


def is_installed() -> bool:
    """Whether llama.cpp can be run."""
    return find_spec("xllamacpp") is not None and not getattr(sys, "frozen", False)


def predict(
    model: Path, rows: list[list[int]], texts: list[str], progress: ExportProgress, lora: Path | None = None
) -> Predicted:
    """Returns what llama.cpp predicts after each token of `rows`, and how it tokenises `texts`."""
    request = {"model": str(model), "lora": lora and str(lora), "rows": rows, "texts": texts}
    return run(__name__, "llama.cpp", request, progress)


def _answer(request: dict, top: int) -> dict:
    """Computes the answer, in the child process."""
    import xllamacpp

    options = xllamacpp.CommonParams()
    options.model.path = request["model"]
    if request["lora"]:
        options.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(request["lora"], 1.0)]
    options.n_ctx, options.n_parallel, options.n_gpu_layers = max(map(len, request["rows"])) + 16, 1, 0
    options.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    options.warmup, options.verbosity, options.fit_params = False, 0, False
    # What is compared is the file: attention stays in fp32.
    options.cache_type_k = options.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    options.cpuparams.n_threads = options.cpuparams_batch.n_threads = int(
        os.environ.get("OMP_NUM_THREADS") or os.cpu_count()
    )
    server = xllamacpp.Server(options)
    # Probabilities are of the model's logits. A token that is text is sampled, since llama.cpp returns none for others.
    sampled = [[_tokens(server.listening_address, "a")[-1], 1000.0]]
    predicted = []
    for row in request["rows"]:
        for length in range(1, len(row) + 1):
            asked = {"prompt": row[:length], "n_predict": 1, "n_probs": top, "cache_prompt": True}
            answer = server.handle_completions(asked | {"temperature": 0, "logit_bias": sampled})
            answer = answer if isinstance(answer, dict) else json.loads(answer)
            likeliest = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
            predicted.append([(each["id"], each["logprob"]) for each in likeliest])
    return {"predicted": predicted, "tokens": [_tokens(server.listening_address, text) for text in request["texts"]]}


def _tokens(address: str, text: str) -> list[int]:
    content = json.dumps({"content": text, "add_special": True}).encode()
    asked = urllib.request.Request(f"{address}/tokenize", content, {"Content-Type": "application/json"})
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(asked) as answer:
        return json.load(answer)["tokens"]


def find_program(quant: str) -> str:
    """Returns the path of the program; raises an OptionError if it is not there."""
    program = shutil.which(_PROGRAM)
    if program is None:
        raise OptionError(
            f"{quant} needs {_PROGRAM}, a program of llama.cpp, which is not on the path; install llama.cpp, or choose "
            "q4_0, q5_0 or q8_0."
        )
    return program


def requantise(source: Path, target: Path, quant: str, progress: ExportProgress) -> None:
    """Quantises a file in f16; raises an ExportError if the program fails."""
    command = [find_program(quant), str(source), str(target), quant.upper()]
    code, _ = communicate(ending_with_this(command), b"", progress)
    if code or not target.is_file():
        raise ExportError(f"{_PROGRAM} failed with the code {code}; nothing was exported.")
