"""Documents: links have targets, figures have results, and the guide names every public name, event and error."""

import re
from pathlib import Path
from urllib.parse import unquote

import pytest

import documents
import sebp_edge
from sebp_edge import errors, events

ROOT = Path(__file__).parents[1]
DOCUMENTS = [*documents.DOCUMENTS, ROOT / "CHANGELOG.md"]


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


def test_no_document_is_missed():
    # A build copies the bundled model's card.
    others = ("examples", "tests", "build", "dist")
    folders = [path for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")]
    found = {path for folder in folders if folder.name not in others for path in folder.rglob("*.md")}
    assert {*ROOT.glob("*.md"), *found} == set(DOCUMENTS)


@pytest.mark.parametrize("document", documents.DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_tables_are_what_the_results_say_and_figures_have_a_source(document):
    text = document.read_text(encoding="utf-8")
    assert not [*documents.stale_tables(text), *documents.unsourced_figures(text)]


def test_a_table_that_differs_from_its_results_is_found():
    text = documents.filled("<!-- table attention -->\n<!-- end -->\n")
    assert "| Llama-3.2-3B |" in text
    assert not [*documents.stale_tables(text)]
    assert [*documents.stale_tables(text.replace("Llama-3.2-3B |", "Llama-3.2-3B  |"))]
    assert [*documents.stale_tables("<!-- table attention -->\n")]


@pytest.mark.parametrize(
    "text",
    [
        "It takes 3 s.",
        "It takes 1.5x.",
        "- It takes 12.7 ms.\n- It holds nothing. <!-- note 61db621 -->",
        "| a | b |\n|---|---|\n| 1 | 2.5 |",
        "<!-- note 61db621 -->\nIt takes 3 s.\n\nIt holds 2 GB.",
        "<!-- note 61db621 -->\n\nIt takes 3 s.\n\n## Next\n\nIt holds 2 GB.",
        "It takes 3 s. <!-- note yesterday -->",
        "It is 1.7x as fast. <!-- from peers-gradients; 1.8 -->",
    ],
)
def test_a_figure_without_a_source_is_found(text):
    assert [*documents.unsourced_figures(text)]


@pytest.mark.parametrize(
    "text",
    [
        "It takes 3 s. <!-- note 61db621: on a quiet machine -->",
        "<!-- not measured -->\n- It takes 3 s.\n- It holds 2 GB.",
        "## One\n\n<!-- note 61db621 -->\n\nIt takes 3 s.\n\n- It holds 2 GB.",
        "It is 1.8x as fast. <!-- from peers-gradients; 1.8 -->",
        "Llama-3.2-3B of 2.11.0 has `8GB` of 32 x 512.\n\n```sh\nsleep 3 s\n```",
        "<!-- table attention -->\n| 3 s |\n<!-- end -->",
    ],
)
def test_a_figure_with_a_source_is_not_found(text):
    assert not [*documents.unsourced_figures(text)]


def test_a_figure_from_a_table_is_searched_for_there(monkeypatch):
    monkeypatch.setattr(documents, "table", lambda name: "| ours | 12.3 (1,024) |")
    assert not [*documents.unsourced_figures("It takes 12.3 ms for 1,024 GB. <!-- from any -->")]
    assert "12.4 ms: not in any." in next(documents.unsourced_figures("It takes 12.4 ms. <!-- from any -->"))


def test_the_guide_names_every_event_error_and_public_name():
    guide = (ROOT / "sebp_edge" / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w.]+)`", guide))
    for event in events.Event.__subclasses__():
        assert {event.event, event.__name__} <= named, event
    for error in vars(errors).values():
        if isinstance(error, type) and issubclass(error, errors.SebpEdgeError):
            assert named & {error.__name__, f"sebp_edge.{error.__name__}"}, error
    assert {f"sebp_edge.{name}" for name in sebp_edge.__all__} <= named
