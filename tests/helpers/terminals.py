"""A terminal of a given width in place of one that the command line writes to."""

import io

from rich.console import Console


def draw_on_terminal(patch, *modules, width, stream="out", is_terminal=True):
    """Lets these modules write to it; returns what it gets."""
    drawn = io.StringIO()
    terminal = Console(file=drawn, force_terminal=is_terminal, width=width, color_system=None, highlight=False)
    for module in modules:
        patch.setattr(module, stream, terminal)
    return drawn
