"""Figures as people read them."""


def gigabytes(size: float) -> str:
    """Bytes: "6.4 GB" (10^9 bytes), or "26 MB" below a tenth of that."""
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.0f} MB"


def duration(seconds: float) -> str:
    """Seconds: "40 s", "12 min", "3.5 h"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
