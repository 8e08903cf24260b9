"""Times a training step of this project beside other trainers, all but two of them padding-free, on one GPU.

    python kernels/bench/speed/peers.py [--record [FILE]]                 LoRA on the shape of Llama-3.2-3B
    python kernels/bench/speed/peers.py --shape qwen3-0.6b                or another of SHAPES
    python kernels/bench/speed/peers.py --full                            all weights trained, in bf16
    python kernels/bench/speed/peers.py --4bit                            LoRA on a base model in 4 bits
    python kernels/bench/speed/peers.py --loss-share 0.25                 a loss on the last quarter of each text only
    python kernels/bench/speed/peers.py --arms "hf graph,sebp-edge step" --batches 4
    python kernels/bench/speed/peers.py --tiny                            a small shape on the CPU, to try the benchmark

Random bf16 weights, LoRA r = 16 on all linear layers but the head, AdamW, short texts; adapters are in fp32 and compute
in bf16. Times are of one optimizer step (forward, backward, update), the median of 7 after 2 warm-ups. Each trainer
runs in a process of its own and measures alone; one that is not installed, fails or runs out of memory gets a row that
says so.

A trainer is timed only if its loss and gradients agree with an fp32 reference (`trainers.reference`). Rows say in what
format AdamW's moments are and how many bytes they take, and what the GPU was like (`trainers.conditions`).
`trainers.limit` defines the limit. Steps on a few texts without a graph are bound by launches, and so by the host's
CPU.
"""

import argparse
import importlib.util
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[1]))

import evidence
from speed.trainers.arms import ARMS, FOUR_BIT, FULL, LORA, LOSS_SHARE
from speed.trainers.limit import CEILINGS, Ceilings, Size, limit_ms
from speed.trainers.runs import run_in_turn
from speed.trainers.work import SHAPES, TINY, Job

SOURCES = (
    *evidence.STEP,
    "kernels/bench/speed/peers.py",
    "kernels/bench/speed/trainers",
)


def main(arguments: list[str] | None = None) -> None:
    parser, options = parse(arguments)
    names = choose_arms(options, parser)
    with tempfile.TemporaryDirectory() as folder:
        job = Job(
            shape=options.shape,
            device="cpu" if options.tiny else "cuda",
            full=options.full,
            four_bit=options.four_bit,
            loss_share=options.loss_share,
            batches=options.batches,
            folder=folder,
            save_model=any(map(needs_files, names)),
        )
        rows = run(names, job)
    ceilings = None if options.tiny else CEILINGS.get(torch.cuda.get_device_name())
    compare(rows, job, Ceilings(*options.ceilings) if options.ceilings else ceilings)
    for row in sorted(rows, key=lambda row: row["texts"]):
        evidence.show(row)
    about = {"shape": job.shape, "trained": "all" if job.full else "LoRA", "loss_share": job.loss_share}
    about |= {"base": "NF4" if job.four_bit else "bf16"}
    evidence.record(record_name(job, options.arms), SOURCES, [about | row for row in rows], options.record)


def parse(arguments: list[str] | None) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = evidence.parser(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default=SHAPES[0])
    parser.add_argument("--full", action="store_true", help="train all weights")
    parser.add_argument("--4bit", dest="four_bit", action="store_true", help="LoRA on a base model in 4 bits")
    parser.add_argument("--loss-share", type=float, default=1.0, metavar="SHARE", help="of each text, at its end")
    parser.add_argument("--arms", metavar="NAMES", help=f"with commas between them: {', '.join(ARMS)}")
    parser.add_argument("--batches", default="1,4,16,64", metavar="TEXTS", help="numbers of texts, at most 64")
    parser.add_argument("--ceilings", type=float, nargs=2, metavar=("FLOPS", "BYTES"), help="of this GPU, a second")
    parser.add_argument("--tiny", action="store_true", help="a small shape on the CPU")
    options = parser.parse_args(arguments)
    options.batches = sorted({int(count) if count.isdecimal() else 0 for count in options.batches.split(",")})
    if not 1 <= options.batches[0] <= options.batches[-1] <= 64:
        parser.error("--batches takes numbers from 1 to 64, with commas between them.")
    if not 0 < options.loss_share <= 1:
        parser.error(f"--loss-share is {options.loss_share}; give more than 0 and at most 1.")
    if options.full and options.four_bit:
        parser.error("weights in 4 bits cannot be trained; choose --full or --4bit.")
    if options.tiny:
        options.shape = TINY
        if options.record:
            parser.error("tiny shapes are no evidence; record without --tiny.")
    elif not torch.cuda.is_available():
        parser.error("there is no CUDA GPU here; --tiny runs on the CPU.")
    return parser, options


