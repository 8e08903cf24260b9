"""Benchmarks are scripts: each starts from its own folder, without a path that somebody set."""

import pytest
from command import python

import evidence

HELP = """
import contextlib, io, pathlib, runpy, sys

before, folder = sys.path[1:], pathlib.Path(sys.argv[1])
own = {path.name for path in folder.iterdir()}
scripts = [path for path in sorted(folder.glob("*/*.py")) if "parse_args" in path.read_text(encoding="utf-8")]
for script in scripts:
    if '__name__ == "__main__"' not in script.read_text(encoding="utf-8"):
        continue
    sys.path[:] = [str(script.parent), *before]
    # As in a process of its own: nothing of the benchmarks is known.
    for name, module in list(sys.modules.items()):
        if str(folder) in str(getattr(module, "__file__", "")) or name in own:
            del sys.modules[name]
    sys.argv[:] = [str(script), "--help"]
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as end:
            assert not end.code, script
    assert out.getvalue().startswith("usage: "), script
    print(script.stem)
"""


@pytest.mark.slow
def test_every_script_finds_the_others_from_its_own_folder():
    started = python(HELP, str(evidence.RESULTS.parent)).split()
    assert {"peers", "end_to_end", "budgets", "families", "reading", "merged_models"} <= set(started)
