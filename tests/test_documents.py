"""Documents: links have targets, and the guide names every public name, event and error."""

import re
from pathlib import Path
from urllib.parse import unquote

import pytest

import sebp_edge
from sebp_edge import errors, events

ROOT = Path(__file__).parents[1]
DOCUMENTS = [
    *ROOT.glob("*.md"),
    *(ROOT / location for location in ("sebp_edge/README.md", "sebp_edge/models/tiny/README.md", "recipes/README.md")),
    *(ROOT / "kernels").rglob("*.md"),
]


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(path: Path) -> set[str]:
    """The anchors that GitHub makes of a document's headings."""
    headings = re.findall(r"^#+ (.*)$", without_code(path.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_have_targets(document):
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(document.read_text(encoding="utf-8"))):
        location, _, anchor = target.partition("#")
        if location.startswith("http"):
            continue
        path = document.parent / unquote(location) if location else document
        assert path.exists(), target
        assert not anchor or anchor in anchors(path), target


def test_the_guide_names_every_event_error_and_public_name():
    guide = (ROOT / "sebp_edge" / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w.]+)`", guide))
    for event in events.Event.__subclasses__():
        assert {event.event, event.__name__} <= named, event
    for error in vars(errors).values():
        if isinstance(error, type) and issubclass(error, errors.SebpEdgeError):
            assert named & {error.__name__, f"sebp_edge.{error.__name__}"}, error
    assert {f"sebp_edge.{name}" for name in sebp_edge.__all__} <= named
