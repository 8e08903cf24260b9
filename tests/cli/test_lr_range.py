"""`sebp-edge lr-range`: a table and a sentence, JSON, and one-sentence errors."""

import re

import pytest
from command import assert_one_sentence, records, run


@pytest.fixture
def lr_range(notes_folder, model_folder, recipe):
    """The arguments of a short range test."""
    return [
        "lr-range",
        str(notes_folder),
        "--model",
        str(model_folder),
        "--recipe",
        str(recipe),
        "--steps",
        "20",
        "--lowest",
        "0.01",
    ]


@pytest.mark.slow
def test_a_range_test_on_a_pipe_is_a_table_and_a_sentence(lr_range):
    result = run(*lr_range)
    assert result.exit_code == 0
    rows = [line.split("\t") for line in result.stdout.splitlines() if "\t" in line]
    assert [row[0] for row in rows][:: len(rows) - 1] == ["1.0e-02", "1.0e+00"]
    assert all(re.fullmatch(r"\d+\.\d{3}", loss) for row in rows for loss in row[1:3])
    assert result.stdout.splitlines()[-1].startswith("The loss ")


@pytest.mark.slow
def test_a_range_test_in_json_ends_with_its_outcome(lr_range):
    *events, last = records(run(*lr_range, "--json").stdout)
    assert {"model_loaded", "texts_read", "step"} <= {event["event"] for event in events}
    assert (last["event"], last["planned_steps"]) == ("lr_range", 20)


@pytest.mark.parametrize(
    ("options", "words", "exit_code"),
    [
        (["--lowest", "1e-6"], "steps=20 would be too few to tell; expected a whole number of at least 60", 2),
        (["--lowest", "1", "--highest", "0.1"], "expected two learning rates above 0, the lower one first", 2),
        (["--lowest", "nan"], "expected two learning rates above 0, the lower one first", 2),
        (["--memory", "lots"], "The memory budget", 2),
        (["--recipe", "note"], "Unknown recipe 'note'; did you mean 'notes'", 1),
    ],
)
def test_an_invalid_option_of_a_range_test_is_one_sentence(lr_range, options, words, exit_code):
    assert_one_sentence(run(*lr_range, *options), words, exit_code)
