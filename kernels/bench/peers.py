"""Times a training step of this project beside other trainers, most of them padding-free, on one GPU and the same work.

    python kernels/bench/peers.py [--record [FILE]]                 LoRA on the shape of Llama-3.2-3B
    python kernels/bench/peers.py --shape qwen3-0.6b                or smollm2-135m
    python kernels/bench/peers.py --full                            all weights trained, in bf16
    python kernels/bench/peers.py --loss-share 0.25                 a loss on the last quarter of each text only
    python kernels/bench/peers.py --arms "hf packed,sebp-edge step" --batches 4
    python kernels/bench/peers.py --tiny                            a small shape on the CPU, to try the benchmark

Random bf16 weights, LoRA r = 16 on all seven projections with fp32 adapters, fused AdamW, short texts. Times are of one
optimizer step (forward, backward, update), the median of 7 after 2 warm-ups. Each trainer runs in a process of its own
(see peer_process.py), one after the other; one that is not installed, fails or runs out of memory gets a row that says
so.

The limit is max(k * parameters * tokens / FLOP/s, bytes / bytes per second). For LoRA, k = 4 and the weights are read
twice. For full training, k = 6 and there are ten passes over the weights: reads in forward and backward, the gradient
written and read, the weight and both moments read and written. Steps on a few texts are bound by launches, and so by
the host's CPU as well.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

import evidence
from peer_arms import ARMS
from peer_work import SHAPES, TINY, Job, shape_config

PROCESS = Path(__file__).with_name("peer_process.py")
SOURCES = (
    *evidence.STEP,
    "sebp_edge/insight/bench",
    *(f"kernels/bench/{file}" for file in ("peers.py", "peer_process.py", "peer_arms.py", "peer_work.py")),
)
# A trainer that hangs is stopped after this time, so that the others can run.
ARM_SECONDS = 240
# Measured: bf16 FLOP/s of an 8192^3 matrix product on random data, and bytes/s of a copy (read plus write).
CEILINGS = {"NVIDIA H100 80GB HBM3": (765e12, 3.0e12), "NVIDIA H200": (788e12, 4.3e12)}
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "UNSLOTH_DISABLE_STATISTICS": "1",
    "WANDB_DISABLED": "true",
}


def main(arguments: list[str] | None = None) -> None:
    parser, options = parse(arguments)
    names = choose_arms(options, parser)
    with tempfile.TemporaryDirectory() as folder:
        job = Job(
            shape=options.shape,
            device="cpu" if options.tiny else "cuda",
            full=options.full,
            loss_share=options.loss_share,
            batches=options.batches,
            folder=folder,
            save_model=any(map(needs_files, names)),
        )
        rows = run(names, job)
    limits = None if options.tiny else options.ceilings or CEILINGS.get(torch.cuda.get_device_name())
    compare(rows, job, limits)
    show(rows)
    if options.record:
        about = {"shape": job.shape, "trained": "all" if job.full else "LoRA", "loss_share": job.loss_share}
        evidence.record(record_name(job), SOURCES, [about | row for row in rows], options.record)


def parse(arguments: list[str] | None) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default=SHAPES[0])
    parser.add_argument("--full", action="store_true", help="train all weights")
    parser.add_argument("--loss-share", type=float, default=1.0, metavar="SHARE", help="of each text, at its end")
    parser.add_argument("--arms", metavar="NAMES", help=f"with commas between them: {', '.join(ARMS)}")
    parser.add_argument("--batches", default="1,4,16,64", metavar="TEXTS", help="numbers of texts, at most 64")
    parser.add_argument("--ceilings", type=float, nargs=2, metavar=("FLOPS", "BYTES"), help="of this GPU, a second")
    parser.add_argument("--tiny", action="store_true", help="a small shape on the CPU")
    evidence.add_record_option(parser)
    options = parser.parse_args(arguments)
    options.batches = sorted({int(count) if count.isdecimal() else 0 for count in options.batches.split(",")})
    if not 1 <= options.batches[0] <= options.batches[-1] <= 64:
        parser.error("--batches takes numbers from 1 to 64, with commas between them.")
    if not 0 < options.loss_share <= 1:
        parser.error(f"--loss-share is {options.loss_share}; give more than 0 and at most 1.")
    if options.tiny:
        options.shape = TINY
        if options.record:
            parser.error("tiny shapes are no evidence; record without --tiny.")
    elif not torch.cuda.is_available():
        parser.error("there is no CUDA GPU here; --tiny runs on the CPU.")
    return parser, options


def choose_arms(options: argparse.Namespace, parser: argparse.ArgumentParser) -> list[str]:
    """The arms named in the options, else the arms meant for this kind of run."""
    if options.arms:
        names = [name.strip() for name in options.arms.split(",")]
        unknown = [name for name in names if name not in ARMS]
        if unknown:
            parser.error(f"no arm is called {unknown[0]!r}; there are {', '.join(ARMS)}.")
        return names
    has_partial_loss = options.loss_share < 1
    return [
        name
        for name, arm in ARMS.items()
        if (arm.full or not options.full) and (arm.loss_share if has_partial_loss else not arm.only_loss_share)
    ]


def needs_files(name: str) -> bool:
    """Whether this arm loads the model from a folder."""
    return name.startswith("unsloth") and importlib.util.find_spec("unsloth") is not None


def run(names: list[str], job: Job) -> list[dict]:
    """The rows of all arms in order, one per arm and batch."""
    done, _, error = run_process("reference", job)
    if not done:
        raise RuntimeError(f"The reference, which says what is right, could not be computed: {error}")
    rows = []
    for name in names:
        _, found, error = run_process(name, job)
        by_texts = {row["texts"]: row for row in found}
        for count in job.batches:
            row = {"arm": name} | by_texts.get(count, {"texts": count, "status": error})
            rows.append(row)
            print(line(row), flush=True)
    return rows


def run_process(name: str, job: Job) -> tuple[bool, list[dict], str]:
    """Runs an arm's process; returns whether it succeeded, its rows, and how it ended with its last line of errors."""
    # It runs in the job's folder, because Unsloth writes into the current folder.
    paths = (str(Path(path).resolve()) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path)
    environment = os.environ | QUIET | {"PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, str(PROCESS), name, json.dumps(asdict(job))]
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, cwd=job.folder, env=environment, stdout=output, stderr=errors)
        try:
            code = process.wait(ARM_SECONDS)
            error = f"ended with code {code}"
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
            error = f"stopped after {ARM_SECONDS} s"
        output.seek(0)
        errors.seek(0)
        rows = [json.loads(each) for each in output if each.startswith('{"texts"')]
        last = [each.strip() for each in errors if each.strip()][-1:]
    return code == 0, rows, ": ".join([error, *last])[:200]


