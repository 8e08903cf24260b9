"""Formats sizes and durations for people."""


def gigabytes(size: float) -> str:
    """Formats a size in bytes: "6.4 GB" (10^9 bytes), or "26 MB" below 0.1 GB."""
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.0f} MB"


def duration(seconds: float) -> str:
    """Formats a time in seconds: "40 s", "12 min", "3.5 h"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
