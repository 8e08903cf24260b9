"""The 28 configurations: what owners, apps and researchers do on a CPU, each in a few seconds.

A configuration takes a `Recorder`, in whose folder it runs. It uses only the command line and public names.
"""

import threading
from functools import partial

import torch
from materials import chats, questions, sentences, write_notes, write_recipe, write_records
from recorder import ANYWAY

import sebp_edge
from sebp_edge import Personalizer, Recipe
from sebp_edge.ops import AdamW, Moments, adamw_

NOTES = sentences(24)
SHORT = ("--max-tokens", "8", "--json")
CONFIGURATIONS = {}


def configuration(run):
    """Registers a configuration by the name of its function."""
    CONFIGURATIONS[run.__name__] = run
    return run


def adapt_notes(recorder, *options, texts=NOTES, model="llama", **recipe):
    """Runs `adapt` on a folder of notes."""
    write_notes(recorder.folder / "notes", texts)
    write_recipe(recorder.folder / "quick.toml", **recipe)
    adapt_again(recorder, *options, model=model)


def _adapt(options, keywords, recorder):
    adapt_notes(recorder, *options, **keywords)


def adapt_again(recorder, *options, model="llama"):
    """Runs `adapt` on the notes as they are now, with the recipe as it is now."""
    recorder.command("adapt", "notes", "--model", recorder.model(model), "--recipe", "quick.toml", *options, "--json")


READING = {"r": 8, "epochs": 1, "learning_rate": 1e-2, "min_steps": 8, "batch_rows": 1024, "batch_tokens": 4096}
READING |= {"context_length": 512, "chat_template": True, "questions": "practice", "general": 0.05}
IN_FOLDS = {"weight_decay": 0.1, "warmup_ratio": 0.3, "max_grad_norm": 0.1, "patience": 2}
ALL_WEIGHTS = {"r": None, "method": "full", "learning_rate": 3e-3}
LONG = {"batch_tokens": 9000, "context_length": 256, "epochs": 2}
# Adaptations alone: their options, and the keywords of `adapt_notes`.
ADAPTATIONS = {
    "few_documents_in_folds": ([], {"texts": sentences(9, words=50), **IN_FOLDS}),
    "no_refit": (["--seed", "3"], {"refit": False}),
    "early_stopping": ([ANYWAY], {"learning_rate": 0.5, "epochs": 8}),
    "many_micro_batches": ([], {"texts": sentences(80, words=120, seed=5), **LONG}),
    "model_in_bfloat16": ([], {"model": "bfloat16"}),
    "qwen3": ([], {"model": "qwen3"}),
    "gemma3": ([], {"model": "gemma3", "context_length": 37}),
    "padded_batches": ([], {"texts": NOTES[:12], "model": "padded", "epochs": 1, "context_length": 48}),
    "four_bits": (["--4bit"], {"model": "wide"}),
}
for name, (options, keywords) in ADAPTATIONS.items():
    CONFIGURATIONS[name] = partial(_adapt, options, keywords)


@configuration
def reading(recorder):
    write_recipe(recorder.folder / "quick.toml", **READING)
    model = recorder.model("wide")
    recorder.command("adapt", "--model", model, "--recipe", "quick.toml", "--keep-samples", "--json")


@configuration
def notes_with_tiny(recorder):
    write_notes(recorder.folder / "notes", sentences(10, words=40))
    recorder.command("adapt", "notes", "--epochs", "1", "--context", "64", "--json")


@configuration
def chats_with_tiny(recorder):
    write_records(recorder.folder / "chats.jsonl", chats(16))
    recorder.command(
        "adapt", "chats.jsonl", "--recipe", "chat", "--epochs", "1", "--context", "96", "--name", "my chats", "--json"
    )


@configuration
def prompts(recorder):
    write_records(recorder.folder / "questions.jsonl", questions(24))
    write_recipe(recorder.folder / "quick.toml", chat_template=True)
    recorder.command("adapt", "questions.jsonl", "--model", recorder.model("llama"), "--recipe", "quick.toml", "--json")
    recorder.command("generate", "the ferry left", "--seed", "3", *SHORT)


