"""Trains all weights on several GPUs: a plain transformers loop with Hugging Face's accelerate, and `sparsify` in it.

    accelerate launch --config_file examples/accelerate_fsdp2.yaml examples/accelerate_loop.py [FOLDER]
    accelerate launch --multi_gpu --num_processes 2 examples/accelerate_loop.py [FOLDER]     DistributedDataParallel

Each process trains on its own part of every batch. The gradients are those of one process on the whole batch.
"""

import random
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

from sebp_edge import sparsify

MODEL = Path(__file__).parents[1] / "sebp_edge" / "engine" / "models" / "tiny"  # or any decoder's folder or Hub id
CONTEXT_LENGTH = 512
BATCH_SIZE = 2  # of each process, in a micro-batch
MICRO_BATCHES = 2

accelerator = Accelerator(gradient_accumulation_steps=MICRO_BATCHES)
notes = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "notes"
texts = [path.read_text(encoding="utf-8") for path in sorted(notes.rglob("*.md")) if not path.name.startswith(".")]
random.Random(0).shuffle(texts)

tokenizer = AutoTokenizer.from_pretrained(MODEL)
# `sparsify` needs no more than padding on the right with labels of -100.
tokenizer.padding_side = "right"


def collate(batch_texts):
    """Returns texts padded to the context length, with labels."""
    batch = tokenizer(
        [text + tokenizer.eos_token for text in batch_texts],
        padding="max_length",
        truncation=True,
        max_length=CONTEXT_LENGTH,
        return_tensors="pt",
    )
    return {**batch, "labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}


model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
# Before `prepare`, which wraps the model's forward for mixed precision.
with sparsify(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    loader = DataLoader(texts, BATCH_SIZE, shuffle=True, collate_fn=collate, drop_last=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    model.train()
    batches = iter(loader)
    for step in range(1, len(loader) // MICRO_BATCHES + 1):
        micro_batches = [next(batches) for _ in range(MICRO_BATCHES)]
        # Every token of the step weighs the same, on whichever process it is.
        tokens = sum((batch["labels"][:, 1:] != -100).sum() for batch in micro_batches)
        tokens = accelerator.reduce(tokens)
        total = 0.0
        for batch in micro_batches:
            with accelerator.accumulate(model):
                # Processes' gradients are averaged, and `backward` divides by the number of micro-batches.
                items = tokens / accelerator.num_processes / MICRO_BATCHES
                loss = model(**batch, num_items_in_batch=items).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                total += loss.detach() / MICRO_BATCHES
        loss = accelerator.reduce(total, "mean").item()
        accelerator.print(f"step {step}/{len(loader) // MICRO_BATCHES}  loss {loss:.3f}", flush=True)
accelerator.end_training()