def compare(rows: list[dict], job: Job, ceilings: tuple[float, float] | None) -> None:
    """Adds to each row the limit, and the ratios of the step to the limit and to the fastest other trainer."""
    with torch.device("meta"):
        parameters = sum(p.numel() for p in AutoModelForCausalLM.from_config(shape_config(job.shape)).parameters())
    fastest = {}
    for row in rows:
        if row["status"] == "ok" and not ARMS[row["arm"]].variant.is_ours:
            fastest[row["texts"]] = min(row["step_ms"], fastest.get(row["texts"], row["step_ms"]))
    for row in rows:
        if row["status"] != "ok":
            continue
        if row["texts"] in fastest:
            row["to_fastest_peer"] = row["step_ms"] / fastest[row["texts"]]
        if ceilings:
            row["limit_ms"] = limit_ms(parameters, row["tokens"], job.full, *ceilings)
            row["to_limit"] = row["step_ms"] / row["limit_ms"]


def limit_ms(parameters: int, tokens: int, full: bool, flops: float, bytes_per_second: float) -> float:
    """The limit as defined in this module's docstring, at two bytes per weight."""
    products, passes = (6, 10) if full else (4, 2)
    return 1e3 * max(products * parameters * tokens / flops, passes * 2 * parameters / bytes_per_second)


def show(rows: list[dict]) -> None:
    for count in sorted({row["texts"] for row in rows}):
        print(
            f"\n{'':28}{'tokens':>7}{'step ms':>10}{'peak GiB':>10}{'loss':>9}{'error':>9}{'/ peer':>8}{'/ limit':>8}"
        )
        for row in rows:
            if row["texts"] == count:
                print(line(row))


def line(row: dict) -> str:
    if row["status"] != "ok":
        return f"{row['arm']:28}{row.get('tokens', ''):>7}  {row['texts']} texts: {row['status'][:100]}"
    figures = (
        ("tokens", "7"),
        ("step_ms", "10.2f"),
        ("peak_gib", "10.1f"),
        ("loss", "9.4f"),
        ("gradient_error", "9.1e"),
        ("to_fastest_peer", "8.2f"),
        ("to_limit", "8.2f"),
    )
    cells = ((row.get(name), form) for name, form in figures)
    return f"{row['arm']:28}" + "".join(
        f"{'-':>{form.split('.')[0]}}" if value is None else f"{value:>{form}}" for value, form in cells
    )


def record_name(job: Job) -> str:
    shape = [] if job.shape == SHAPES[0] else [job.shape]
    kind = (["full"] if job.full else []) + (["loss-share"] if job.loss_share < 1 else [])
    return "-".join(["peers", *shape, *kind])


if __name__ == "__main__":
    main()
