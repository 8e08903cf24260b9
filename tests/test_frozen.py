"""PyInstaller's hook collects all that a frozen app needs of this package."""

import importlib.metadata
import json
import runpy
import shutil
from pathlib import Path

import pytest
from command import python

import sebp_edge

ROOT = Path(__file__).parents[1]
(ENTRY,) = [each for each in importlib.metadata.entry_points(group="pyinstaller40") if "sebp_edge" in each.module]
(HOOK,) = [path for folder in ENTRY.load()() for path in Path(folder).glob("hook-*.py")]
REFUSING_HOOK = HOOK.parent / "pre_safe_import_module" / HOOK.name
# With the installed copy in place of what is imported, and as in PyInstaller's own process, which would import torch.
RUN_HOOK = """
import json, runpy, sys
sys._pyi_isolated_subprocess = True
for name in [name for name in sys.modules if name.partition(".")[0] == "sebp_edge"]:
    del sys.modules[name]
sys.path.insert(0, sys.argv[3])
runpy.run_path(sys.argv[2])["pre_safe_import_module"](None)
found = runpy.run_path(sys.argv[1])
print(json.dumps({name: found[name] for name in ("datas", "hiddenimports", "module_collection_mode")}))
"""


@pytest.fixture(scope="module")
def collected(tmp_path_factory):
    """What the hook collects from an installed copy of the package."""
    installed = tmp_path_factory.mktemp("installed")
    for source, target in (("sebp_edge", ""), ("kernels/ops", "ops"), ("recipes", "recipes")):
        shutil.copytree(ROOT / source, installed / "sebp_edge" / target, dirs_exist_ok=True)
    hook = installed / "sebp_edge" / "cli" / "frozen" / HOOK.name
    output = python(RUN_HOOK, hook, REFUSING_HOOK, installed)
    return json.loads(output.splitlines()[-1]) | {"installed": installed}


def test_pyinstaller_finds_the_hook():
    assert ENTRY.name == "hook-dirs"
    assert HOOK.name == "hook-sebp_edge.py"


@pytest.mark.slow
def test_all_data_files_are_collected(collected):
    installed = collected["installed"]
    found = {Path(source) for source, _ in collected["datas"]}
    own = {
        path for path in (installed / "sebp_edge").rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")
    }
    assert {"notes.toml", "model.safetensors", "report.html", "choices-h100.json"} <= {path.name for path in own}
    assert own <= found
    targets = {Path(target, Path(source).name).as_posix() for source, target in collected["datas"]}
    assert {"sebp_edge/recipes/notes.toml", "sebp_edge/engine/models/tiny/model.safetensors"} <= targets
    assert "huggingface_hub/templates/modelcard_template.md" in targets


@pytest.mark.slow
def test_modules_that_are_imported_by_name_are_collected(collected):
    assert set(sebp_edge._HOMES.values()) <= set(collected["hiddenimports"])
    assert not any(name.startswith(ENTRY.module) for name in collected["hiddenimports"])


@pytest.mark.slow
def test_the_kernels_source_is_collected(collected):
    with_kernels = {path for path in (ROOT / "kernels").rglob("*.py") if "@triton.jit" in path.read_text()}
    assert with_kernels
    assert {path.parent for path in with_kernels} == {ROOT / "kernels" / "ops" / "gpu"}
    assert collected["module_collection_mode"] == {"sebp_edge.ops.gpu": "pyz+py"}


@pytest.mark.skipif(not Path(sebp_edge.__file__).is_relative_to(ROOT), reason="needs an editable install")
def test_an_editable_install_is_refused_with_one_sentence_before_anything_is_collected():
    hook = runpy.run_path(str(REFUSING_HOOK))["pre_safe_import_module"]
    with pytest.raises(
        SystemExit, match=r"^PyInstaller cannot collect sebp-edge .* editable install\. Install a wheel"
    ):
        hook(None)
