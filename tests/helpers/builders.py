"""Builds what tests need: a tokenizer, small random models, batches, sentences. Nothing is downloaded."""

import random
import warnings
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate

import torch
from random_texts import words
from small_tokenizer import WORDS, make_tokenizer
from transformers import (
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    BertConfig,
    DistilBertConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    RobertaConfig,
)

from sebp_edge import Personalizer, Recipe
from sebp_edge.engine.memory.shape_reader import read_shape
from sebp_edge.engine.models import adaptation
from sebp_edge.engine.models.adaptation import Adaptation
from sebp_edge.engine.models.catalog import resolve
from sebp_edge.engine.sparse.hoist import Hoisted
from sebp_edge.engine.sparse.rows.schedule import Group, Schedule, shuffled_batches
from sebp_edge.events import silent
from sebp_edge.lessons.split_history import take_fingerprints
from sebp_edge.lessons.splits import draw_splits
from sebp_edge.research import ActiveTokens, RowPlan
from sebp_edge.values.dataset import Dataset
from sebp_edge.values.example import Example
from sebp_edge.values.model_reference import BUNDLED_FOLDER

# The label that torch's losses ignore.
IGNORE = torch.nn.CrossEntropyLoss().ignore_index


@contextmanager
def seeded(seed: int):
    """Context with random numbers of its own."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


# The bundled model's, which is the only one that is rendered in this process, ten times as fast.
QUICK_TEMPLATE = (BUNDLED_FOLDER / "chat_template.jinja").read_text(encoding="utf-8")

SIZES = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 2,
}


def make_llama(**changes) -> LlamaForCausalLM:
    """A random two-layer Llama, the same each time."""
    config = {**SIZES, "bos_token_id": 0, "eos_token_id": 1, "tie_word_embeddings": True}
    with seeded(0):
        return LlamaForCausalLM(LlamaConfig(**(config | changes)))


def checkpoint_activations(model, reentrant: bool) -> None:
    """Makes a model recompute its activations; transformers 5.17 calls it otherwise than 5.23."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": reentrant})


ENCODER_HEADS = {
    "sequence": AutoModelForSequenceClassification,
    "token": AutoModelForTokenClassification,
    "masked": AutoModelForMaskedLM,
}
ENCODER_SIZES = {name: size for name, size in SIZES.items() if name != "num_key_value_heads"}
DISTILBERT_SIZES = {
    "vocab_size": 320,
    "dim": 32,
    "hidden_dim": 48,
    "n_layers": 2,
    "n_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 2,
}


def make_encoder(family: str, head: str, dropout: float = 0.0, **changes) -> PreTrainedModel:
    """A random two-layer BERT, RoBERTa or DistilBERT in training mode, the same each time; `dropout` sets all of it."""
    if family == "distilbert":
        drops = dict.fromkeys(("dropout", "attention_dropout", "seq_classif_dropout"), dropout)
        config = DistilBertConfig(**(DISTILBERT_SIZES | drops | {"num_labels": 3} | changes))
    else:
        drops = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), dropout)
        kind = {"bert": BertConfig, "roberta": RobertaConfig}[family]
        config = kind(**(ENCODER_SIZES | drops | {"type_vocab_size": 2, "num_labels": 3} | changes))
    with seeded(2):
        return ENCODER_HEADS[head].from_config(config).train()


def make_encoder_batch(family: str, head: str, lengths=(9, 1, 16, 7), length: int = 20, seed: int = 0) -> dict:
    """A tokenizer's output for texts of these lengths, padded to `length` on the right, with labels."""
    draw = torch.Generator().manual_seed(seed)
    size = (len(lengths), length)
    mask = torch.arange(length) < torch.tensor(lengths)[:, None]
    labels = torch.randint(0, 2, (size[0],) if head == "sequence" else size, generator=draw)
    if head != "sequence":
        # Padding and every third token have no label.
        labels = labels.masked_fill(~mask | (torch.arange(length) % 3 == 1), IGNORE)
    batch = {
        "input_ids": torch.randint(3, 320, size, generator=draw).masked_fill(~mask, 2),
        "attention_mask": mask.long(),
        "labels": labels,
    }
    types = torch.arange(length) > torch.tensor(lengths)[:, None] // 2
    return batch if family == "distilbert" else batch | {"token_type_ids": types.long() * mask}


