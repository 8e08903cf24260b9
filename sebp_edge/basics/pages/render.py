"""Fills a page's template in, and writes the page."""

from pathlib import Path

from sebp_edge.basics.files import expand_user, storage_errors, write_atomically


def render(template: Path, filters: dict, **values) -> str:
    """Returns the page or plot; every inserted value is escaped.

    Args:
        template: an HTML file that extends `page.html`, or an SVG file.
    """
    # Imported here, since commands that may write a page mostly write none.
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader([template.parent, Path(__file__).parent]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= filters
    return environment.get_template(template.name).render(**values)


def mark(command: str) -> str:
    """The tag by which a command knows its own pages, which it may overwrite; stands within their first bytes."""
    return f'<meta name="generator" content="sebp-edge {command}">'


def write(html: str, page: Path) -> None:
    """Writes a page atomically, readable by its owner only.

    Raises:
        StorageError: the file cannot be written.
    """
    with storage_errors("The page could not be written to", page):
        write_atomically(expand_user(page), html)
