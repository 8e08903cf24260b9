"""Computes the losses of model folders with another program, whose interpreter runs this file.

    INTERPRETER kernels/bench/formats/loss_elsewhere.py transformers|mlx_lm < request.json

Reads folders with rows of token ids, and a text. Writes the program's version, and for each folder: the mean loss of
the rows' tokens, in nats, in fp32; and the tokens that it reads in the text, or null if it cannot load the tokenizer.
Imports nothing of this project.
"""

import importlib.metadata
import json
import math
import sys


def main() -> None:
    program, request = sys.argv[1], json.load(sys.stdin)
    compute = {"transformers": with_transformers, "mlx_lm": with_mlx_lm}[program]
    found = []
    for model in request["models"]:
        losses, tokens = compute(model["folder"], model["rows"], request["text"])
        found.append({"loss": math.fsum(losses) / len(losses), "tokens": tokens})
    print(json.dumps({"version": importlib.metadata.version(program.replace("_", "-")), "found": found}))


def with_transformers(folder: str, rows: list[list[int]], text: str) -> tuple[list[float], list[int] | None]:
    """Returns the losses of all tokens but the rows' first, and the tokens of the text."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    losses = []
    for row in rows:
        with torch.no_grad():
            logits = model(torch.tensor([row])).logits[0, :-1].float()
        losses += torch.nn.functional.cross_entropy(logits, torch.tensor(row[1:]), reduction="none").tolist()
    try:
        return losses, AutoTokenizer.from_pretrained(folder)(text)["input_ids"]
    except (ValueError, ImportError):  # what transformers 4 raises for the classes and settings of transformers 5
        return losses, None


def with_mlx_lm(folder: str, rows: list[list[int]], text: str) -> tuple[list[float], list[int]]:
    """Returns the losses of all tokens but the rows' first, and the tokens of the text."""
    import mlx.core as mx
    import mlx.nn as nn
    import mlx_lm

    model, tokenizer = mlx_lm.load(folder)
    model.set_dtype(mx.float32)
    losses = []
    for row in rows:
        logits = model(mx.array([row]))[0, :-1]
        losses += nn.losses.cross_entropy(logits, mx.array(row[1:])).tolist()
    return losses, tokenizer.encode(text)


if __name__ == "__main__":
    main()
