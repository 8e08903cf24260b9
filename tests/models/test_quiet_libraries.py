"""What libraries log does not reach the terminal of the host program, which gets all of it."""

import io
import logging
import threading

import pytest

from sebp_edge.engine.models.libraries import quiet_libraries


@pytest.fixture
def transformers_logger():
    """A function that adds a handler to transformers' logger, and returns what that writes."""
    logger, added = logging.getLogger("transformers"), []

    def add(kind):
        written = io.StringIO()
        added.append(kind(written))
        logger.addHandler(added[-1])
        return written

    yield add
    for handler in added:
        logger.removeHandler(handler)


class OfTheHost(logging.StreamHandler):
    """A handler that the host program has added."""


def test_the_host_gets_all_messages_and_its_terminal_none(transformers_logger):
    printed, received = transformers_logger(logging.StreamHandler), transformers_logger(OfTheHost)
    with quiet_libraries(), quiet_libraries():
        logging.getLogger("transformers.modeling_utils").error("advice")
    assert (printed.getvalue(), received.getvalue()) == ("", "advice\n")
    logging.getLogger("transformers.modeling_utils").error("afterwards")
    assert (printed.getvalue(), received.getvalue()) == ("afterwards\n", "advice\nafterwards\n")


def test_only_the_calling_thread_is_quiet(transformers_logger):
    printed = transformers_logger(logging.StreamHandler)
    with quiet_libraries():
        thread = threading.Thread(target=logging.getLogger("transformers.trainer").error, args=("the app's",))
        thread.start()
        thread.join()
        logging.getLogger("transformers.trainer").error("ours")
    assert printed.getvalue() == "the app's\n"
