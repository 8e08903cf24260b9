"""Recipes: a few values that say how to train, read from `recipes/*.toml` or a user's own file.

Recipe.load("notes")                   a bundled recipe
Recipe.load("./mine.toml")             a user's own file
Recipe.load("notes").replace(epochs=3)
Recipe.load(None)                      the bundled recipe that fits the texts
"""

import dataclasses
import difflib
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args

from sebp_edge.basics.files import read_text
from sebp_edge.errors import OptionError, RecipeError, suggest

Method = Literal["lora", "full"]
Questions = Literal["practice"]
RANK = 16
# The name of an adapter that was trained to read.
READER = "reader"
# Recipes of the paper's experiments, which are not for an owner's texts.
_OF_THE_PAPER = ("glue", "lm")
# A model with fewer parameters is small: how-the-recipes-were-chosen.md.
SMALL = 200e6
# Far above any useful value; fp32 overflows from about 1e38 on.
MAX_LORA_ALPHA = 2**20


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How one adaptation is trained.

    Attributes:
        name: the recipe's name; the file's stem.
        description: what the recipe is for, in one sentence.
        method: "lora" trains a low-rank adapter (Hu et al. 2021), "full" trains every weight.
        load_in_4bit: whether to load the base model's linear layers in 4 bits (NF4, Dettmers et al. 2023). None, the
            default: only if the memory budget requires it.
        r: rank of the adapter. None, the default: 16, or less if the memory budget requires it.
        lora_alpha: scales the adapter's product by `lora_alpha / r`.
        learning_rate: peak learning rate of the schedule (linear warm-up, then cosine decay to zero). Of two, the
            first is that of a model with fewer than 200 million parameters, the second that of a larger one.
        learning_on_share: the peak learning rate of a training that learns on, as a share of `learning_rate`.
        warmup_ratio: share of all steps that are warm-up.
        epochs: maximum number of epochs.
        patience: epochs without a better validation loss before training stops.
        batch_tokens: loss tokens per step; if bf16 weights are trained, no more than fit into one micro-batch.
        batch_rows: rows with gradient per step, which bound a step of examples that have few loss tokens, as short
            answers to long prompts. None, the default: no bound.
        min_steps: the least number of steps of an epoch, as far as there are examples.
        weight_decay: decoupled weight decay of AdamW.
        max_grad_norm: maximum global gradient norm; for bf16 weights the maximum norm of each weight's gradient.
        context_length: tokens per example, padding included; capped by the model's own limit.
        chat_template: whether to render prompt/completion records with the model's chat template.
        margin: the gain that counts, as a share of the base model's test loss; the gate keeps nothing below it.
        refit: whether to train on all documents after the gate has passed an adapter of 20 documents or more. None, the
            default: with method "lora". Below 20 documents, the last training is always on all of them.
        questions: "practice" trains on questions about bundled notes, below passages as `ask` shows them, instead of
            on the user's texts; the gate is then a quiz. None, the default: trains on texts.
        general: tokens of general text for each token trained on, and about as many of the base model's own replies to
            up to 80 general questions; it is the teacher there, so that the adapter keeps what it could do.

    Raises:
        RecipeError: a value is of the wrong type or out of range, or does not go with the others.
    """

    name: str
    description: str
    method: Method = "lora"
    load_in_4bit: bool | None = None
    r: int | None = None
    lora_alpha: int = 32
    learning_rate: float | tuple[float, float] = 2e-4
    learning_on_share: float = 0.5
    warmup_ratio: float = 0.1
    epochs: int = 3
    patience: int = 1
    batch_tokens: int = 1024
    batch_rows: int | None = None
    min_steps: int = 1
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    context_length: int = 512
    chat_template: bool = False
    margin: float = 0.01
    refit: bool | None = None
    questions: Questions | None = None
    general: float = 0.0

    def __post_init__(self):
        for field in dataclasses.fields(Recipe):
            object.__setattr__(self, field.name, _validate(self.name, field, getattr(self, field.name)))
        if self.load_in_4bit and self.method == "full":
            raise RecipeError(
                f"Recipe {self.name!r}: 4-bit weights cannot be trained; use method 'lora', or leave out load_in_4bit."
            )

    @classmethod
    def load(cls, name: "str | Path | Recipe | None") -> "Recipe":
        """Reads a bundled recipe by name, or a TOML file by path; None is a `FittingRecipe`.

        Raises:
            RecipeError: unknown name or key (the message suggests the closest), unreadable file, or invalid value.
        """
        if isinstance(name, Recipe):
            return name
        if name is None:
            return FittingRecipe(**vars(cls.load("notes")))
        if Path(name).suffix == ".toml":
            return _parse(Path(name).stem, _read_file(Path(name)))
        bundled = resources.files("sebp_edge.recipes")
        if str(name) not in [*cls.names(), *_OF_THE_PAPER]:
            close = difflib.get_close_matches(str(name), _OF_THE_PAPER, n=1)
            raise RecipeError(f"Unknown recipe {str(name)!r}; {suggest(str(name), close or cls.names())}")
        return _parse(str(name), (bundled / f"{name}.toml").read_text(encoding="utf-8"))

    @classmethod
    def of_record(cls, values: dict) -> "Recipe":
        """Returns the recipe whose values an adapter's record has.

        Raises:
            RecipeError: a value is unknown or invalid, as in a record of another version.
        """
        # Earlier versions wrote null or false if they were not asked for what is gone.
        values = {key: value for key, value in values.items() if value or key not in _FORMER}
        _refuse_former(values.get("name"), values)
        try:
            return cls(**values)
        except TypeError as error:
            raise RecipeError(
                "The recipe in the adapter's record has values that this sebp-edge does not know; upgrade sebp-edge."
            ) from error

    @classmethod
    def names(cls) -> list[str]:
        """Returns the names of the bundled recipes, the default first, without those of the paper's experiments."""
        files = resources.files("sebp_edge.recipes").iterdir()
        names = {file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml")} - {*_OF_THE_PAPER}
        return sorted(names, key=lambda name: (name != "notes", name))

    def or_bundled(self, name: str) -> "Recipe":
        """Returns this recipe; see `FittingRecipe`."""
        return self

    def with_defaults(self) -> "Recipe":
        """Returns a copy in which the values left to the memory budget have their defaults."""
        return self.replace(r=self.r or RANK, load_in_4bit=bool(self.load_in_4bit))

    @property
    def learning_rates(self) -> tuple[float, ...]:
        """The peak learning rate, or those of a small model and a larger one."""
        return self.learning_rate if isinstance(self.learning_rate, tuple) else (self.learning_rate,)

    @property
    def peak_rate(self) -> float:
        """The only peak learning rate.

        Raises:
            OptionError: there are two; see `for_size`.
        """
        if len(self.learning_rates) > 1:
            raise OptionError(
                f"Recipe {self.name!r} has a learning rate for small models and one for larger ones; take one by "
                "recipe.for_size(number of parameters)."
            )
        return self.learning_rates[0]

    def for_size(self, num_parameters: int) -> "Recipe":
        """Returns the recipe of a model with so many parameters, which has one learning rate."""
        return self.replace(learning_rate=self.learning_rates[0 if num_parameters < SMALL else -1])

    @property
    def is_plain_lora(self) -> bool:
        """Whether an adapter is trained on weights that are not quantised."""
        return self.method == "lora" and not self.load_in_4bit

    @property
    def refits(self) -> bool:
        """Whether an adapter that passed the gate goes on learning, on all documents."""
        if self.questions:  # other notes make little difference
            return False
        return self.method == "lora" if self.refit is None else self.refit

    @property
    def default_name(self) -> str:
        """The name of an adapter that was given none."""
        return READER if self.questions else "default"

    def learning_on(self) -> "Recipe":
        """Returns the recipe of a training that learns on: it has fewer documents, and must not forget the others."""
        return self.replace(learning_rate=self.learning_on_share * self.peak_rate)

    def replace(self, **changes) -> "Recipe":
        """Returns a copy with some values changed; None keeps the recipe's own value.

        Raises:
            OptionError: a value is of the wrong type or out of range, or does not go with the others.
        """
        try:
            return dataclasses.replace(self, **{key: value for key, value in changes.items() if value is not None})
        except RecipeError as error:
            raise OptionError(str(error)) from error


@dataclass(frozen=True, kw_only=True)
class FittingRecipe(Recipe):
    """The recipe "notes" as long as no texts are read, in place of the bundled one that fits them.

    Attributes:
        changes: the values that were changed.
    """

    changes: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def replace(self, **changes) -> "FittingRecipe":
        """See `Recipe.replace`."""
        changes = {key: value for key, value in changes.items() if value is not None}
        return super().replace(**changes, changes={**self.changes, **changes})

    def or_bundled(self, name: str) -> Recipe:
        """Returns the bundled recipe of this name, with the changes."""
        return Recipe.load(name).replace(**self.changes)


def _read_file(path: Path) -> str:
    try:
        return read_text(path).removeprefix("\ufeff")
    except (OSError, ValueError) as error:  # not UTF-8, not a regular file, or a path with a null byte
        raise RecipeError(f"The recipe file {path} cannot be read: {getattr(error, 'strerror', error)}.") from error


def _parse(name: str, text: str) -> Recipe:
    try:
        values = tomllib.loads(text)
    except ValueError as error:  # TOMLDecodeError, or Python's error for a number of more than 4,300 digits
        raise RecipeError(f"Recipe {name!r} is not valid TOML: {error}.") from error
    except RecursionError as error:
        raise RecipeError(f"Recipe {name!r} is nested too deeply; a recipe has plain values only.") from error
    known = [field.name for field in dataclasses.fields(Recipe) if field.name != "name"]
    _refuse_former(name, values)
    for key in values:
        if key not in known:
            raise RecipeError(f"Recipe {name!r} has an unknown key {key!r}; {suggest(key, known)}")
    return Recipe(name=name, **{"description": "", **values})


def _refuse_former(name: str, values: dict) -> None:
    for key, instead in _FORMER.items():
        if key in values:
            raise RecipeError(f"Recipe {name!r} has {key}, {instead}")


# Keys of earlier versions, and what to do without them.
_FORMER = {
    "sparsity": "and recipes do not prune any more; leave it out, or prune in your own training loop with "
    "sebp_edge.research.nm_sparse.",
    "merge_for": "and adapters are not trained for a quantisation any more; leave it out, and export with --quant "
    "q8_0, which keeps the gain.",
    "load_in_fp8": "and base models are not held in FP8 any more; leave it out, since bf16 takes no more memory.",
}
# In tokens: the shortest context length that leaves room for text beside special tokens.
LEAST_CONTEXT = 8
_AT_LEAST = {"warmup_ratio": 0, "weight_decay": 0, "context_length": LEAST_CONTEXT, "margin": 0, "general": 0}
# Epochs are limited because all steps of a training are scheduled before the first one.
_AT_MOST = {"warmup_ratio": 1, "epochs": 1000, "lora_alpha": MAX_LORA_ALPHA, "learning_on_share": 1, "margin": 1}
# The limit of all other numbers, so that they fit into 32-bit floats and 64-bit integers.
_AT_MOST_ANY = {float: 1e30, int: 2**62}


def _validate(recipe: str, field: dataclasses.Field, value):
    """Returns `value` in the field's type; raises a RecipeError that names the key and the expected value."""
    kind = field.type
    if tuple[float, float] in get_args(kind):
        kind = float
        if isinstance(value, list | tuple):
            return _validate_two(recipe, field, value)
    if NoneType in get_args(kind):
        # None: the key is left out.
        if value is None:
            return None
        kind = get_args(kind)[0]
    if kind is float and type(value) is int and abs(value) <= _AT_MOST_ANY[float]:
        value = float(value)
    if get_args(kind):
        is_valid, expected = value in get_args(kind), " or ".join(map(repr, get_args(kind)))
    else:
        is_valid, expected = type(value) is kind, {int: "a whole number", float: "a number", bool: "true or false"}
        expected = expected.get(kind, "a string")
    if is_valid and kind in (int, float):
        lowest = _AT_LEAST.get(field.name)
        is_valid = value > 0 if lowest is None else value >= lowest
        expected += " above 0" if lowest is None else f" of at least {lowest}"
        highest = _AT_MOST.get(field.name, _AT_MOST_ANY[kind])
        is_valid = is_valid and value <= highest
        if field.name in _AT_MOST or highest < value < math.inf:
            expected += f" and at most {highest}"
    if not is_valid:
        raise RecipeError(f"Recipe {recipe!r}: {field.name} must be {expected}, but is {_shorten(value)}.")
    return value


def _validate_two(recipe: str, field: dataclasses.Field, values: list | tuple) -> tuple[float, float]:
    if len(values) != 2:
        raise RecipeError(
            f"Recipe {recipe!r}: {field.name} must be a number, or two for small and larger models, but is "
            f"{_shorten(list(values))}."
        )
    first, second = (_validate(recipe, field, value) for value in values)
    return first, second


def _shorten(value) -> str:
    try:
        text = repr(value)
    except ValueError:
        return "a number of more than 4,300 digits"
    except RecursionError:
        return "nested deeply"
    return text if len(text) <= 100 else f"{text[:100]}..."


def check_seed(seed: int) -> int:
    """Returns `seed` if random generators take it, else raises an OptionError."""
    if type(seed) is not int or not 0 <= seed < 2**63:
        raise OptionError(f"The seed must be a whole number from 0 to 2^63 - 1, but is {seed!r}.")
    return seed
