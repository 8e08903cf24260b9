"""What a handle changes in a model, and how it is undone: in any order, whatever lies over it by then.

    class Doubled(Patch):
        def attach(self, layer):
            forward = layer.forward
            self._replace(layer, lambda x: 2 * forward(x))

A replacement of a module's forward lies over the forward that was there. If it is removed while another one lies over
it (a later handle's, a user's wrapper), it stays within, passes calls on, and leaves once it lies on top.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Self

import torch
from torch import nn

# Where a decoder keeps the attention implementations that patches set, by patch; the first one is its own.
_ATTENTIONS = "_sebp_edge_attentions"


class Patch:
    """A handle of changes to a model: a context manager, or `remove()` when done."""

    def __init__(self):
        self._undo: list[Callable[[], None]] = []

    def remove(self) -> None:
        """Undoes all changes, the latest first; without any left, does nothing.

        If one cannot be undone (memory ran out), the others are, its error is raised, and the next call tries it again.
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
        """Undoes what was attached within it if the rest fails."""
        try:
            yield
        except BaseException:
            self.remove()
            raise

    def _replace(self, module: nn.Module, forward: Callable) -> None:
        """Puts `forward` in the place of the module's."""
        drop_removed(module)
        link = _Link(module, forward)
        self._undo.append(link.remove)
        module.forward = link

    def _set_attention(self, decoder: nn.Module, name: str) -> None:
        """Sets a transformers model's attention implementation."""
        names = vars(decoder).setdefault(_ATTENTIONS, {None: decoder.config._attn_implementation})
        self._undo.append(lambda: self._take_attention_back(decoder))
        names[self] = name
        decoder.set_attn_implementation(name)

    def _take_attention_back(self, decoder: nn.Module) -> None:
        names = vars(decoder)[_ATTENTIONS]
        names.pop(self, None)
        decoder.set_attn_implementation(next(reversed(names.values())))
        if len(names) == 1:
            del vars(decoder)[_ATTENTIONS]

    def _include(self, part: "Patch", *given, **options) -> None:
        """Attaches a patch that is removed with this one, also if it fails half-way."""
        self._undo.append(part.remove)
        part.attach(*given, **options)


class _Link:
    """Lies in the place of one module's forward, over `__wrapped__`, whose signature it shows."""

    # No __dict__, which `functools.wraps` would copy into a wrapper.
    __slots__ = ("__weakref__", "__wrapped__", "beneath", "forward", "module")

    def __init__(self, module: nn.Module, forward: Callable):
        self.module, self.forward = module, forward
        self.beneath, self.__wrapped__ = vars(module).get("forward"), module.forward

    def __call__(self, *args, **kwargs):
        if self.forward is not None:
            return self.forward(*args, **kwargs)
        if not torch.compiler.is_compiling():
            drop_removed(self.module)
        return self.__wrapped__(*args, **kwargs)

    def remove(self) -> None:
        self.forward = None
        drop_removed(self.module)


def drop_removed(module: nn.Module) -> None:
    """Takes replacements that were removed and lie on top out of the module."""
    forward = vars(module).get("forward")
    while type(forward) is _Link and forward.forward is None:
        forward = forward.beneath
        if forward is None:
            del module.forward
        else:
            module.forward = forward


def has_own_forward(module: nn.Module) -> bool:
    """Whether nobody replaced the module's forward."""
    drop_removed(module)
    return "forward" not in vars(module)


def is_wrapped(module: nn.Module) -> bool:
    """Whether somebody else replaced the module's forward, beneath patches or over them."""
    forward = vars(module).get("forward")
    while type(forward) is _Link:
        forward = forward.beneath
    return forward is not None
