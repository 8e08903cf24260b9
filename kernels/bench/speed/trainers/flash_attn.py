"""A stand-in for the package flash-attn, over torch's variable-length attention.

Unsloth packs texts without a slow path only if it can import flash-attn, or with torch from 2.12 on. torch has the same
kernels, so where there is no wheel of flash-attn, Unsloth gets them under its names. `install` comes before Unsloth is
imported, in a process of its own.

Shapes: N tokens of all texts, B texts, T positions, H heads, G key/value heads, E head size.
"""

import sys
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder
from types import ModuleType

# The version whose functions are answered for.
VERSION = "2.8.3"


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False
):
    """Attention within each text: [N, H, E], from k and v of [N, G, E].

    Raises:
        ValueError: it is not causal self-attention without dropout.
    """
    from speed.trainers.attention import causal_varlen

    if dropout_p or not causal or cu_seqlens_q is not cu_seqlens_k:
        raise ValueError(
            "This stand-in for flash-attn computes causal self-attention without dropout, as a step on packed texts "
            f"needs it; add any other to {__name__}."
        )
    return causal_varlen(q, k, v, cu_seqlens_q, max_seqlen_q, softmax_scale)


def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False):
    """Attention of padded texts: [B, T, H, E], from k and v of [B, T, G, E]."""
    from torch.nn.functional import scaled_dot_product_attention

    states = (each.transpose(1, 2) for each in (q, k, v))
    options = {"dropout_p": dropout_p, "is_causal": causal, "scale": softmax_scale}
    return scaled_dot_product_attention(*states, **options, enable_gqa=q.shape[2] != k.shape[2]).transpose(1, 2)


def _looked_up_only(name: str) -> Callable:
    """A function of flash-attn that Unsloth or transformers imports, and that no step of the benchmark calls."""

    def refuse(*arguments, **options):
        raise RuntimeError(f"This stand-in for flash-attn has {name} to be imported, not called; add it to {__name__}.")

    return refuse


def install() -> None:
    """Makes flash-attn importable, and lets importlib.metadata find it."""
    functions = {
        "flash_attn_func": flash_attn_func,
        "flash_attn_varlen_func": flash_attn_varlen_func,
        "flash_attn_with_kvcache": _looked_up_only("flash_attn_with_kvcache"),
    }
    package = _module("flash_attn", __version__=VERSION, __path__=[], **functions)
    # Unsloth asks for `flash_attn_gpu` to see whether the kernels load.
    kernels = _looked_up_only("flash_attn_gpu")
    package.flash_attn_interface = _module("flash_attn.flash_attn_interface", flash_attn_gpu=kernels, **functions)
    # transformers imports these two if a model asks for flash-attn; Unsloth replaces the layers that would call them.
    padding = {name: _looked_up_only(name) for name in ("pad_input", "unpad_input")}
    package.bert_padding = _module("flash_attn.bert_padding", **padding)
    sys.meta_path.append(_Finder())


def _module(name: str, **contents) -> ModuleType:
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None, is_package="__path__" in contents)
    vars(module).update(contents)
    sys.modules[name] = module
    return module


class _Metadata(Distribution):
    """What importlib.metadata says of flash-attn."""

    def read_text(self, filename: str) -> str | None:
        texts = {
            "METADATA": f"Metadata-Version: 2.1\nName: flash-attn\nVersion: {VERSION}\n",
            "top_level.txt": "flash_attn",
        }
        return texts.get(filename)

    def locate_file(self, path):
        raise FileNotFoundError(path)


class _Finder(DistributionFinder):
    def find_spec(self, name, path=None, target=None) -> None:
        """No module: they are in sys.modules already."""

    def find_distributions(self, context: DistributionFinder.Context) -> Iterator[Distribution]:
        if context.name in (None, "flash-attn", "flash_attn"):
            yield _Metadata()