@configuration
def learning_on(recorder):
    adapt_notes(recorder)
    changed = NOTES[4].replace("ferry", "train").replace("bread", "cake")
    write_notes(recorder.folder / "notes", [*NOTES[:4], changed, *NOTES[5:], *sentences(4, seed=7)])
    (recorder.folder / "notes" / "note-01.md").unlink()
    adapt_again(recorder, ANYWAY)
    adapt_again(recorder)  # with nothing new


@configuration
def fresh_and_sync(recorder):
    adapt_notes(recorder)
    adapt_again(recorder, "--fresh")
    (recorder.folder / "notes" / "note-01.md").unlink()
    adapt_again(recorder, "--sync")


@configuration
def name_in_use(recorder):
    adapt_notes(recorder)
    write_notes(recorder.folder / "notes", sentences(24, seed=9))
    write_recipe(recorder.folder / "quick.toml", lora_alpha=16)
    recorder.command("inspect", "notes", "--model", recorder.model("llama"), "--recipe", "quick.toml", "--json")
    adapt_again(recorder, "--seed", "4")


@configuration
def forget(recorder):
    adapt_notes(recorder)
    recorder.command("forget", "notes/note-03.md", "notes/note-04.md", "--yes", "--json")


@configuration
def versions(recorder):
    adapt_notes(recorder, ANYWAY)
    adapt_again(recorder, "--fresh", "--seed", "1", ANYWAY)
    adapt_again(recorder, "--fresh", "--seed", "2", ANYWAY)
    for arguments in (
        ("list",),
        ("show", "default"),
        ("diff", "default", "--json"),
        ("rollback", "default"),
        ("activate", "default", "3"),
        ("rename", "default", "my notes"),
        ("export", "my notes", "--to", "moved.tar", "--names"),
        ("import", "moved.tar", "--name", "copy", "--json"),
        ("remove", "my notes", "--version", "2", "--yes", "--json"),
        ("gc", "--keep", "1", "--yes", "--json"),
        ("rollback", "copy"),
    ):
        recorder.command("adapters", *arguments)


@configuration
def out_folder(recorder):
    adapt_notes(recorder, "--out", "mine")
    recorder.command("generate", "the wind", "--adapter", "mine", "--seed", "0", *SHORT)
    recorder.command("adapters", "report", "./mine", "--json")


@configuration
def kept_samples(recorder):
    adapt_notes(recorder, "--keep-samples")
    recorder.command("adapters", "report", "default", "--with-samples", "--to", "page.html", "--json")
    recorder.command("adapters", "report", "default", "--to", "page-without-samples.html")


@configuration
def all_weights(recorder):
    adapt_notes(recorder, **ALL_WEIGHTS)
    recorder.command("export", "default", "--to", "merged", "--format", "merged", "--json")


@configuration
def memory_budgets(recorder):
    """Which options a plan for this machine chooses depends on its memory; those for absent GPUs do not."""
    adapt_notes(recorder, "--memory", "64GB")
    for arguments in (
        ("--gpu", "0.9GB", "--context", "256"),
        ("--gpu", "1GB", "--context", "256"),
        ("--gpu", "8GB", "--model", "llama-3.2-3b"),
        ("--gpu", "4GB", "--model", "llama-3.2-3b"),
        ("--gpu", "5GB", "--model", "qwen3-0.6b", "--recipe", "full"),
    ):
        recorder.command("plan", "notes", *arguments, "--json")


@configuration
def refused(recorder):
    adapt_notes(recorder, learning_rate=1e-9, epochs=1)  # no gain
    adapt_notes(recorder, "--name", "few", texts=NOTES[:4], epochs=1)  # not judged
    recorder.command("adapt", "notes", "--name", "a/b", "--json")
    recorder.command("adapt", "nowhere", "--json")
    recorder.command("adapt", "notes", "--recipe", "nots", "--json")
    recorder.command("adapt", "notes", "--memory", "1MB", "--name", "other", "--json")
    recorder.command("adapters", "show", "nobody", "--json")


