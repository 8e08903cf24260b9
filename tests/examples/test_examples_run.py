"""The code in the README and the examples runs."""

import re
import shutil
from pathlib import Path

import pytest
from command import python

ROOT = Path(__file__).parents[2]


@pytest.fixture
def checkout(tmp_path):
    """A function that makes a checkout with the shorter ones of some example notes, or with their beginnings."""

    def make(longest, kept=None):
        for part in ("garden", "cooking"):
            folder = shutil.copytree(ROOT / "examples" / "notes" / part, tmp_path / "examples" / "notes" / part)
            for note in folder.iterdir():
                if note.stat().st_size > longest:
                    note.unlink()
                elif kept and note.suffix != ".png":
                    note.write_text(note.read_text(encoding="utf-8")[:kept], encoding="utf-8")
        return tmp_path

    return make


def run(folder, example, *arguments):
    """Returns what an example prints that runs in this folder."""
    code = "import os, runpy, sys, warnings; warnings.simplefilter('ignore'); os.chdir(sys.argv[1]); del sys.argv[:2]; "
    code += "runpy.run_path(sys.argv[0], run_name='__main__')"
    return python(code, folder, ROOT / "examples" / example, *arguments)


@pytest.mark.slow
def test_the_readmes_code_is_the_quickstart_and_runs(checkout):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    quickstart = (ROOT / "examples" / "quickstart.py").read_text(encoding="utf-8")
    assert blocks and all(block.strip() in quickstart for block in blocks)
    folder = checkout(900, kept=40)
    assert "max_new_tokens=80)" in quickstart
    example = folder / "quickstart.py"
    example.write_text(quickstart.replace("max_new_tokens=80)", "max_new_tokens=4)"), encoding="utf-8")
    assert "Better: version 1" in run(folder, example)


@pytest.mark.slow
def test_the_flat_loop_learns(checkout):
    folder = checkout(800)
    (folder / "sebp_edge").symlink_to(ROOT / "sebp_edge")
    code = (ROOT / "examples" / "flat_loop.py").read_text(encoding="utf-8")
    assert "CONTEXT_LENGTH = 512\n" in code
    example = folder / "examples" / "flat_loop.py"
    example.write_text(code.replace("CONTEXT_LENGTH = 512\n", "CONTEXT_LENGTH = 64\n"), encoding="utf-8")
    output = run(folder, example, folder / "examples" / "notes")
    before, after = map(float, re.search(r"held-out loss ([\d.]+) -> ([\d.]+)", output).groups())
    assert after < 0.95 * before


def test_every_module_is_in_its_folders_map():
    """The docstrings of these folders say what each of their files is for."""
    for folder in (
        "machine",
        "engine/memory",
        "engine/sparse",
        "engine/sparse/patches",
        "engine/sparse/rows",
        "reading",
        "lessons",
        "store",
        "values",
        "engine/training",
    ):
        source = (ROOT / "sebp_edge" / folder / "__init__.py").read_text(encoding="utf-8")
        for path in (ROOT / "sebp_edge" / folder).glob("[a-z]*.py"):
            assert re.search(rf"\b{path.stem}\b", source), path


def test_the_example_notes_show_what_is_left_out(make):
    found = make().inspect(ROOT / "examples" / "notes")
    assert found.documents >= 60
    assert len({group.reason.split(" (")[0].split("same as")[0] for group in found.left_out}) >= 5
