"""Handles signals before a command has begun; imports nothing that takes time."""

import os
import sys

from sebp_edge.errors import Interrupted


def exit_interrupted(signum: int, frame) -> None:
    """Handles a signal before the command has begun: exits at once, since imports may swallow a KeyboardInterrupt."""
    message = "Interrupted; nothing was changed."
    line = f'{{"event": "error", "error": "Interrupted", "message": "{message}"}}\n' if "--json" in sys.argv else ""
    for descriptor, text in ((1, line), (2, f"sebp-edge: {message}\n")):
        try:
            os.write(descriptor, text.encode())
        except OSError:
            continue  # the stream is closed
    os._exit(Interrupted.exit_code)
