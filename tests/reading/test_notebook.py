"""Notebooks are read as prose and blocks of code, without outputs."""

import json

import pytest
from reading import contents, left_out, write_file


def notebook(*cells, **others) -> str:
    return json.dumps({"cells": cells, "nbformat": 4, **others})


def test_prose_and_code_are_read_and_outputs_are_not(tmp_path):
    cells = [
        {"cell_type": "markdown", "source": ["# Soup\n", "Lentils."]},
        {"cell_type": "code", "source": "print(1)\n", "outputs": [{"text": ["secret"]}]},
        {"cell_type": "code", "source": []},
        {"cell_type": "raw", "source": "raw"},
    ]
    path = write_file(tmp_path, "a.ipynb", notebook(*cells, metadata={"language_info": {"name": "python"}}))
    assert contents(path) == ["# Soup\nLentils.\n\n```python\nprint(1)\n```"]


def test_a_notebook_of_format_3_is_read(tmp_path):
    cells = [{"cell_type": "heading", "source": "Soup"}, {"cell_type": "code", "input": ["x = 1"]}]
    path = write_file(tmp_path, "a.ipynb", json.dumps({"worksheets": [{"cells": cells}], "nbformat": 3}))
    assert contents(path) == ["Soup\n\n```\nx = 1\n```"]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ("{", "not a valid notebook (not JSON)"),
        ("[" * 100_000, "not a valid notebook (not JSON)"),
        ("[]", "not a valid notebook (no cells)"),
        ('{"cells": 3}', "not a valid notebook (no cells)"),
        ('{"worksheets": [3, {"cells": 3}]}', "empty"),
        (notebook(), "empty"),
        (notebook(3, None, {"cell_type": "code", "source": {"a": 1}}, {"source": [1, 2]}, metadata=[]), "empty"),
        (b"\0", "binary file"),
    ],
)
def test_a_damaged_or_empty_notebook_is_left_out(folder, data, reason):
    write_file(folder, "a.ipynb", data)
    assert left_out(folder) == {"a.ipynb": reason}
