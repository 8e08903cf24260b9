"""Trains without the SDK's classes: a plain transformers and PEFT loop with `sparsify` around it.

python examples/flat_loop.py [FOLDER]
"""

import random
import sys
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from sebp_edge import sparsify

MODEL = Path(__file__).parents[1] / "sebp_edge" / "engine" / "models" / "tiny"  # or any decoder's folder or Hub id
CONTEXT_LENGTH = 512
BATCH_SIZE = 4
HELD_OUT = 8

notes = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "notes"
texts = [path.read_text(encoding="utf-8") for path in sorted(notes.rglob("*.md")) if not path.name.startswith(".")]
random.Random(0).shuffle(texts)

tokenizer = AutoTokenizer.from_pretrained(MODEL)
model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"))
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)

# `sparsify` needs no more than padding on the right with labels of -100.
tokenizer.padding_side = "right"


def loss_of(batch_texts):
    """Returns the mean loss on texts padded to the context length."""
    batch = tokenizer(
        [text + tokenizer.eos_token for text in batch_texts],
        padding="max_length",
        truncation=True,
        max_length=CONTEXT_LENGTH,
        return_tensors="pt",
    )
    return model(**batch, labels=batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)).loss


held_out, texts = texts[:HELD_OUT], texts[HELD_OUT:]
with torch.no_grad():
    before = loss_of(held_out).item()
with sparsify(model):
    for begin in range(0, len(texts), BATCH_SIZE):
        loss = loss_of(texts[begin : begin + BATCH_SIZE])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {begin // BATCH_SIZE + 1}/{-(-len(texts) // BATCH_SIZE)}  loss {loss.item():.3f}", flush=True)
with torch.no_grad():
    print(f"held-out loss {before:.3f} -> {loss_of(held_out).item():.3f}")
