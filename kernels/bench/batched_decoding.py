"""Times greedy answers to questions about notes: `Answerer` beside transformers' `generate`, alone and in batches.

    python kernels/bench/batched_decoding.py [--model FOLDER] [--notes 20] [--questions 8] [--max-new-tokens 32]
                                             [--rounds 5] [--device cpu] [--record [FILE]]

Each prompt is an invented person's note followed by one of the same questions. "Alone" is one prompt at a time;
"padded" is in batches of as many prompts as `Answerer` takes, sorted by length and padded on the left. In fp32 all must
give the same tokens, or nothing is measured. Times are medians of rounds in which the three take turns; "equal" is the
share of prompts with the same tokens as alone, in the dtype that the model is loaded in.

Predicted for SmolLM2-135M before the first run. One CPU thread, fp32: a product with 64 rows does about 15 times the
work per second of one with a single row, and 7 of 8 notes need no pass, so 6 times as fast as alone; beside padded
batches 1.5 times, from the notes and from caches that are not copied. H200, bf16: steps of any batch take the same
time, so 60 times from 64 rows, and graphs take 4 times less per step than launches, so 200 and 4 times.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from transformers import GenerationConfig

import evidence
import know_people
from sebp_edge import Recipe
from sebp_edge.machine.devices import pick_device, synchronize
from sebp_edge.models.answering import MAX_ROWS, Answerer
from sebp_edge.models.catalog import resolve
from sebp_edge.models.generation import end_ids_of, only_config
from sebp_edge.models.loading import BaseModel, load_base_model
from sebp_edge.questions.asking import end_ids, prompt_for

SOURCES = (
    "sebp_edge/models",
    "sebp_edge/questions/asking.py",
    know_people.TUNING,
    know_people.__file__,
    __file__,
)
QUESTIONS = (
    "What is this note about?",
    "Which names are in it?",
    "Is there a date, and which one?",
    "What should I do next?",
    "How much does it cost?",
    "Where does it take place?",
    "Who is waiting for whom?",
    "Can you sum it up in one sentence?",
)
COLUMNS = {"new_tokens": "d", "seconds": ".3f", "tokens_per_second": ".1f", "times_alone": ".2f", "equal": ".1%"}

Prompts = list[list[int]]
Method = Callable[[BaseModel, Prompts, int], Prompts]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--notes", type=int, default=20)
    parser.add_argument("--questions", type=int, default=8, choices=range(1, len(QUESTIONS) + 1))
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device")
    evidence.add_record_option(parser)
    options = parser.parse_args(arguments)
    base = load_base_model(resolve(options.model), Recipe.load("notes"), pick_device(options.device))
    prompts = make_prompts(base, options.notes, options.questions)
    check(base, prompts, options.max_new_tokens)
    rows = measure(base, prompts, options.max_new_tokens, options.rounds)
    print(f"{len(prompts)} prompts of {min(map(len, prompts))} to {max(map(len, prompts))} tokens, {base.dtype}")
    print(f"{'':10}", *(f"{name:>18}" for name in COLUMNS))
    for row in rows:
        print(f"{row['method']:10}", *(f"{row[column]:>18{form}}" for column, form in COLUMNS.items()))
    if options.record:
        on_cpu = base.device.type == "cpu"
        name = f"batched-decoding-{'cpu' if on_cpu else 'gpu'}"
        evidence.record(name, SOURCES, rows, options.record, on_cpu)


def make_prompts(base: BaseModel, notes: int, questions: int) -> Prompts:
    """Every question about every note, as the model is asked."""
    texts = [note.text for note in know_people.person(0, notes).notes]
    asked = [prompt_for(question, base.tokenizer, text) for text in texts for question in QUESTIONS[:questions]]
    return [list(prompt.input_ids) for prompt in asked]


def check(base: BaseModel, prompts: Prompts, max_new_tokens: int) -> None:
    """Stops if the methods give different tokens in fp32."""
    # Buffers stay as they are: those of rotary embeddings are in fp32 beside weights in bf16.
    weights = {parameter: parameter.data for parameter in base.model.parameters()}
    try:
        for parameter, data in weights.items():
            parameter.data = data.float()
        expected, *others = (method(base, prompts, max_new_tokens) for method in METHODS.values())
    finally:
        for parameter, data in weights.items():
            parameter.data = data
    for name, found in zip(list(METHODS)[1:], others, strict=True):
        if found != expected:
            raise SystemExit(f"In fp32, {name} gives other tokens for {1 - share(found, expected):.1%} of the prompts.")


def measure(base: BaseModel, prompts: Prompts, max_new_tokens: int, rounds: int) -> list[dict]:
    """One row per method, from rounds in which they take turns."""
    replies: dict[str, Prompts] = {}
    seconds = {name: [] for name in METHODS}
    for _ in range(rounds):
        for name, method in METHODS.items():
            synchronize(base.device)
            begin = time.perf_counter()
            replies[name] = method(base, prompts, max_new_tokens)
            synchronize(base.device)
            seconds[name].append(time.perf_counter() - begin)
    rows = []
    for name, found in replies.items():
        median, new_tokens = statistics.median(seconds[name]), sum(map(len, found))
        rows.append(
            {
                "model": base.reference.name,
                "dtype": str(base.dtype).removeprefix("torch."),
                "prompts": len(prompts),
                "prompt_tokens": sum(map(len, prompts)),
                "method": name,
                "new_tokens": new_tokens,
                "seconds": round(median, 4),
                "fastest": round(min(seconds[name]), 4),
                "slowest": round(max(seconds[name]), 4),
                "tokens_per_second": round(new_tokens / median, 2),
                "times_alone": round(statistics.median(seconds["alone"]) / median, 3),
                "equal": share(found, replies["alone"]),
            }
        )
    return rows


def share(found: Prompts, expected: Prompts) -> float:
    return sum(one == other for one, other in zip(found, expected, strict=True)) / len(expected)


def alone(base: BaseModel, prompts: Prompts, max_new_tokens: int) -> Prompts:
    return [reply for prompt in prompts for reply in generate(base, [prompt], max_new_tokens)]


def padded(base: BaseModel, prompts: Prompts, max_new_tokens: int) -> Prompts:
    order = sorted(range(len(prompts)), key=lambda number: -len(prompts[number]))
    found = {}
    for begin in range(0, len(order), MAX_ROWS):
        batch = order[begin : begin + MAX_ROWS]
        replies = generate(base, [prompts[number] for number in batch], max_new_tokens)
        found |= zip(batch, replies, strict=True)
    return [found[number] for number in range(len(prompts))]


@torch.no_grad()
def generate(base: BaseModel, prompts: Prompts, max_new_tokens: int) -> Prompts:
    """The new tokens of prompts that are padded on the left, by transformers."""
    longest, ends = max(map(len, prompts)), all_ends(base)
    ids = torch.tensor([[base.pad_token_id] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    config = GenerationConfig(
        do_sample=False, max_new_tokens=max_new_tokens, eos_token_id=ends or None, pad_token_id=base.pad_token_id
    )
    with only_config(config, base.model):
        new = base.model.generate(ids.to(base.device), attention_mask=mask.to(base.device), generation_config=config)
    replies = new[:, longest:].tolist()
    return [reply[: next((at for at, token in enumerate(reply) if token in ends), None)] for reply in replies]


def together(base: BaseModel, prompts: Prompts, max_new_tokens: int) -> Prompts:
    """The new tokens by a new `Answerer`, as after each change of an adapter; graphs are captured anew."""
    return Answerer(base.model, end_ids(base.tokenizer), base.pad_token_id).answer(prompts, max_new_tokens)


def all_ends(base: BaseModel) -> list[int]:
    return sorted({*end_ids(base.tokenizer), *end_ids_of(base.model)})


METHODS: dict[str, Method] = {"alone": alone, "padded": padded, "together": together}


if __name__ == "__main__":
    main()
