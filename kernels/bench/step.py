"""One LoRA training step of a 3B Llama shape with random weights on a GPU: dynamic padding, the drop-in, hoisted rows.

    python kernels/bench/step.py [--record [FILE]]

B short texts (26 to 196 tokens, mean 57), padded to the longest of them, LoRA r = 16 on all projections with fp32
adapters on a bf16 base, AdamW. All ways run in turns on the same batches, after their gradients were held against fp32
ones: the timer and the gate are those of `sebp-edge bench`.
"""

import argparse

import torch

import evidence
from peer_work import Job, lengths, make_model
from sebp_edge.insight.bench.compare import Measured, compare
from sebp_edge.insight.bench.ways import DENSE, DROP_IN, HOISTED
from sebp_edge.insight.bench.workload import Workload
from sebp_edge.texts.examples import Example

TEXTS = (1, 4, 16, 64)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    evidence.add_record_option(arguments)
    options = arguments.parse_args()
    job = Job("llama-3.2-3b", "cuda", full=False, loss_share=1.0, batches=list(TEXTS), folder="", save_model=False)
    model = make_model(job)
    records = []
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: LoRA step of a 3B shape, ms")
    print(f"{'texts':>6}{'tokens':>8}  {'way':15}{'forward':>9}{'backward':>10}{'step':>8}{'peak GiB':>10}{'error':>9}")
    for count in TEXTS:
        chosen = lengths(job.loss_share)[:count]
        examples = [Example([0] * length, [0] * length, number) for number, length in enumerate(chosen)]
        work = Workload.of(examples, max(chosen), model.config.vocab_size, torch.device("cuda"))
        for one in compare(model, work.batch, (DENSE, DROP_IN, HOISTED)):
            records.append({"texts": count, "tokens": work.tokens, **figures(one)})
            show(records[-1])
    if options.record:
        sources = [*evidence.STEP, "sebp_edge/insight/bench", "kernels/bench/peer_work.py", __file__]
        evidence.record("step", sources, records, options.record)


def figures(one: Measured) -> dict:
    if one.times is None:
        raise SystemExit(f"{one.way.name}, {one.status}: {one.why}.")
    times = {f"{part}_ms": 1e3 * getattr(one.times, part) for part in ("forward", "backward", "step")}
    peak = {"peak_gib": one.times.peak_bytes / 2**30}
    return {"way": one.way.name, **times, **peak, "gradient_error": one.deviation.gradient_error}


def show(row: dict) -> None:
    times = f"{row['forward_ms']:>9.1f}{row['backward_ms']:>10.1f}{row['step_ms']:>8.1f}"
    print(
        f"{row['texts']:>6}{row['tokens']:>8}  {row['way']:15}{times}{row['peak_gib']:>10.1f}"
        f"{row['gradient_error']:>9.1e}",
        flush=True,
    )


if __name__ == "__main__":
    main()
