"""Asks llama.cpp itself, in a child process, since a bad file aborts it."""

import json
import subprocess
import sys

_CHILD = """
import json, sys, urllib.request
import xllamacpp

task = json.load(sys.stdin)
options = xllamacpp.CommonParams()
options.model.path, options.n_ctx, options.n_parallel = task["path"], 512, 1
options.warmup, options.verbosity = False, 0
options.cpuparams.n_threads = 1
server = xllamacpp.Server(options)

def ask(what, **body):
    request = urllib.request.Request(
        f"{server.listening_address}/{what}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)

tokens = [
    ask("tokenize", content=text, add_special=True, parse_special=True)["tokens"] for text in task["texts"]
]
# Without this bias, there are no probabilities if the likeliest token is part of a character. They do not include it.
options = {"n_predict": 1, "temperature": 0, "cache_prompt": False, "logit_bias": [["a", 1000]]}
steps = [
    ask("completion", prompt=ids, n_probs=task["n_probs"], **options)
    ["completion_probabilities"][0]["top_logprobs"]
    for ids in task["prompts"]
]
print(json.dumps([tokens, [[[token["id"], token["logprob"]] for token in step] for step in steps]]))
"""


def ask_llama_cpp(path, texts=(), prompts=(), n_probs=20):
    """Returns llama.cpp's tokens of texts, and the likeliest next tokens of prompts with their log-probabilities."""
    task = {"path": str(path), "texts": list(texts), "prompts": list(prompts), "n_probs": n_probs}
    done = subprocess.run(
        [sys.executable, "-c", _CHILD], input=json.dumps(task), capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])
