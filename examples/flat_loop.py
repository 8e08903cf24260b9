"""The same training without the SDK's classes: plain transformers and peft, and `sparsify` around the loop.

python examples/flat_loop.py [FOLDER]
"""

import sys
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from sebp_edge import sparsify
from sebp_edge.models.catalog import BUNDLED_FOLDER

CONTEXT_LENGTH = 512
BATCH_SIZE = 4

notes = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "notes"
texts = [path.read_text(encoding="utf-8") for path in sorted(notes.rglob("*.md")) if not path.name.startswith(".")]

tokenizer = AutoTokenizer.from_pretrained(BUNDLED_FOLDER)
model = AutoModelForCausalLM.from_pretrained(BUNDLED_FOLDER, dtype=torch.float32)
model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"))
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)

# Padding goes to the right, and out of the loss: that is all that `sparsify` needs to see.
tokenizer.padding_side = "right"
with sparsify(model):
    for begin in range(0, len(texts), BATCH_SIZE):
        batch = tokenizer(
            [text + tokenizer.eos_token for text in texts[begin : begin + BATCH_SIZE]],
            padding="max_length",
            truncation=True,
            max_length=CONTEXT_LENGTH,
            return_tensors="pt",
        )
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        loss = model(**batch, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {begin // BATCH_SIZE + 1}/{-(-len(texts) // BATCH_SIZE)}  loss {loss.item():.3f}", flush=True)