@configuration
def exports(recorder):
    adapt_notes(recorder, model="wide")
    for options in (
        ("gguf", "--quant", "f16"),
        ("ollama", "--quant", "q8_0"),
        ("merged",),
        ("peft",),
        ("gguf-lora",),
        ("mlx",),
    ):
        recorder.command("export", "default", "--to", f"to-{options[0]}", "--format", *options, "--json")


@configuration
def looking_and_measuring(recorder):
    write_notes(recorder.folder / "notes", [*NOTES, NOTES[3] + " Later more."])
    write_recipe(recorder.folder / "quick.toml")
    options = ("notes", "--model", recorder.model("llama"), "--recipe", "quick.toml")
    recorder.command("inspect", *options, "--json")
    recorder.command("inspect", *options)
    recorder.command("analyze", *options, "--examples", "3", "--html", "page.html", "--json")
    recorder.command("analyze", "notes", "--model", recorder.model("bert"), "--html", "encoder.html", "--json")


@configuration
def in_an_app(recorder):
    """A stop within a training, then samples of the best state, the base model and a chat."""
    events, stop = [], threading.Event()

    def sink(event):
        events.append(event.to_dict())
        if event.event == "evaluated" and sum(each["event"] == "evaluated" for each in events) == 3:
            stop.set()

    store = recorder.folder / "data" / "sebp-edge"
    recipe = Recipe.load("notes").replace(**{"r": 4, "learning_rate": 2e-2, "epochs": 6, "context_length": 64})
    app = Personalizer(recorder.model("llama"), recipe=recipe, device="cpu", store=store, seed=5, on_event=sink)
    try:
        app.adapt([*NOTES, questions(3)[0], chats(1)[0]], name="app", stop_when=stop)
    except sebp_edge.SebpEdgeError as error:
        recorder.message("stopped", f"{type(error).__name__}: {error}")
    recorder.json_lines("events of adapt", events)
    chat = [{"role": "system", "content": "the map"}, {"role": "user", "content": "the ferry left"}]
    sampling = {"seed": 1, "max_new_tokens": 12}
    texts = [
        app.generate("the ferry left", adapter="app", version=1, **sampling),
        app.generate("the ferry left", adapter=None, temperature=0, **sampling),
        app.generate(chat, top_k=5, top_p=0.5, repetition_penalty=1.2, stop=["."], **sampling),
    ]
    recorder.json_lines("generated", [{"event": "generated", "text": text} for text in texts])


@configuration
def drop_in(recorder):
    """A researcher's own training loop: with activation checkpoints, and 8-bit moments for one weight."""
    from transformers import AutoModelForCausalLM

    model, losses = AutoModelForCausalLM.from_pretrained(recorder.model("qwen3"), dtype=torch.float32), []
    # transformers 5.23 renamed it.
    (getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable)()
    weights = dict(model.named_parameters())
    in_8_bits = weights.pop("model.layers.0.mlp.up_proj.weight")
    optimizer = torch.optim.AdamW(weights.values(), lr=1e-3)
    ours, moments = AdamW.on(torch.device("cpu")), Moments.of(in_8_bits, in_8_bits=True)
    draw = torch.Generator().manual_seed(0)
    with sebp_edge.sparsify(model):
        for length in (20, 31, 31, 8):
            ids = torch.randint(3, 320, (4, length), generator=draw)
            kept = torch.arange(length) < torch.tensor([length, 3, length // 2, 5])[:, None]
            labels = ids.masked_fill(~kept | (torch.arange(length) < 2), -100)
            loss = model(input_ids=ids, attention_mask=kept.long(), labels=labels).loss
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            ours.begin_step(1e-3)
            with torch.no_grad():
                adamw_(in_8_bits, in_8_bits.grad, moments, ours, seed=length)
            model.zero_grad()
    recorder.json_lines("steps", [{"event": "step", "loss": loss} for loss in losses])
    recorder.tensors("weights", dict(model.named_parameters()))
