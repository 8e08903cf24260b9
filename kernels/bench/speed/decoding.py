"""Times generation beside transformers' `generate` and llama.cpp: tokens per second, and the time to the first token.

    python kernels/bench/speed/decoding.py [MODEL...] [--device DEVICE] [--runs 5] [--record [FILE]]

MODEL is a folder, or a name of the catalog, which stands for random weights of that model's shape. All take the
likeliest token each time, one text alone, and alternate within each run, so that ratios also hold on a busy machine.
On a GPU weights are bf16. On the CPU all compute in fp32 with the same number of threads; one more row is the same
model in bf16. llama.cpp runs on a file of the same weights, if xllamacpp is installed; it returns no tokens. "kept" has
all but the last 50 of 400 tokens from the call before. "ghost text" is the first token of `complete_text` after 200
tokens of the sample notes; "kept" has them from the call before, but for the last word.
"""

import copy
import math
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, StoppingCriteria, StoppingCriteriaList

sys.path.append(str(Path(__file__).parents[1]))

import evidence
from models import known_config
from sebp_edge.engine.models.catalog import resolve
from sebp_edge.engine.models.completion import complete_text
from sebp_edge.engine.models.decoding import Decoder
from sebp_edge.engine.models.gguf.writer import GgufModel
from sebp_edge.engine.models.loading import local_tokenizer
from sebp_edge.engine.models.sampling import Sampling
from sebp_edge.engine.models.vocabulary import Vocabulary
from sebp_edge.export.gguf_file import write_model
from sebp_edge.export.gguf_tokenizer import GgufTokenizer
from sebp_edge.export.model_weights import MergedWeights
from sebp_edge.lessons.prompts import encode_texts

SOURCES = ("sebp_edge/engine/models", "sebp_edge/lessons/prompts.py", __file__)
SHORT, LONG, REST, NEW, CONTEXT = 32, 400, 50, 32, 200

# Takes a prompt and a number of new tokens; returns these, and when each was there, in seconds since the call began.
Write = Callable[[list[int], int], tuple[list[int], list[float]]]


