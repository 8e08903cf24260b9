"""What `nm_quality` trains: four models, each with its texts or images, steps and learning rate.

    digits    a ViT from random weights, on the images of scikit-learn's digits: classes
    tiny      the bundled model's shape from random weights, on its corpus: next tokens
    sst2      a pretrained encoder with a new head, on SST-2: classes
    notes     a pretrained decoder, on paragraphs of notes: next tokens

Pruned are the feed-forward layers, as in the paper. BERT's names do not tell them from the attention's output, so all
linear layers but the classifier are pruned there. A setting is given to other processes, so it holds no model.
"""

import gzip
import lzma
import random
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    ViTConfig,
    ViTForImageClassification,
)

from glue_texts import Labelled, read_task
from sebp_edge.models.catalog import resolve
from sebp_edge.sparsity import METHODS
from sebp_edge.texts.batches import Collator
from sebp_edge.texts.documents import Document
from sebp_edge.texts.examples import Example, encode
from sebp_edge.texts.readers import read_texts

PATTERNS = ("2:4", "1:4", "1:8", "1:16", "1:32")
# SR-STE with its term in the gradient that Adam normalises, as in the code published with the paper.
COUPLED = "sr-ste, coupled"

Batch = dict[str, Tensor]


class Setting(ABC):
    """A model and what it learns.

    Attributes:
        name: as on the command line.
        layers: the last parts of the names of the layers to prune.
        learning_rate: the highest; the same for all methods.
        heldout: the batches that a trained model is evaluated on.
    """

    name: str
    layers: tuple[str, ...]
    patterns: tuple[str, ...] = PATTERNS
    methods: tuple[str, ...] = (METHODS[0], COUPLED, *METHODS[1:])
    num_steps: int
    batch_size: int
    learning_rate: float
    heldout: list[Batch]

    @abstractmethod
    def new_model(self) -> nn.Module:
        """Returns a new model in fp32; torch's random state sets its random weights."""

    @abstractmethod
    def batches(self, number: int, seed: int) -> Iterator[Batch]:
        """Yields a number of random batches."""


class Digits(Setting):
    """The file is `sklearn/datasets/data/digits.csv.gz` of scikit-learn: 1,797 images of 8 x 8 pixels."""

    name, layers = "digits", ("fc1", "fc2")
    num_steps, batch_size, learning_rate = 800, 64, 1e-3
    # Groups of up to 128 fit into the width, so sdgf-geometric has no 1:32.
    width, depth, heads = 128, 4, 4
    num_heldout = 360

    def __init__(self, data: list[Path], model: str | None = None):
        (file,) = data
        with gzip.open(file) as table:
            rows = np.loadtxt(table, delimiter=",", dtype=np.float32)
        order = torch.from_numpy(np.random.RandomState(0).permutation(len(rows)))
        images, labels = torch.from_numpy(rows[:, :-1]).view(-1, 1, 8, 8) / 8 - 1, torch.from_numpy(rows[:, -1]).long()
        heldout, train = order[: self.num_heldout], order[self.num_heldout :]
        self._images, self._labels = images[train], labels[train]
        self.heldout = [{"pixel_values": images[heldout], "labels": labels[heldout]}]

    def new_model(self) -> nn.Module:
        return ViTForImageClassification(
            ViTConfig(
                image_size=8,
                patch_size=2,
                num_channels=1,
                num_labels=10,
                hidden_size=self.width,
                intermediate_size=4 * self.width,
                num_hidden_layers=self.depth,
                num_attention_heads=self.heads,
            )
        )

    def batches(self, number: int, seed: int) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(number):
            chosen = torch.randint(len(self._labels), (self.batch_size,), generator=generator)
            yield {"pixel_values": self._images[chosen], "labels": self._labels[chosen]}


