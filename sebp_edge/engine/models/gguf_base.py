"""Base models in GGUF files: their config, tokenizer and weights, as transformers has them.

transformers reads such files too, but holds all dequantised weights at once, and ignores the scaling of positions of
Llama 3.1.
"""

import re
import threading
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from sebp_edge.basics.stopping import Check
from sebp_edge.basics.weights import saved_tensors
from sebp_edge.engine.models.gguf.file import GgufFile
from sebp_edge.engine.models.gguf.reader import config_of, read_weight, shape_of_weight, weight_names
from sebp_edge.engine.models.gguf.tokenizer import special_tokens_of, tokenizer_of
from sebp_edge.engine.models.soundness import refuse_too_many_modules
from sebp_edge.errors import ModelError
from sebp_edge.machine.devices import release_memory
from sebp_edge.values.model_reference import ModelReference

_CPU = torch.device("cpu")
# Smaller weights do not matter for memory, in bytes.
_LARGE = 2**16


def open_gguf(reference: ModelReference) -> GgufFile:
    """Opens the file of a model."""
    return GgufFile(Path(reference.location), reference.name)


def read_gguf_config(reference: ModelReference):
    """Returns the config of a file's model."""
    with open_gguf(reference) as file:
        values = config_of(file)
        refuse_too_many_modules(reference.name, values)
        return AutoConfig.for_model(**values)


def read_gguf_tokenizer(reference: ModelReference) -> PreTrainedTokenizerBase:
    """Returns the tokenizer in a file."""
    with open_gguf(reference) as file:
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer_of(file), **special_tokens_of(file))
        tokenizer.chat_template = file.get("tokenizer.chat_template", str)
    return tokenizer


def refuse_unknown(file: GgufFile) -> dict[str, str]:
    """Returns the file's name of each weight."""
    names = weight_names(file)
    file.refuse_unreadable_types()
    return names


def lazy_weights(
    file: GgufFile, on_meta: nn.Module, dtype: torch.dtype, check: Check = lambda: None
) -> dict[str, "_LazyWeight"]:
    """Returns the weights of a model by name; each is read when it is needed, after a check that may raise."""
    names, lock = refuse_unknown(file), threading.Lock()
    expected = {name: tuple(weight.shape) for name, weight in saved_tensors(on_meta)}
    # Of layers that share the keys of others, files have keys that nothing reads.
    unread = on_meta.base_model._keys_to_ignore_on_load_unexpected or ()
    missing, unknown = sorted(expected.keys() - names.keys()), sorted(names.keys() - expected.keys())
    unknown = [name for name in unknown if not any(re.search(pattern, name) for pattern in unread)]
    if missing or unknown:
        what = f"lacks {missing[0]!r}" if missing else f"has {names[unknown[0]]!r}, which its config does not have"
        raise ModelError(f"{file.name!r} {what}; download it again, or another file of the model.")
    for name, shape in expected.items():
        found = shape_of_weight(file, names[name])
        if found != shape:
            raise ModelError(
                f"{file.name!r} has {names[name]!r} of shape {list(found)}, expected {list(shape)}; download it again."
            )
    return {name: _LazyWeight(file, names[name], dtype, lock, check) for name in expected}


class _LazyWeight:
    """A weight that transformers reads, by slicing it, when it needs it.

    It does so from several threads; the lock keeps what they hold at one weight. What reading and quantising the one
    before has taken is released first: the heap would keep it, and scatter the weights that stay over it.
    """

    def __init__(self, file: GgufFile, name: str, dtype: torch.dtype, lock: threading.Lock, check: Check):
        self._file, self._name, self._dtype, self._lock, self._check = file, name, dtype, lock, check

    def __getitem__(self, _) -> Tensor:
        with self._lock:
            self._check()
            if self._file.tensors[self._name].size > _LARGE:
                release_memory(_CPU)
            return read_weight(self._file, self._name, self._dtype)