def choose_arms(options: argparse.Namespace, parser: argparse.ArgumentParser) -> list[str]:
    """The arms named in the options, else the arms of this kind of table."""
    if options.arms:
        names = [name.strip() for name in options.arms.split(",")]
        unknown = [name for name in names if name not in ARMS]
        if unknown:
            parser.error(f"no arm is called {unknown[0]!r}; there are {', '.join(ARMS)}.")
        return names
    asked = {FULL: options.full, FOUR_BIT: options.four_bit, LOSS_SHARE: options.loss_share < 1}
    kinds = {kind for kind, is_asked in asked.items() if is_asked} or {LORA}
    return [name for name, arm in ARMS.items() if kinds <= arm.tables]


def needs_files(name: str) -> bool:
    """Whether this arm loads the model from a folder."""
    return name.startswith("unsloth") and importlib.util.find_spec("unsloth") is not None


def run(names: list[str], job: Job) -> list[dict]:
    """The rows of all arms in order, one per arm and batch."""
    missing = {name: ARMS[name].unsupported_reason(job) for name in names}
    jobs = {
        name: [replace(job, batches=[each]) for each in job.batches] if ARMS[name].apart else [job] for name in names
    }
    work = [("reference", job), *((name, own) for name in names if missing[name] is None for own in jobs[name])]
    ended = run_in_turn(work)
    if len(work) > 1 and not (reference := next(ended)).succeeded:
        raise RuntimeError(f"The reference, which says what is right, could not be computed: {reference.error}")
    rows = []
    for name in names:
        for own in jobs[name]:
            found, error = ([], missing[name]) if missing[name] else next(ended)[1:]
            by_texts = {row["texts"]: row for row in found}
            for count in own.batches:
                row = {"arm": name} | by_texts.get(count, {"texts": count, "status": error})
                rows.append(evidence.show(row))
    ended.close()
    return rows


def compare(rows: list[dict], job: Job, ceilings: Ceilings | None) -> None:
    """Adds to each row the limit, and the ratios of the step to the limit and to the fastest other trainer."""
    size, fastest = Size.of(job), {}
    for row in rows:
        if row["status"] == "ok" and not ARMS[row["arm"]].variant.is_ours:
            fastest[row["texts"]] = min(row["step_ms"], fastest.get(row["texts"], row["step_ms"]))
    for row in rows:
        if row["status"] != "ok":
            continue
        if row["texts"] in fastest:
            row["to_fastest_peer"] = row["step_ms"] / fastest[row["texts"]]
        if ceilings:
            held = row["trained_bytes"], row["moments_bytes"]
            row["limit_ms"] = limit_ms(size, row["tokens"], job.full, *held, ceilings)
            row["to_limit"] = row["step_ms"] / row["limit_ms"]


def record_name(job: Job, arms: str | None) -> str:
    """The name of a result; some arms do not replace a table of all."""
    shape = [] if job.shape == SHAPES[0] else [job.shape]
    kinds = {"full": job.full, "4bit": job.four_bit, "loss-share": job.loss_share < 1, "some": arms is not None}
    return "-".join(["peers", *shape, *(kind for kind, is_asked in kinds.items() if is_asked)])


if __name__ == "__main__":
    main()