class Corpus(Setting):
    """The folder has the `*.txt.xz` files that `examples/train_tiny.py` reads."""

    name, layers = "tiny", ("gate_proj", "up_proj", "down_proj")
    num_steps, batch_size, learning_rate = 400, 16, 3e-3
    context, num_heldout = 512, 64
    # Instead of 704, so that groups of 256 fit, which sdgf-geometric needs for 1:32.
    intermediate_size = 768

    def __init__(self, data: list[Path], model: str | None = None):
        (folder,) = data
        tokenizer = AutoTokenizer.from_pretrained(resolve("tiny").location)
        self._ids = self._stream(tokenizer, folder, "books-*.txt.xz", "docs-*.txt.xz")
        length = min(len(self._ids), self.context)
        heldout = self._stream(tokenizer, folder, "heldout-*.txt.xz")
        windows = heldout[: len(heldout) // length * length].reshape(-1, length)
        # From all over the held-out documents.
        windows = windows[:: max(1, len(windows) // self.num_heldout)][: self.num_heldout]
        self.heldout = [_predicted(torch.from_numpy(part.astype(np.int64))) for part in _groups(windows, 8)]

    def new_model(self) -> nn.Module:
        config = AutoConfig.from_pretrained(resolve("tiny").location)
        config.intermediate_size = self.intermediate_size
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)

    def batches(self, number: int, seed: int) -> Iterator[Batch]:
        generator, windows = (
            np.random.RandomState(seed),
            np.lib.stride_tricks.sliding_window_view(self._ids, min(len(self._ids), self.context)),
        )
        for _ in range(number):
            chosen = windows[generator.randint(len(windows), size=self.batch_size)]
            yield _predicted(torch.from_numpy(chosen.astype(np.int64)))

    @staticmethod
    def _stream(tokenizer, folder: Path, *patterns: str) -> np.ndarray:
        """The tokens of all documents, each from BOS to EOS."""
        files = [file for pattern in patterns for file in sorted(folder.glob(pattern))]
        if not files:
            raise FileNotFoundError(f"There is no {patterns[0]} in {folder}; give the folder of the corpus.")
        texts = (lzma.decompress(file.read_bytes()).decode() for file in files)
        documents = [each.strip("\n") for text in texts for each in re.split(r"^<\|doc\|>$", text, flags=re.MULTILINE)]
        encoded = tokenizer.backend_tokenizer.encode_batch([each for each in documents if each])
        return np.concatenate([np.array([*each.ids, tokenizer.eos_token_id], np.uint16) for each in encoded])


class Sst2(Setting):
    """The folder has the tasks of `glue_texts`; the model is a folder with an encoder."""

    name, layers = "sst2", ("query", "key", "value", "dense")
    num_steps, batch_size, learning_rate = 400, 32, 1.23e-4
    context = 64

    def __init__(self, data: list[Path], model: str | None = None):
        (folder,) = data
        self._location, self._tokenizer = model, AutoTokenizer.from_pretrained(model)
        self._train, heldout = read_task(folder, "sst2")
        self.heldout = [self._batch(group) for group in _groups(heldout, 64)]

    def new_model(self) -> nn.Module:
        return AutoModelForSequenceClassification.from_pretrained(self._location, dtype=torch.float32)

    def batches(self, number: int, seed: int) -> Iterator[Batch]:
        generator = random.Random(seed)
        return (self._batch(generator.sample(self._train, self.batch_size)) for _ in range(number))

    def _batch(self, texts: list[Labelled]) -> Batch:
        padded = self._tokenizer(
            [each.texts[0] for each in texts],
            padding=True,
            truncation=True,
            max_length=self.context,
            return_tensors="pt",
        )
        return dict(padded) | {"labels": torch.tensor([each.label for each in texts])}


class Notes(Setting):
    """Folders of notes, of which some whole notes are held out; the model is a name or a folder with a decoder."""

    name, layers = "notes", ("gate_proj", "up_proj", "down_proj")
    # Groups of 128, which sdgf-geometric needs for 1:16, do not fit into SmolLM2's 576 inputs.
    patterns, methods = ("2:4", "1:16"), ("sr-ste", "mdgf-exponential", "sdgf-stepwise")
    num_steps, batch_size, learning_rate = 200, 8, 1e-4
    context, num_heldout_notes, num_heldout = 256, 100, 64

    def __init__(self, data: list[Path], model: str | None = None):
        self._location = resolve(model or "smollm2-135m-instruct").location
        tokenizer = AutoTokenizer.from_pretrained(self._location)
        documents = read_texts(data).documents
        random.Random(0).shuffle(documents)
        heldout, train = documents[: self.num_heldout_notes], documents[self.num_heldout_notes :]
        self._collate = Collator(self.context, pad_token_id=tokenizer.pad_token_id or 0)
        self._train = self._examples(train, tokenizer)
        self.heldout = [
            self._batch(group) for group in _groups(self._examples(heldout, tokenizer)[: self.num_heldout], 8)
        ]

    def new_model(self) -> nn.Module:
        return AutoModelForCausalLM.from_pretrained(self._location, dtype=torch.float32)

    def batches(self, number: int, seed: int) -> Iterator[Batch]:
        generator = random.Random(seed)
        return (self._batch(generator.sample(self._train, self.batch_size)) for _ in range(number))

    def _examples(self, documents: list[Document], tokenizer) -> list[Example]:
        return encode(documents, tokenizer, self.context)[0]

    def _batch(self, examples: list[Example]) -> Batch:
        batch = self._collate(examples)
        return {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask, "labels": batch.labels}


SETTINGS = {each.name: each for each in (Digits, Corpus, Sst2, Notes)}


def _predicted(ids: Tensor) -> Batch:
    return {"input_ids": ids, "labels": ids}


def _groups(examples, size: int) -> Iterator:
    return (examples[begin : begin + size] for begin in range(0, len(examples), size))
