"""Asks llama.cpp itself, in a child process, since a bad file aborts it."""

import json
import subprocess
import sys

_CHILD = """
import json, sys, urllib.request
import xllamacpp

def ask(server, what, **body):
    request = urllib.request.Request(
        f"{server.listening_address}/{what}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)

# Without this bias, there are no probabilities if the likeliest token is part of a character. They do not include it.
step = {"n_predict": 1, "temperature": 0, "cache_prompt": False, "logit_bias": [["a", 1000]]}

def answer(path, texts, prompts, n_probs):
    options = xllamacpp.CommonParams()
    options.model.path, options.n_ctx, options.n_parallel = path, 512, 1
    options.warmup, options.verbosity = False, 0
    options.cpuparams.n_threads = 1
    server = xllamacpp.Server(options)
    tokens = [ask(server, "tokenize", content=text, add_special=True, parse_special=True)["tokens"] for text in texts]
    steps = [
        ask(server, "completion", prompt=ids, n_probs=n_probs, **step)["completion_probabilities"][0]["top_logprobs"]
        for ids in prompts
    ]
    return tokens, [[[token["id"], token["logprob"]] for token in step] for step in steps]

task = json.load(sys.stdin)
print(json.dumps([answer(path, task["texts"], task["prompts"], task["n_probs"]) for path in task["paths"]]))
"""


def ask_llama_cpp(path, texts=(), prompts=(), n_probs=20):
    """Returns llama.cpp's tokens of texts, and the likeliest next tokens of prompts with their log-probabilities."""
    (answer,) = ask_each([path], texts, prompts, n_probs)
    return answer


def ask_each(paths, texts=(), prompts=(), n_probs=20):
    """Returns what `ask_llama_cpp` does for each of several files, in one process."""
    task = {"paths": [*map(str, paths)], "texts": list(texts), "prompts": list(prompts), "n_probs": n_probs}
    done = subprocess.run(
        [sys.executable, "-c", _CHILD], input=json.dumps(task), capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])
