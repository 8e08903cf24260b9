"""Documents: links have targets, pages are short, figures have sources, and public names, events and errors a page."""

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
def test_a_page_has_at_most_300_lines(document):
    lines = len(document.read_text(encoding="utf-8").splitlines())
    assert lines <= 300


def test_the_first_page_links_every_page_of_the_guide():
    first = (ROOT / "README.md").read_text(encoding="utf-8")
    linked = {(ROOT / target).resolve() for target in re.findall(r"\]\(([^)\s#]+)", without_code(first))}
    assert {*(ROOT / "sebp_edge").rglob("*.md"), *(ROOT / "kernels").glob("*.md")} <= linked


@pytest.mark.parametrize("document", documents.DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_tables_are_what_the_results_say_and_figures_have_a_source(document):
    text = document.read_text(encoding="utf-8")
    sources = documents.all_sources().get(document.relative_to(ROOT).as_posix(), {})
    assert not [*documents.stale_tables(text), *documents.unsourced_figures(text, sources)]


def test_no_source_is_of_a_document_that_is_gone():
    assert all((ROOT / name).is_file() for name in documents.all_sources())


def test_a_table_that_differs_from_its_results_is_found():
    text = documents.filled("<!-- table attention -->\n<!-- end -->\n")
    assert "| Llama-3.2-3B |" in text
    assert not [*documents.stale_tables(text)]
    assert [*documents.stale_tables(text.replace("Llama-3.2-3B |", "Llama-3.2-3B  |"))]
    assert [*documents.stale_tables("<!-- table attention -->\n")]


NOTE = "note 61db621: on a quiet machine"


@pytest.mark.parametrize(
    ("text", "sources"),
    [
        ("It takes 3 s.", {}),
        ("It takes 1.5x.", {}),
        ("# One\n\nIt takes 3 s. It holds 2 GB.", {"One": {NOTE: ["3 s"]}}),
        ("# One\n\nIt takes 3 s.\n\n## Two\n\nIt holds 2 GB.", {"One": {NOTE: ["3 s"]}}),
        ("# One\n\n| a | b |\n|---|---|\n| 1 | 2.5 |", {"One": {}}),
        ("# One\n\nIt takes 3 s.", {"One": {"note yesterday": ["3 s"]}}),
        ("# One\n\nIt is 1.7x as fast.", {"One": {"from peers-gradients": ["1.7x"]}}),
        ("# One\n\nIt takes 3 s. <!-- note 61db621 -->", {"One": {NOTE: ["3 s"]}}),
        ("# One\n\nAt commit 61db621.\n\n## Two\n\n# Three\n\nIt takes 3 s.", {}),
    ],
)
def test_a_figure_without_a_source_is_found(text, sources):
    assert [*documents.unsourced_figures(text, sources)]


@pytest.mark.parametrize(
    ("text", "sources"),
    [
        ("# One\n\nIt takes 3 s.", {"One": {NOTE: ["3 s"], "not measured": ["4 s"]}}),
        ("# One\n\nIt takes 3 s.", {"One": {NOTE: ["3 s"]}, "Two": {}}),
    ],
)
def test_a_source_whose_figure_or_heading_is_gone_is_found(text, sources):
    assert [*documents.unsourced_figures(text, sources)]


@pytest.mark.parametrize(
    ("text", "sources"),
    [
        ("# One\n\nIt takes 3 s.\n\n- It holds 2\n  GB.", {"One": {NOTE: ["3 s", "2 GB"]}}),
        ("# One\n\nIt takes 3 s.\n\n## Two\n\nIt takes 3 s.", {"One": {NOTE: ["3 s"]}, "Two": {NOTE: ["3 s"]}}),
        ("# One\n\n| a | b |\n|---|---|\n| 1 | 2.5 |", {"One": {"not measured": ["2.5"]}}),
        ("# One\n\nat commit 61db621\n\n## Two\n\nIt takes 3 s.", {}),
        ("# One\n\nLlama-3.2-3B of 2.11.0 has `8GB` of 32 x 512.\n\n```sh\nsleep 3 s\n```", {}),
        ("# One\n\n<!-- table attention -->\n| 3 s |\n<!-- end -->", {}),
    ],
)
def test_a_figure_with_a_source_is_not_found(text, sources):
    assert not [*documents.unsourced_figures(text, sources)]


def test_a_figure_from_a_table_is_searched_for_there():
    written = documents.table("end-to-end")
    small, large = (re.search(pattern, written)[0] for pattern in (r"\b\d+\.\d\b", r"\b\d+,\d{3}\b"))
    sources = {"One": {"from end-to-end": [f"{small} ms", f"{large} GB", "0.98765"], "not measured": ["7 s"]}}
    found = documents.unsourced_figures(f"# One\n\n{small} ms, {large} GB, 7 s and 0.98765", sources)
    assert [*found] == [":1: 0.98765: not in end-to-end."]
    # Beside a table's figures, a decimal number without a unit is one, too.
    sources = {"One": {"from end-to-end": [f"{small} ms"]}}
    assert "0.98765" in next(documents.unsourced_figures(f"# One\n\n{small} ms and 0.98765", sources))


def test_the_pages_for_apps_name_every_event_error_and_public_name():
    pages = [ROOT / "sebp_edge" / "guide" / name for name in ("for-apps.md", "messages.md")]
    page = "".join(each.read_text(encoding="utf-8") for each in pages)
    named = set(re.findall(r"`([\w.]+)`", page))
    for event in events.Event.__subclasses__():
        assert {event.event, event.__name__} <= named, event
    for error in vars(errors).values():
        if isinstance(error, type) and issubclass(error, errors.SebpEdgeError):
            assert named & {error.__name__, f"sebp_edge.{error.__name__}"}, error
    assert {f"sebp_edge.{name}" for name in sebp_edge.__all__} <= named
