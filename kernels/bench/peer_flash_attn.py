"""A stand-in for the package flash-attn, over torch's variable-length attention.

Unsloth packs texts without a slow path only if it can import flash-attn, or with torch from 2.12 on. torch has the same
kernels, so where there is no wheel of flash-attn, Unsloth gets them under its names. `install` comes before Unsloth is
imported, in a process of its own.

Shapes: N tokens of all texts, B texts, T positions, H heads, G key/value heads, E head size.
"""

import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder
from types import ModuleType

# The version whose functions are answered for.
VERSION = "2.8.3"


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False
):
    """Attention within each text, causal and without dropout only: [N, H, E], from k and v of [N, G, E]."""
    from peer_attention import causal_varlen

    if dropout_p or not causal or cu_seqlens_q is not cu_seqlens_k:
        raise NotImplementedError("This stand-in for flash-attn computes causal self-attention without dropout only.")
    return causal_varlen(q, k, v, cu_seqlens_q, max_seqlen_q, softmax_scale)


def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False):
    """Attention of padded texts: [B, T, H, E], from k and v of [B, T, G, E]."""
    from torch.nn.functional import scaled_dot_product_attention

    states = (each.transpose(1, 2) for each in (q, k, v))
    options = {"dropout_p": dropout_p, "is_causal": causal, "scale": softmax_scale}
    return scaled_dot_product_attention(*states, **options, enable_gqa=q.shape[2] != k.shape[2]).transpose(1, 2)


def _not_here(*arguments, **options):
    raise NotImplementedError("This stand-in for flash-attn has no such function.")


def install() -> None:
    """Makes flash-attn importable, and lets importlib.metadata find it."""
    functions = {
        "flash_attn_func": flash_attn_func,
        "flash_attn_varlen_func": flash_attn_varlen_func,
        "flash_attn_with_kvcache": _not_here,
    }
    package = _module("flash_attn", __version__=VERSION, __path__=[], **functions)
    # Unsloth asks for `flash_attn_gpu` to see whether the kernels load.
    package.flash_attn_interface = _module("flash_attn.flash_attn_interface", flash_attn_gpu=_not_here, **functions)
    # transformers imports these two if a model asks for flash-attn; Unsloth replaces the layers that would call them.
    package.bert_padding = _module("flash_attn.bert_padding", pad_input=_not_here, unpad_input=_not_here)
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
