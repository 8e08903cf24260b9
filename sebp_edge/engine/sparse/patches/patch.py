"""Patch: the base class of handles that change a model and undo their changes, in any order.

    class Doubled(Patch):
        def attach(self, layer):
            forward = forward_of(layer)
            self._replace(layer, lambda x: 2 * forward(x))

A replacement wraps the forward that it replaces. If it is removed while something else wraps it (a later handle, a
user's wrapper), it stays and only passes calls on, until it is outermost and can be removed.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from operator import itemgetter
from types import MethodType
from typing import Self

import torch
from torch import nn

# Attribute of a decoder: the attention implementations that patches have set, by patch; the first is the decoder's own.
_ATTENTIONS = "_sebp_edge_attentions"
# What each module holds: its parameters, its parts, its hooks, its mode.
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


class Patch:
    """Handle of changes to a model: a context manager, or call `remove()` when done."""

    def __init__(self):
        self._undo: list[Callable[[], None]] = []

    def remove(self) -> None:
        """Undoes all changes, the latest first; does nothing if none are left.

        If one fails (out of memory), the others are still undone, its error is raised, and the next call retries it.
        """
        changes, self._undo = self._undo, []
        with ExitStack() as stack:
            for undo in changes:
                stack.callback(self._try, undo)

    def _try(self, undo: Callable[[], None]) -> None:
        try:
            undo()
        except BaseException:
            self._undo.insert(0, undo)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception) -> None:
        self.remove()

    @contextmanager
    def _attaching(self) -> Iterator[None]:
        """Undoes all changes if the body of the `with` statement fails."""
        try:
            yield
        except BaseException:
            self.remove()
            raise

    def _replace(self, module: nn.Module, forward: Callable) -> None:
        """Replaces the module's forward by `forward`."""
        drop_removed(module)
        link = _Link(module, forward)
        self._undo.append(link.remove)
        module.forward = link

    def _set_attention(self, decoder: nn.Module, name: str) -> None:
        """Sets a transformers model's attention implementation."""
        names = vars(decoder).setdefault(_ATTENTIONS, {None: decoder.config._attn_implementation})
        self._undo.append(lambda: self._restore_attention(decoder))
        names[self] = name
        decoder.set_attn_implementation(name)

    def _restore_attention(self, decoder: nn.Module) -> None:
        names = vars(decoder)[_ATTENTIONS]
        names.pop(self, None)
        decoder.set_attn_implementation(next(reversed(names.values())))
        if len(names) == 1:
            del vars(decoder)[_ATTENTIONS]

    def _include(self, part: "Patch", *args, **options) -> None:
        """Attaches another patch, which is removed with this one even if attaching it fails midway."""
        self._undo.append(part.remove)
        part.attach(*args, **options)


class _Link:
    """Replacement of one module's forward; wraps the previous one, `__wrapped__`, and has its signature."""

    # No __dict__: `functools.wraps` would copy it into a wrapper.
    __slots__ = ("__weakref__", "__wrapped__", "beneath", "forward", "module")

    def __init__(self, module: nn.Module, forward: Callable):
        self.module, self.forward = module, forward
        self.beneath, self.__wrapped__ = vars(module).get("forward"), forward_of(module)

    def __call__(self, *args, **kwargs):
        if self.forward is not None:
            return self.forward(*args, **kwargs)
        if not torch.compiler.is_compiling():
            drop_removed(self.module)
        return self.__wrapped__(*args, **kwargs)

    def remove(self) -> None:
        self.forward = None
        drop_removed(self.module)

    def __reduce__(self) -> tuple:
        # A copied or pickled model has no patches.
        forward = foreign_forward(self.module)
        return (getattr, (self.module, "forward")) if forward is None else (itemgetter(0), ((forward,),))


class _ClassForward:
    """Calls the forward that a module's class has at present, which may be replaced after a patch has wrapped it."""

    __slots__ = ("module",)

    def __init__(self, module: nn.Module):
        self.module = module

    def __call__(self, *args, **kwargs):
        return type(self.module).forward(self.module, *args, **kwargs)

    @property
    def __wrapped__(self) -> Callable:
        """For `inspect.signature`."""
        return MethodType(type(self.module).forward, self.module)


def forward_of(module: nn.Module) -> Callable:
    """Returns a module's present forward, to be wrapped."""
    return vars(module).get("forward") or _ClassForward(module)


def drop_removed(module: nn.Module) -> None:
    """Removes the outermost replacements of a module whose handles were removed."""
    forward = vars(module).get("forward")
    while type(forward) is _Link and forward.forward is None:
        forward = forward.beneath
        if forward is None:
            del module.forward
        else:
            module.forward = forward
    # A copy of a patched model has its class's own forward as an attribute.
    if type(forward) is MethodType and forward == MethodType(type(module).forward, module):
        del module.forward


def has_own_forward(module: nn.Module) -> bool:
    """Whether the module's forward is its class's own and not replaced."""
    drop_removed(module)
    return "forward" not in vars(module)


def kind_of(module: nn.Module) -> tuple:
    """Returns a key of modules that compute alike: the class, settings but the layer's number, the weight's shape."""
    weight, own = getattr(module, "weight", None), vars(module)
    settings = sorted(name for name in own.keys() - _OF_EVERY_MODULE if name != "layer_idx")
    # Anything else than plain values may decide, too; blocks share a config.
    values = (own[name] if isinstance(own[name], int | float | str | None) else id(own[name]) for name in settings)
    return type(module), *zip(settings, values, strict=True), weight is None or (weight.shape, weight.dtype)


def foreign_forward(module: nn.Module) -> Callable | None:
    """Returns what replaced the module's forward, other than patches, inside of them or around them; None if nothing
    did."""
    forward = vars(module).get("forward")
    while type(forward) is _Link:
        forward = forward.beneath
    return forward


def is_wrapped(module: nn.Module) -> bool:
    """Whether something other than a patch replaced the module's forward, inside patches or around them."""
    return foreign_forward(module) is not None


def own_attention(decoder: nn.Module) -> str | None:
    """Returns the name of a transformers model's attention implementation, other than those that patches have set."""
    names = vars(decoder).get(_ATTENTIONS)
    return names[None] if names else getattr(getattr(decoder, "config", None), "_attn_implementation", None)