def save_model(model, folder, **options):
    """Saves a model with the small tokenizer, as a user would have it; returns the folder."""
    model.save_pretrained(folder, **options)
    make_tokenizer().save_pretrained(folder)
    return folder


def load_base(model, recipe="notes", device="cpu", on_event=silent):
    """The loaded model that calls of a Personalizer share."""
    recipe = recipe if isinstance(recipe, Recipe) else Recipe.load(recipe)
    return Personalizer(model, recipe=recipe, device=device).in_use.load(on_event)


def attach(base, recipe, seed=0) -> Adaptation:
    """Attaches a new adaptation to a loaded model."""
    return adaptation.attach(base, recipe, seed)


@torch.no_grad()
def disturb(adapted: Adaptation, size=0.1) -> Adaptation:
    """Moves each trained weight by a random number of this size, the same each time; returns the adaptation."""
    draw = torch.Generator().manual_seed(1)
    for parameter in adaptation.trainable(adapted):
        parameter += size * torch.randn(parameter.shape, generator=draw).to(parameter)
    return adapted


@contextmanager
def unchanged(model):
    """Context at whose end a model has the same parts, weights and logits, bit for bit."""

    @torch.no_grad()
    def state():
        parts = [(name, type(part), sorted(vars(part))) for name, part in model.named_modules()]
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        return (
            parts,
            {name: each.requires_grad for name, each in tensors.items()},
            [*(each.clone() for each in tensors.values()), model(torch.arange(7, 39)[None]).logits],
        )

    before = state()
    yield
    after = state()
    assert after[:2] == before[:2]
    assert all(map(torch.equal, after[2], before[2]))


class FullAdaptation:
    """An adaptation: a model with all weights trained."""

    def __init__(self, model):
        self.model = model.requires_grad_(True).eval()


def load_adapter(base, folder) -> Adaptation:
    """Loads a saved adapter onto a loaded model."""
    return adaptation.load(base, folder)


def shape_of(model):
    """What is known of a model before it is loaded."""
    return read_shape(resolve(model))


def dequantised_llama(model: LlamaForCausalLM, **changes) -> LlamaForCausalLM:
    """`make_llama(**changes)` with the 4-bit weights of `model`, dequantised to fp32."""
    from bitsandbytes.functional import dequantize_4bit

    twin = make_llama(**changes)
    with torch.no_grad():
        for name, parameter in twin.named_parameters():
            weight = model.get_parameter(name)
            state = getattr(weight, "quant_state", None)
            parameter.copy_(weight if state is None else dequantize_4bit(weight.data, state))
    return twin


def hoist(model, **options) -> Hoisted:
    """Hoists a model that computes the same on active rows, which `Hoisted` of `sebp_edge.research` would try first."""
    return Hoisted(model, **options)


def row_losses(rows, input_ids, plan):
    """The losses of a padded batch's loss rows, from hoisted rows or from the drop-in."""
    if isinstance(rows, Hoisted):
        return rows.row_losses(ActiveTokens.gather(input_ids, plan))
    return rows.row_losses(input_ids, plan)


def batch_losses(rows, batch):
    """The losses of a padded batch's loss rows."""
    return row_losses(rows, batch["input_ids"], RowPlan.from_labels(batch["labels"]))


def make_examples(lengths, prompt=0):
    """Examples of random tokens; the first `prompt` tokens have no loss, but the last one always has."""
    draw = torch.Generator().manual_seed(len(lengths))
    examples = []
    for number, length in enumerate(lengths):
        ids = torch.randint(3, 320, (length,), generator=draw).tolist()
        labels = [IGNORE if position < min(prompt, length - 1) else token for position, token in enumerate(ids)]
        examples.append(Example(ids, labels, number))
    return examples


