"""The recipe `ask` at the command line."""

import json

import pytest
from command import records, run
from reader_notes import ANSWER, CHANGES


@pytest.fixture
def command(model, tmp_path):
    """Arguments that train a reader with a recipe file."""
    values = {"description": "", **CHANGES, "chat_template": True, "questions": "practice", "batch_rows": 512}
    recipe = tmp_path / "reading.toml"
    recipe.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items()))
    return ["adapt", "--model", model, "--recipe", recipe]


def one_line(output):
    """Returns an output without its line breaks, which depend on the width of the terminal."""
    return " ".join(output.split())


@pytest.mark.slow
def test_the_command_trains_a_reader_that_ask_uses_then(command, model, tmp_path):
    notes = tmp_path / "notes"
    notes.mkdir()
    (notes / "bellows.md").write_text(f"The bellows hangs near the door.\n\nIt stands {ANSWER}.")
    (notes / "wind.md").write_text("The wind was from the west.")
    question = ["ask", "Where does the bellows stand?", notes]
    result = run(*command, "--keep-samples")
    assert result.exit_code == 0, result.output
    plain = one_line(result.stdout)
    assert "Of 5 questions about notes that it has not seen, it answers 5 right" in plain
    assert "\t0 → 5 of 5 right\t" in run("adapters", "list").stdout
    page = tmp_path / "page.html"
    assert run("adapters", "report", "reader", "--to", page, "--with-samples").exit_code == 0
    html = page.read_text(encoding="utf-8")
    assert "<dt>Questions answered right</dt><dd>0 → 5 of 5<small>about notes that were not trained on" in html
    assert html.count("<td>yes</td>") == 5 and "Change of the test loss" not in html
    answered = run(*question, "--model", model, "--name", "reader")
    assert answered.stdout.startswith(f"{ANSWER}\n"), answered.output
    # The model is at the path that the store remembers.
    assert run(*question).stdout == answered.stdout
    again = run(*command, "--json")
    assert records(again.stdout)[-1]["unchanged"]


@pytest.mark.slow
def test_json_has_the_counts_and_no_answers(command):
    result = run(*command, "--json")
    assert result.exit_code == 0, result.output
    *_, last = records(result.stdout)
    assert (last["verdict"], last["active"], last["quiz"]["right_after"]) == ("better", True, 5)
    assert last["command"].startswith("sebp-edge ask 'A question' NOTES --name reader")
    assert "answers" not in last and ANSWER not in result.stdout


def test_other_recipes_ask_for_a_path():
    result = run("adapt", "--recipe", "notes")
    assert result.exit_code == 2 and isinstance(result.exception, SystemExit)
    assert one_line(result.stderr).endswith("No PATH was given; give files or folders with your texts.")
