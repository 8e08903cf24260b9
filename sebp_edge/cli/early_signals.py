"""Handles signals before a command has begun; imports nothing that takes time."""

import os
import sys
import time

from sebp_edge.errors import Interrupted


def exit_interrupted(signum: int, frame) -> None:
    """Handles a signal before the command has begun: exits at once, since imports may swallow a KeyboardInterrupt."""
    message = "Interrupted; nothing was changed."
    line = ""
    if "--json" in sys.argv:
        job, error = os.urandom(6).hex(), Interrupted(message).to_dict()
        # Without the module json, which may be half imported.
        values = "".join(f', "{key}": {_as_json(value)}' for key, value in error.items())
        line = f'{{"v": 1, "time": {time.time():.3f}, "job": "{job}"{values}}}\n'
    for descriptor, text in ((1, line), (2, f"sebp-edge: {message}\n")):
        try:
            os.write(descriptor, text.encode())
        except OSError:
            continue  # the stream is closed
    os._exit(Interrupted.exit_code)


def _as_json(value: str | int | None) -> str:
    return f'"{value}"' if isinstance(value, str) else "null" if value is None else str(value).lower()
