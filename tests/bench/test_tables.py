"""Tables: data and templates become Markdown, and the pages of studies name the commit that has their scripts."""

import json
import re
import subprocess

import pytest

import documents
import evidence
import tables

# Pages of which each section is about a study, and where the scripts of studies were.
STUDIES = ("how-the-gate-decides.md", "how-the-recipes-were-chosen.md")
FOLDERS = ("", "formats/", "quality/", "speed/")

WORDS = "[words]\nnames = { a = 'A', b = '**B**' }\n"


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Function that records rows and returns the table of a specification in TOML."""

    def write(specification, **results):
        (tmp_path / "tables.toml").write_text(f"{WORDS}[tables.one]\n{specification}", encoding="utf-8")
        (tmp_path / "results.json").write_text("{}")
        for name, rows in results.items():
            evidence.record(name, ["recipes"], rows, tmp_path / "results.json", on_cpu=True)
        return tables.table("one")

    monkeypatch.setattr(tables, "SPECIFICATIONS", tmp_path / "tables.toml")
    monkeypatch.setattr(evidence, "RESULTS", tmp_path / "results.json")
    monkeypatch.setenv("SEBP_EDGE_COMMIT", "0123456789")
    tables.specifications.cache_clear()
    yield write
    tables.specifications.cache_clear()


ROWS = [
    {"way": "b", "texts": 1, "ms": 20.0},
    {"way": "b", "texts": 4, "ms": 1200.0},
    {"way": "a", "texts": 1, "ms": 10.0},
    {"way": "a", "texts": 4, "ms": None},
]


def test_rows_become_lines_and_values_become_columns(written):
    table = written(
        """
        line = "{way}"
        sort = "[*words['names']].index(way)"
        columns = [
            ["", "{words['names'][way]}"],
            ["{texts} text{'s' * (texts > 1)}", "{'' if row['ms'] is None else f'{row.ms:.1f}'}"],
        ]
        [[tables.one.more]]
        head = "a / b"
        where = "way == 'a' and texts == 1"
        cell = "{row.ms / find(way='b', texts=texts).ms:.1f}"
        """,
        one=ROWS,
    )
    lines = table.split("\n")
    assert lines[:4] == ["| | 1 text | 4 texts |", "|---|---|---|", "| A | 10.0 | |", "| **B** | 20.0 | 1200.0 |"]
    assert lines[4:6] == ["| a / b | 0.5 | |", ""]
    assert re.fullmatch(r"Recorded on .* at commit 0123456 \(.*\): `results/one.csv`\.", lines[6])


def test_a_cell_is_written_for_each_row_of_a_line_if_there_is_a_joiner(written):
    specification = """
        where = "row['ms']"
        line = "{way}"
        columns = [["way", "{way}"], ["texts", "{texts}", ", "], ["mean", "{mean(each.ms for each in group):.0f}"]]
        recorded = false
        """
    lines = written(specification, one=ROWS).split("\n")
    assert lines == ["| way | texts | mean |", "|---|---|---|", "| b | 1, 4 | 610 |", "| a | 1 | 10 |"]


def test_several_results_share_a_table_and_each_is_named(written):
    table = written('results = ["run-*"]\ncolumns = [["of", "{result}"]]', **{"run-1": ROWS[:1], "run-2": ROWS[:1]})
    assert "| run-1 |\n| run-2 |" in table and table.endswith("`results/run-1.csv`, `results/run-2.csv`.")


def test_a_table_without_results_says_so(written):
    assert written('columns = [["way", "{way}"]]') == tables.NOT_RECORDED


@pytest.mark.slow
def test_every_table_is_in_a_document_and_can_be_written():
    pages = "".join(document.read_text(encoding="utf-8") for document in documents.DOCUMENTS)
    shown = set(re.findall(r"^<!-- table ([\w-]+) -->$", pages, re.MULTILINE))
    assert set(tables.names()) == shown
    for name in tables.names():
        assert "|" in tables.table(name) or "`results/" in tables.table(name)


@pytest.mark.slow
def test_every_study_names_the_last_commit_with_its_script():
    pages = {page.name: page.read_text(encoding="utf-8") for page in evidence.RESULTS.parent.glob("*.md")}
    sections = [
        (name, section) for name, page in pages.items() for section in re.split(r"^## ", page, flags=re.MULTILINE)[1:]
    ]
    studies = [section for name, section in sections if name in STUDIES or ", last at" in section]
    assert len(studies) >= 11
    for section in studies:
        found = re.search(r"at commit ([0-9a-f]{7})", section)
        assert found, section.splitlines()[0]
        for scripts, commit in re.findall(r"([^()\n;]*), last at commit ([0-9a-f]{7})", section):
            named = re.findall(r"`(?:formats/)?(\w+\.py)`", scripts)
            assert named and all(
                any(in_commit(commit, f"kernels/bench/{folder}{script}") for folder in FOLDERS) for script in named
            ), named


def in_commit(commit, path):
    """Whether a commit has a file; True in a copy without this history."""

    def has(what):
        command = ["git", "-C", evidence.ROOT, "cat-file", "-e", what]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0

    return not (evidence.ROOT / ".git").exists() or not has(commit) or has(f"{commit}:{path}")


def test_results_that_no_page_names_are_not_kept():
    pages = "".join(document.read_text(encoding="utf-8") for document in documents.DOCUMENTS)
    results = json.loads(evidence.RESULTS.read_text())
    for entry in results.values():
        assert "table" not in entry or f"`{entry['table']}`" in pages or "nm-quality" in entry["table"], entry["table"]
