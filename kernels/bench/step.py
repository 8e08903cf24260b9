"""One LoRA training step of a 3B Llama shape with random weights on a GPU: dynamic padding, the drop-in, hoisted rows.

    python kernels/bench/step.py [--record [FILE]]

B short texts (26 to 196 tokens, mean 57), padded to the longest of them, LoRA r = 16 on all projections with fp32
adapters on a bf16 base, AdamW. All ways run in turns on the same batches, after their gradients were compared.
"""

import argparse
import random
from dataclasses import asdict

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import evidence
from sebp_edge.insight.bench import time_steps
from sebp_edge.texts.batches import Collator
from sebp_edge.texts.examples import Example

SHAPE = {
    "vocab_size": 128256,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 28,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    evidence.add_record_option(arguments)
    options = arguments.parse_args()
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    torch.set_default_dtype(torch.float32)
    model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"))
    lengths = text_lengths()
    records = []
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: LoRA step of a 3B shape, ms")
    print(f"{'texts':>6}{'tokens':>8}  {'way':15}{'forward':>9}{'backward':>10}{'step':>8}{'peak GiB':>10}{'error':>9}")
    for count in (1, 4, 16, 64):
        batch = make_batch(lengths[:count])
        # In bf16 the gradients of 28 random layers differ by 2 to 6 %; fp32 tests hold the row sets to 1e-5.
        for timing in time_steps(model, [batch], tolerance=0.1):
            record = {"texts": count, "tokens": sum(lengths[:count]), **asdict(timing)}
            times = "".join(f"{1e3 * seconds:>9.1f}" for seconds in (timing.forward, timing.backward, timing.step))
            peak = timing.peak_bytes / 2**30
            print(
                f"{count:>6}{record['tokens']:>8}  {timing.way:15}{times}{peak:>10.1f}{timing.gradient_error:>9.1e}",
                flush=True,
            )
            records.append(record)
    if options.record:
        evidence.record("step", [*evidence.STEP, "sebp_edge/insight/bench.py", __file__], records, options.record)


def text_lengths() -> list[int]:
    """Tokens of each of 64 texts."""
    draw = random.Random(0)
    return [max(26, min(196, int(draw.gauss(57, 25)))) for _ in range(64)]


def make_batch(lengths: list[int]):
    """A batch of random tokens, padded to its longest text, on the GPU."""
    examples = []
    for number, length in enumerate(lengths):
        ids = torch.randint(10, 128000, (length,)).tolist()
        examples.append(Example(ids, ids, number))
    batch = Collator(max(lengths), 0)(examples)
    tensors = {name: getattr(batch, name).cuda() for name in ("input_ids", "attention_mask", "labels")}
    return type(batch)(**tensors, plan=batch.plan.to("cuda"))


if __name__ == "__main__":
    main()
