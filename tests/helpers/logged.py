"""Keeps what is logged, for tests that ask for `caplog`.

pytest's own plugin goes through the hundreds of loggers of transformers six times in every test, which took a quarter
of an empty test's time.
"""

import logging
from contextlib import contextmanager


class Logged(logging.Handler):
    """Within it, keeps the records of all loggers."""

    def __init__(self):
        super().__init__()
        self.records, self._levels = [], []

    def emit(self, record):
        record.message = record.getMessage()
        self.records.append(record)

    @property
    def text(self):
        """The records with their tracebacks."""
        return "".join(f"{self.format(record)}\n" for record in self.records)

    def clear(self):
        self.records.clear()

    def set_level(self, level, logger=None):
        """Lets a logger pass on this level, until the end."""
        logger = logging.getLogger(logger)
        self._levels.append((logger, logger.level))
        logger.setLevel(level)

    @contextmanager
    def at_level(self, level, logger=None):
        """Lets a logger pass on this level, within the context."""
        self.set_level(level, logger)
        try:
            yield
        finally:
            logger, before = self._levels.pop()
            logger.setLevel(before)

    def __enter__(self):
        loggers = [each for each in logging.root.manager.loggerDict.values() if isinstance(each, logging.Logger)]
        self._loggers = [logging.root, *(each for each in loggers if not each.propagate)]
        for logger in self._loggers:
            logger.addHandler(self)
        return self

    def __exit__(self, *_):
        for logger in self._loggers:
            logger.removeHandler(self)
        for logger, before in reversed(self._levels):
            logger.setLevel(before)
