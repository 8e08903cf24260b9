"""Keeps libraries from printing into the host program, and an import from what is of no use here."""

import importlib
import logging
import sys
import threading
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager, suppress
from importlib.util import find_spec, module_from_spec
from types import ModuleType

_LIBRARIES = ("transformers", "huggingface_hub", "peft", "bitsandbytes", "torch")


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Context in which libraries print no log messages from this thread.

    They print to the standard error by handlers of their own, and by logging's last resort if the host program has
    configured nothing. Handlers of the host program still get every message.
    """
    handlers = (handler for name in _LIBRARIES for handler in logging.getLogger(name).handlers)
    own = [handler for handler in handlers if type(handler) is logging.StreamHandler]
    if logging.lastResort is not None:
        own.append(logging.lastResort)
    # Each call has a filter of its own, so that calls in several threads do not undo each other's.
    silence = _Silence()
    for handler in own:
        handler.addFilter(silence)
    try:
        yield
    finally:
        for handler in own:
            handler.removeFilter(silence)


class _Silence(logging.Filter):
    """Drops the libraries' messages from the thread that made it."""

    def __init__(self):
        super().__init__()
        self._thread = threading.get_ident()

    def filter(self, record: logging.LogRecord) -> bool:
        return record.thread != self._thread or record.name.partition(".")[0] not in _LIBRARIES


@contextmanager
def quick_import_of_bitsandbytes() -> Iterator[None]:
    """Context in which bitsandbytes can be imported, which PEFT does if it is installed.

    On import, bitsandbytes loads torch's compiler for seconds, and downloads kernels from the Hub if the package
    `kernels` is installed. Neither is of use here. Torch must be imported already.
    """
    with (
        quiet_libraries(),
        _replaced(sys.modules, "kernels", None),
        _replaced(vars(sys.modules["torch"]), "compile", _leave_alone),
    ):
        yield


@contextmanager
def quick_import_of_torch() -> Iterator[None]:
    """Context in which libraries are imported without torch's compiler and distributed tensors, a fifth of the time.

    It changes the whole process, which then is for one device. The compiler is loaded once it is wanted.
    """
    torch = importlib.import_module("torch")
    if "torch._dynamo" not in sys.modules:
        sys.modules["torch._dynamo"] = compiler = module_from_spec(find_spec("torch._dynamo"))
        compiler.__class__ = _CompilerOnDemand
        with suppress(ImportError):
            importlib.import_module("torch._dynamo._trace_wrapped_higher_order_op")  # which transformers needs
        del compiler.__path__  # all else needs the whole
    with _replaced(vars(torch.distributed), "is_available", lambda: False):
        yield


def _leave_alone(function=None, *args, **options):
    """Decorates nothing, with options or without."""
    return (lambda function: function) if function is None else function


class _CompilerOnDemand(ModuleType):
    """torch's compiler, not loaded: on import, libraries only tell it which functions it must leave alone."""

    disable = allow_in_graph = assume_constant_result = staticmethod(_leave_alone)

    def __getattr__(self, name: str):
        if name.startswith("__") and name != "__path__":  # which only its file defines
            raise AttributeError(name)
        self.__class__, self.__path__ = ModuleType, self.__spec__.submodule_search_locations
        self.__spec__.loader.exec_module(self)
        return getattr(self, name)


@contextmanager
def _replaced(mapping: MutableMapping, key: str, value) -> Iterator[None]:
    is_there, before = key in mapping, mapping.get(key)
    mapping[key] = value
    try:
        yield
    finally:
        if is_there:
            mapping[key] = before
        else:
            del mapping[key]
