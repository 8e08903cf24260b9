"""The house: imports go down, every folder ships, the public names are the promised ones."""

import ast
import importlib
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import sebp_edge

ROOT = Path(__file__).parents[1]

# From the top down. A module may import from its own layer and from those below it.
LAYERS = [
    ["cli", "frozen"],
    ["personalizer"],
    ["result", "saving"],
    ["insight"],
    ["adapters"],
    ["training"],
    ["memory"],
    ["sparse"],
    ["patches"],
    ["texts"],
    ["rows"],
    ["models"],
    ["machine"],
    ["recipe", "events"],
    ["errors", "stopping", "units", "files", "interruptions"],
    ["ops"],
]
DEPTH = {name: depth for depth, layer in enumerate(LAYERS) for name in layer}

# Heavy libraries stay where a reader expects them.
HOMES = {
    "transformers": ("sebp_edge/models/", "sebp_edge/sparse/hoist.py"),
    "peft": ("sebp_edge/models/lora.py",),
    "triton": ("kernels/ops/gpu/", "kernels/ops/choices.py"),
    "huggingface_hub": ("sebp_edge/models/hub.py", "sebp_edge/insight/doctor.py"),
    "typer": ("sebp_edge/cli/",),
    "rich": ("sebp_edge/cli/",),
    "platformdirs": ("sebp_edge/adapters/", "sebp_edge/files.py"),
}


def sources():
    for folder in ("sebp_edge", "kernels/ops"):
        yield from sorted((ROOT / folder).rglob("*.py"))


def layer_of(path: Path) -> str:
    if path.is_relative_to(ROOT / "kernels"):
        return "ops"
    return path.relative_to(ROOT / "sebp_edge").parts[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_imports_go_down():
    wrong = []
    for path in sources():
        layer = layer_of(path)
        if layer == "__init__":
            continue
        for name in imported(path):
            parts = name.split(".")
            if parts[0] == "sebp_edge" and len(parts) > 1 and parts[1] in DEPTH and DEPTH[parts[1]] < DEPTH[layer]:
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not wrong


def test_every_module_has_a_layer():
    assert {layer_of(path) for path in sources()} - {"__init__"} <= DEPTH.keys()


@pytest.mark.parametrize("library", HOMES)
def test_libraries_stay_in_their_rooms(library):
    for path in sources():
        where = path.relative_to(ROOT).as_posix()
        if any(name.split(".")[0] == library for name in imported(path)):
            assert where.startswith(HOMES[library]), where


def test_every_package_is_shipped():
    shipped = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    there = {".".join(path.parent.relative_to(ROOT).parts) for path in (ROOT / "sebp_edge").rglob("__init__.py")}
    assert sorted(shipped) == sorted(there | {"sebp_edge.ops", "sebp_edge.ops.gpu", "sebp_edge.recipes"})


@pytest.mark.parametrize(
    ("package", "files"),
    [
        ("sebp_edge.ops", "kernels/ops/*.json"),
        ("sebp_edge.models", "sebp_edge/models/*/*.json"),
        ("sebp_edge.insight", "sebp_edge/insight/*.html"),
    ],
)
def test_every_data_file_is_shipped(package, files):
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    found = list(ROOT.glob(files))
    assert found
    for path in found:
        assert any(path.match(pattern) for pattern in setuptools["package-data"][package]), path


def test_nothing_shadows_the_kernels_package():
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert not (ROOT / "kernels" / "triton").exists()


def test_the_public_names():
    assert sebp_edge.__all__ == [
        "AdaptResult",
        "AdapterStore",
        "Personalizer",
        "Recipe",
        "SebpEdgeError",
        "__version__",
        "sparsify",
    ]
    for name in sebp_edge.__all__:
        assert getattr(sebp_edge, name) is not None
    with pytest.raises(AttributeError):
        _ = sebp_edge.nonsense


def test_the_version_is_the_packages():
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == sebp_edge.__version__


def test_every_module_says_what_it_is_for():
    for path in sources():
        assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))), path


def test_importing_the_package_imports_no_torch():
    code = "import sys, sebp_edge, sebp_edge.cli; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_module_can_be_imported_alone():
    for path in sorted((ROOT / "sebp_edge").rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        assert importlib.import_module(name)