def main() -> None:
    parser = evidence.parser(__doc__)
    parser.add_argument("models", nargs="*", default=["smollm2-135m"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    device = torch.device(options.device)
    rows = [row for model in options.models for row in measure(model, device, options.runs)]
    evidence.record(f"decoding-{device.type}", SOURCES, rows, options.record, on_cpu=device.type == "cpu")


def measure(name: str, device: torch.device, runs: int) -> Iterator[dict]:
    """Yields a row for each way to generate."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if Path(name).is_dir():
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype).to(device).eval()
    else:
        with device:
            model = AutoModelForCausalLM.from_config(known_config(name), dtype=dtype).eval()
    with ExitStack() as stack:
        kept = Decoder(model, keeps=True)
        ways: dict[str, Write] = {
            "sebp-edge": lambda prompt, new: with_ours(forgetting(kept), prompt, new),
            "transformers": lambda prompt, new: with_transformers(model, prompt, new),
        }
        dtypes = dict.fromkeys((*ways, "llama.cpp"), dtype)
        if device.type == "cpu":
            half = Decoder(copy.deepcopy(model).bfloat16(), keeps=True)
            ways["sebp-edge in bf16"] = lambda prompt, new: with_ours(forgetting(half), prompt, new)
            dtypes["sebp-edge in bf16"] = torch.bfloat16
        if device.type == "cpu" and find_spec("xllamacpp"):
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            ways["llama.cpp"] = llama_cpp(folder, name, model)
        draw = random.Random(0)
        for write in ways.values():  # captures graphs
            write(tokens(draw, model, LONG), NEW)
        seconds = {way: {"each": [], "first": [], "kept": []} for way in ways}
        agree = dict.fromkeys(ways, 0)
        for _ in range(runs):
            short, common = tokens(draw, model, SHORT), tokens(draw, model, LONG - REST)
            first, second = (common + tokens(draw, model, REST) for _ in range(2))
            found = {}
            for way, write in ways.items():
                found[way], times = write(short, NEW)
                seconds[way]["each"].append((times[-1] - times[0]) / (len(times) - 1))
                seconds[way]["first"].append(write(first, 2)[1][0])
            with_ours(kept, first, 2)
            seconds["sebp-edge"]["kept"].append(with_ours(kept, second, 2)[1][0])
            for way in ways:
                agree[way] += found[way] == found["transformers"]
        dtypes["ghost text"], agree["ghost text"], found["ghost text"] = dtype, 0, []
        seconds["ghost text"] = {"each": [math.nan], **ghost_text(kept, name, runs)}
        for way, times in seconds.items():
            row = {"model": Path(name).name, "way": way, "dtype": str(dtypes[way]).removeprefix("torch.")}
            row |= {"tokens_per_second": 1 / median(times["each"]), "fastest": 1 / min(times["each"])}
            row |= {"first_token": median(times["first"]), "first_token_kept": median(times["kept"] or times["first"])}
            ratios = [one / ours for one, ours in zip(times["each"], seconds["sebp-edge"]["each"], strict=False)]
            row |= {
                "sebp_edge_is_times_as_fast": median(ratios),
                "same_texts": agree[way] / runs if found[way] else None,
            }
            yield evidence.show(row)


def tokens(draw: random.Random, model, length: int) -> list[int]:
    """Random tokens, none of them special."""
    return [draw.randrange(100, model.config.vocab_size) for _ in range(length)]


def forgetting(decoder: Decoder) -> Decoder:
    """The decoder without what its last prompt began with; its graphs stay."""
    decoder._kept = []
    return decoder


def with_ours(decoder: Decoder, prompt: list[int], new: int) -> tuple[list[int], list[float]]:
    times, decoder._model.generation_config.eos_token_id = [], None
    begin = time.perf_counter()
    (found,) = decoder.decode(
        [prompt], [], Sampling(new, temperature=0), on_token=lambda *_: times.append(time.perf_counter() - begin)
    )
    return found, times


def ghost_text(decoder: Decoder, name: str, runs: int) -> dict[str, list[float]]:
    """Times a completion after a text, and the next one, when a word has been typed."""
    tokenizer = local_tokenizer(resolve(name if Path(name).is_dir() else "tiny"))
    vocabulary = Vocabulary(tokenizer, decoder._model.config.vocab_size)
    encode = partial(encode_texts, tokenizer=tokenizer)
    notes = sorted(Path(__file__).parents[3].joinpath("examples/notes").rglob("*.md"))
    words, seconds = " ".join(note.read_text() for note in notes).split(" "), {"first": [], "kept": []}

    for run in range(-1, runs):  # captures graphs
        begin, end = 20 * (run + 1), 20 * (run + 1) + 20
        while len(encode([" ".join(words[begin:end])])[0]) < CONTEXT:
            end += 1
        forgetting(decoder)
        for kind, last in (("first", end), ("kept", end + 1)):
            started = time.perf_counter()
            complete_text(decoder, vocabulary, encode, " ".join(words[begin:last]), 1, 0.0)
            seconds[kind] += [time.perf_counter() - started] * (run >= 0)
    return seconds


class _Clock(StoppingCriteria):
    def __init__(self):
        self.times = []

    def __call__(self, input_ids, scores, **options):
        input_ids[0, -1].item()  # waits for a GPU, as a stream of text does
        self.times.append(time.perf_counter())
        return torch.zeros(1, dtype=torch.bool, device=input_ids.device)


def with_transformers(model, prompt: list[int], new: int) -> tuple[list[int], list[float]]:
    ids, clock = torch.tensor([prompt], device=model.device), _Clock()
    model.generation_config = GenerationConfig(do_sample=False, max_new_tokens=new, pad_token_id=0)
    begin = time.perf_counter()
    found = model.generate(ids, attention_mask=torch.ones_like(ids), stopping_criteria=StoppingCriteriaList([clock]))
    return found[0, len(prompt) :].tolist(), [at - begin for at in clock.times]


def llama_cpp(folder: Path, name: str, model) -> Write:
    """llama.cpp on a file of the model's weights in fp32."""
    import xllamacpp

    source = Path(name)
    if not source.is_dir():
        source = folder / "model"
        model.save_pretrained(source)
    tokenizer = local_tokenizer(resolve(name if Path(name).is_dir() else "tiny"))
    weights, file = MergedWeights(model, source, None), folder / "model.gguf"
    gguf = GgufModel(model.config)
    kind = GgufTokenizer(tokenizer, model.config.vocab_size, gguf.arch)
    write_model(file, "model", gguf, kind, weights, "f32", lambda *_: None)
    options = xllamacpp.CommonParams()
    options.model.path = str(file)
    options.n_ctx, options.n_parallel, options.n_gpu_layers, options.verbosity = LONG + NEW + 16, 1, 0, 0
    options.fit_params = False
    options.cache_type_k = options.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    options.cpuparams.n_threads = options.cpuparams_batch.n_threads = torch.get_num_threads()
    server = xllamacpp.Server(options)

    def write(prompt: list[int], new: int) -> tuple[list[int], list[float]]:
        asked = {"prompt": prompt, "n_predict": new, "temperature": 0, "cache_prompt": False, "ignore_eos": True}
        timings = server.handle_completions(asked)["timings"]
        if timings["predicted_n"] != new:
            raise RuntimeError(f"llama.cpp wrote {timings['predicted_n']} of {new} tokens.")
        first, rest = timings["prompt_ms"] / 1000, timings["predicted_ms"] / 1000
        return [], [first + rest * number / (new - 1) for number in range(new)]

    return write


if __name__ == "__main__":
    main()
