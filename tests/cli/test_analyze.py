"""`sebp-edge analyze`: table, HTML page, JSON, and one-sentence errors."""

import json
import re

import pytest
from command import RECIPE, assert_one_sentence, records, run


@pytest.fixture
def analyze(notes_folder, two_layer_folder, tmp_path):
    """The arguments of an analysis of a few texts."""
    (tmp_path / "quick.toml").write_text(RECIPE)
    named = {
        "--model": two_layer_folder,
        "--recipe": tmp_path / "quick.toml",
        "--examples": 4,
        "--html": tmp_path / "page.html",
    }
    return ["analyze", str(notes_folder), *(str(part) for pair in named.items() for part in pair)]


@pytest.mark.slow
def test_an_analysis_on_a_pipe_is_a_table_of_shares_and_a_page(analyze, tmp_path):
    result = run(*analyze)
    assert result.exit_code == 0
    rows = [line.split("\t") for line in result.stdout.splitlines() if "\t" in line]
    assert [row[:2] for row in rows] == [["every token", layers] for layers in ("0", "1 (last)", "head")]
    assert all(re.fullmatch(r"\d+\.\d %", share) for row in rows for share in row[2:])
    assert "Analyzed 4 of 24 examples" in result.stdout
    assert re.search(r"SEBP does \d+\.\d % of the work", result.stdout)
    assert result.stdout.endswith(f"written to {tmp_path / 'page.html'}\n")
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")


@pytest.mark.slow
def test_an_analysis_of_completions_has_a_table_for_each_loss(analyze, tmp_path):
    lines = [{"prompt": f"the map number {number}", "completion": " is old"} for number in range(9)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, lines)))
    output = run("analyze", tmp_path / "pairs.jsonl", *analyze[2:]).stdout
    assert output.index("Loss on every token: ") < output.index("Loss on trained tokens: ")
    assert [line.split("\t")[0] for line in output.splitlines() if "\t" in line] == [
        *["every token"] * 3,
        *["trained tokens"] * 3,
    ]


@pytest.mark.slow
def test_an_analysis_in_json_writes_a_page_only_on_request(analyze, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    *events, last = records(run(*analyze[:-2], "--json").stdout)
    kinds = {"started", "progress", "preparing", "model_loaded", "texts_read", "example_analyzed"}
    assert {event["event"] for event in events} == kinds
    assert (last["event"], last["html"], last["analyzed"]["examples"]) == ("analysis", None, 4)
    assert list(tmp_path.glob("here/*")) == []
    assert run(*analyze[:-2]).stdout.endswith("written to sebp-edge-analysis.html\n")
    # Overwrites its own page.
    other = records(run(*analyze[:-2], "--html", "sebp-edge-analysis.html", "--json").stdout)[-1]
    assert other == last | {"html": "sebp-edge-analysis.html", "time": other["time"]}


def test_an_analysis_without_texts_or_over_another_file_is_one_sentence(analyze, tmp_path):
    assert_one_sentence(run("analyze", tmp_path / "nowhere", *analyze[2:]), "There is no file or folder")
    assert run(*analyze[:2], "--examples", 0).exit_code == 2
    assert_one_sentence(run(*analyze[:-1], "nowhere/page.html"), "The folder 'nowhere' does not exist; create it")
    (tmp_path / "page.html").write_text("mine")
    assert_one_sentence(
        run(*analyze), "already exists and is not an earlier analysis; choose another file", exit_code=2
    )
    assert (tmp_path / "page.html").read_text() == "mine"
