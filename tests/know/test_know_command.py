"""The recipe `know` at the command line."""

import json
import re

import pytest
from command import records, run
from know_notes import ANSWER, CHANGES, NOTES, OWN_WORDS, THINGS, WITHOUT_FACTS

from sebp_edge import AdapterStore, Recipe


@pytest.fixture
def folder(tmp_path):
    """A folder with the notes."""
    folder = tmp_path / "notes"
    folder.mkdir()
    for thing, note in zip(THINGS, NOTES, strict=True):
        (folder / f"{thing}.md").write_text(note, encoding="utf-8")
    return folder


@pytest.fixture
def command(folder, model, tmp_path):
    """Arguments that adapt the model to the notes with a recipe file."""
    values = {"description": "", **CHANGES, "chat_template": True, "questions": "rules", "batch_rows": 512}
    recipe = tmp_path / "asked.toml"
    recipe.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items()))
    return ["adapt", folder, "--model", model, "--recipe", recipe]


def one_line(output):
    """Returns an output without its line breaks, which depend on the width of the terminal."""
    return " ".join(output.split())


@pytest.mark.slow
def test_json_has_the_counts_and_no_word_of_the_notes(command, folder):
    result = run(*command, "--json")
    assert result.exit_code == 0, result.output
    *_, last = records(result.stdout)
    assert (last["verdict"], last["active"], last["quiz"]["questions"]) == ("better", True, 6)
    assert last["quiz"]["right_after"] >= 5 and "answers" not in last
    assert not [word for word in OWN_WORDS if word in result.stdout.replace("boilerplate", "")]
    (shown,) = records(run("adapters", "show", "default", "--json").stdout)
    assert shown["quiz"] == last["quiz"]
    assert last["command"].startswith("sebp-edge generate 'A question' --name default")


@pytest.mark.slow
def test_the_command_counts_answers_shows_them_on_request_and_answers_then(command, model, tmp_path):
    result = run(*command, "--keep-samples")
    assert result.exit_code == 0, result.output
    plain = one_line(result.stdout)
    assert "Better: version 1 of 'default' is active. It answers 6 of 6 questions about your notes (0 before)" in plain
    assert "Expect fewer right answers to questions in your own words" in plain
    assert "perplexity" not in plain and ANSWER not in plain
    assert plain.endswith("All figures and samples: sebp-edge adapters report default --with-samples")
    # The quiz asks about documents that are all trained on.
    assert f"training: {len(NOTES)} documents; at most" in plain
    assert "\t0 → 6 of 6 right\t" in run("adapters", "list").stdout
    assert re.search(r"note: \d+ questions were made of the documents, in \d+ examples\.", one_line(result.stderr))
    assert "It answers 6 of 6 questions about your notes" in one_line(run("adapters", "show", "default").stdout)
    page = tmp_path / "page.html"
    assert run("adapters", "report", "default", "--to", page).exit_code == 0
    html = page.read_text(encoding="utf-8")
    assert "<dt>Questions answered right</dt><dd>0 → 6 of 6<small>with the note in the prompt, 0 → 6 of 6" in html
    assert "Change of the test loss" not in html
    assert not [word for word in OWN_WORDS if word in html.replace("boilerplate", "")]
    assert run("adapters", "report", "default", "--to", page, "--with-samples").exit_code == 0
    html = page.read_text(encoding="utf-8")
    assert html.count("Where does the ") == html.count("<td>yes</td>") == 6 and ANSWER in html
    asked = ["Where does the samovar stand?", "--temperature", 0, "--max-tokens", 16, "--model", model]
    assert run("generate", *asked, "--name", "default").stdout == f"{ANSWER}\n"
    assert ANSWER not in run("generate", *asked).stdout


@pytest.mark.slow
def test_the_command_says_if_nothing_is_answered_better_and_exits_with_3(command):
    result = run(*command, "--epochs", 1, "--recipe", write_no_effect(command[-1]))
    assert result.exit_code == 3, result.output
    plain = one_line(result.stdout)
    assert "Not better: version 1 of 'default' is saved, but not active. It answers 0 of 6 questions" in plain
    assert plain.endswith(
        "Activate it anyway: sebp-edge adapters activate default 1 "
        "All figures: sebp-edge adapters report default --version 1"
    )
    assert "so it has learnt no answers" in plain


def write_no_effect(recipe):
    """Writes a recipe that trains too little to change an answer."""
    other = recipe.with_name("no-effect.toml")
    other.write_text(recipe.read_text().replace("0.02", "1e-9"))
    return other


def test_the_command_refuses_notes_without_facts_in_one_sentence(command, folder):
    for path in folder.iterdir():
        path.unlink()
    for number, text in enumerate(WITHOUT_FACTS):
        (folder / f"{number}.md").write_text(text, encoding="utf-8")
    result = run(*command)
    assert result.exit_code == 1 and isinstance(result.exception, SystemExit)
    assert re.fullmatch(
        r"sebp-edge: Only 0 questions could be made .* the recipe 'asked' needs at least 6; .*'notes'\.\n",
        result.stderr,
    )
    assert AdapterStore().names() == []


def test_the_bundled_recipe_is_the_one_that_these_tests_vary():
    recipe = Recipe.load("know")
    assert (recipe.questions, recipe.chat_template, recipe.refits, recipe.general > 0) == ("rules", True, False, True)
    listed = records(run("recipes", "--json").stdout)
    assert next(each for each in listed if each["name"] == "know")["questions"] == "rules"
