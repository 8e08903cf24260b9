"""Measures how many keystrokes ghost text saves in held-out notes, and how often what it shows is right.

    python kernels/bench/quality/keystrokes.py FOLDER... [--model smollm2-135m-instruct] [--notes 12]
                                               [--characters 1000] [--complete 0] [--device cpu] [--record [FILE]]

Of each folder (one author), half of --notes random notes are for validation, half held out; each is cut to its first
--characters. They are typed with the base model at several thresholds, from one pass (`engine/training/keystrokes.py`).
With --complete, so many characters of the last note are also typed with `complete` itself, key by key.
"""

import sys
import time
from functools import partial
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

import torch

import evidence
from quality.notes_quality import notes
from sebp_edge import Recipe
from sebp_edge.engine.models.catalog import resolve
from sebp_edge.engine.models.completion import complete_text
from sebp_edge.engine.models.decoding import Decoder
from sebp_edge.engine.models.loading import load_base_model
from sebp_edge.engine.models.vocabulary import goes_on
from sebp_edge.engine.training.keystrokes import MIN_PROBABILITY, Keystrokes, type_tokens
from sebp_edge.engine.training.words import WordReader
from sebp_edge.lessons.examples import encode
from sebp_edge.lessons.prompts import encode_texts
from sebp_edge.machine.devices import pick_device
from sebp_edge.values.documents import Document

SOURCES = (*evidence.OPS, "sebp_edge/engine", "sebp_edge/lessons/examples.py", __file__)
THRESHOLDS = sorted({0.4, 0.5, 0.55, 0.6, 0.7, MIN_PROBABILITY})


def main(arguments: list[str] | None = None) -> None:
    parser = evidence.parser(__doc__)
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--notes", type=int, default=12)
    parser.add_argument("--characters", type=int, default=1000)
    parser.add_argument("--complete", type=int, default=0)
    parser.add_argument("--device")
    options = parser.parse_args(arguments)
    device = pick_device(options.device)
    base = load_base_model(resolve(options.model), Recipe.load("notes"), device)
    reader, records = WordReader(base.vocabulary, device), []
    for folder in options.folders:
        texts = [path.read_text(errors="ignore").strip() for path in notes(folder, options.notes, 0)]
        texts = [text[: options.characters] for text in texts]
        about = {"model": Path(options.model).name, "texts": folder.name}
        if options.complete:
            records.append(evidence.show(about | compare(base, reader, texts[-1][: options.complete])))
            continue
        passes = [read(base, reader, text) for text in texts]
        for threshold in THRESHOLDS:
            found = [type_tokens(tokens, threshold) for tokens, *_ in passes]
            half = len(found) // 2
            validation, test = (Keystrokes(*map(sum, zip(*part, strict=True))) for part in (found[:half], found[half:]))
            characters = sum(map(len, texts[half:]))
            figures = {
                "min_probability": threshold,
                "validation_right": validation.right / validation.shown,
                "right": test.right / test.shown,
                "shown": test.shown / characters,
                "saved": test.saved / characters,
                "reading": sum(each[2] for each in passes) / sum(each[1] for each in passes),
            }
            records.append(evidence.show(about | figures))
    name = "keystrokes-complete" if options.complete else "keystrokes"
    evidence.record(name, SOURCES, records, options.record, device.type == "cpu")


@torch.no_grad()
def read(base, reader: WordReader, text: str) -> tuple[list, float, float]:
    """The typed tokens of a text; the CPU's seconds for its losses, and those for what is read instead of these."""
    (example,), _ = encode([Document("", text)], base.tokenizer, base.model.config.max_position_embeddings)
    ids_BT = torch.tensor([list(example.input_ids)], device=base.device)
    targets_C, start = ids_BT[0, 1:], time.process_time()
    logits_CV = base.model(ids_BT).logits[0, :-1].float()
    passed = time.process_time()
    torch.nn.functional.cross_entropy(logits_CV, targets_C, reduction="none")
    lost = time.process_time()
    rows = reader.read([logits_CV], targets_C)
    tokens = [reader.typed(*each) for each in zip(example.labels[1:], rows.tolist(), strict=True)]
    type_tokens(tokens)
    return tokens, lost - start, time.process_time() - lost - (lost - passed)


def compare(base, reader: WordReader, text: str) -> dict:
    """What is saved and shown if a text is typed from one pass, and if `complete` is asked after each key."""
    encoded = partial(encode_texts, tokenizer=base.tokenizer)
    complete = partial(complete_text, Decoder(base.model), base.vocabulary, encoded)
    start = time.process_time()
    own, before, at = Keystrokes(), (0, ""), 1
    while at <= len(text):
        words, ends = complete(text[:at], 16, MIN_PROBABILITY).words, []
        shown = "".join(words)
        for word in words:
            end = (ends[-1] if ends else at) + len(word)
            if not text.startswith(word, end - len(word)) or (end < len(text) and goes_on(word[-1], text[end])):
                break
            ends.append(end)
        is_new = shown != "" and shown != before[1][max(0, at - before[0]) :]
        gains = [(end - at - keys, end) for keys, end in enumerate(ends, 1)]
        if ends and len(ends) == len(words):
            gains.append((ends[-1] - at - 1, ends[-1]))
        more, end = max(gains, default=(0, at))
        own = Keystrokes(own.saved + max(0, more), own.shown + is_new, own.right + (is_new and bool(ends)))
        before, at = (at, shown), end if more > 0 else at + 1
    seconds = time.process_time() - start
    tokens, own_pass, reading = read(base, reader, text)
    found = type_tokens(tokens)
    both = {"complete": own, "one_pass": found}
    figures = {f"{name}_{key}": value for name, each in both.items() for key, value in each._asdict().items()}
    return {"characters": len(text), **figures, "complete_seconds": seconds, "one_pass_seconds": own_pass + reading}


if __name__ == "__main__":
    main()
