"""Keeps libraries from printing into the host program, and an import from what is of no use here."""

import logging
import os
import sys
import threading
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager

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
    `kernels` is installed. Neither is of use here.
    """
    with quiet_libraries(), _replaced(sys.modules, "kernels", None), _replaced(os.environ, "TORCHDYNAMO_DISABLE", "1"):
        yield


@contextmanager
def without_fla() -> Iterator[None]:
    """Context in which transformers imports a family without fla's kernels: its own code is what judges them."""
    with _replaced(sys.modules, "fla", None):
        yield


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