def dataset_of(examples, context_length=512, left_out=()) -> Dataset:
    """The dataset of these examples, whose documents count as different texts."""
    texts = {number: words(25, number) for number in {example.document for example in examples}}
    fingerprints = take_fingerprints(texts, salt=b"")
    return Dataset(
        examples=examples,
        context_length=context_length,
        num_documents=len(texts),
        left_out=[*left_out],
        draw=draw_splits(fingerprints, seed=0),
    )


def make_sentences(count: int, seed: int = 0, words: int = 24) -> list[str]:
    """Short texts that share a vocabulary and an order of words, so that learning some of them helps with the others.

    Of two words, one always stands before the other where they are neighbours, as mostly in a language.
    """
    order, texts = random.Random(seed), []
    for _ in range(count):
        positions = accumulate(order.randint(1, (len(WORDS) - 1) // 2) for _ in range(words))
        texts.append(" ".join(WORDS[position % len(WORDS)] for position in positions) + ".")
    return texts


def write_notes(folder, texts=None):
    """A folder with a note for each text, of which there are two dozen unless given."""
    folder.mkdir(exist_ok=True)
    for number, text in enumerate(texts or make_sentences(24)):
        (folder / f"note-{number:02}.md").write_text(text, encoding="utf-8")
    return folder


def make_chats(count=20):
    """Chats of a question and an answer."""
    pairs = zip(make_sentences(count), make_sentences(count, seed=1), strict=True)
    return [
        {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
        for question, answer in pairs
    ]


@contextmanager
def gpu_sync_forbidden():
    """Makes every operation on which the host waits for the GPU raise a RuntimeError."""
    with warnings.catch_warnings():
        # torch warns that this mode is a prototype.
        warnings.simplefilter("ignore", UserWarning)
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


def train(trainer, examples, validation):
    """Runs a whole training: prepares the learner for the schedule, then takes its steps."""
    recipe, learner = trainer.recipe, trainer.learner
    batches = shuffled_batches(examples, recipe.batch_tokens, recipe.epochs, seed=0)
    schedule = schedule_of(learner, batches, validation)
    trainer.learner.prepare(schedule)
    return trainer.train(schedule)


def outlined(learner, examples):
    """The outlines of some of the learner's examples."""
    known = learner.row_losses.examples
    return [example.outline(known.index(example)) for example in examples]


def schedule_of(learner, epochs, validation=(), test=(), **options):
    """A schedule of some of the learner's examples."""
    batches = [[outlined(learner, batch) for batch in epoch] for epoch in epochs]
    return Schedule(batches, *(outlined(learner, part) for part in (validation, test)), **options)


def make_step(learner, examples):
    """A step on some of the learner's examples, cut into micro-batches by its current limit."""
    return Group(outlined(learner, examples), learner.limit)


def evaluated(learner, examples):
    """An evaluation of some of the learner's examples, cut in the same way."""
    return Group(outlined(learner, examples), learner.limit, is_evaluated=True)


def limit_rows(learner, max_rows):
    """Limits the learner's micro-batches to `max_rows` rows."""
    learner.limit = replace(learner.limit, max_rows=max_rows)


def gathered(batch) -> ActiveTokens:
    return ActiveTokens.gather(batch["input_ids"], RowPlan.from_labels(batch["labels"]))


def example(length: int, prompt: int = 1, document: int = 0) -> Example:
    """Makes an example of `length` tokens, the first `prompt` without loss."""
    ids = list(range(10, 10 + length))
    return Example(ids, [IGNORE] * prompt + ids[prompt:], document)


def refuse_hoisting(model):
    layer = model.model.layers[1].self_attn
    forward = layer.forward
    layer.forward = lambda *args, **kwargs: forward(*args, **kwargs, s_aux=torch.ones(1))
