"""The house: rooms use only the rooms that the lists name, every folder ships, the public names are as promised."""

import ast
import graphlib
import importlib
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest
from python_files import ROOT, imports_of, module_of, names_in, nodes_of, tree_of

import sebp_edge
from sebp_edge import errors, events

# The ground, which every room may use, and what each part of it uses of the rest.
GROUND = {
    "values": "events basics errors",
    "events": "",
    "recipe": "basics errors",
    "machine": "basics errors",
    "basics.pages": "basics",
    "basics": "errors",
    "errors": "",
}
# What each other room uses besides. Whoever adds a name lets rooms see each other: `reading`, `lessons` and `store` see
# no room, `engine` knows no document, name or store, and `run` brings them together.
USES = {
    "cli": "research serve personalizer run store ask lessons reading engine ops",
    "research": "personalizer run engine ops",
    "serve": "personalizer run store engine",
    "personalizer": "run export store ask lessons reading engine",
    "run": "store ask lessons reading engine",
    "export": "store ask lessons engine",
    "store": "",
    "ask": "lessons reading",
    "lessons": "",
    "reading": "",
    "engine": "ops",
    "ops": "",
}
# What the rooms of the engine use of each other.
ENGINE = {
    "training": "memory sparse sparse.patches sparse.rows models",
    "memory": "sparse sparse.patches sparse.rows models",
    "sparse": "sparse.patches sparse.rows models",
    "sparse.patches": "sparse.rows models",
    "sparse.rows": "models",
    "models": "models.gguf",
    "models.gguf": "",
}

# Caps on what grows by itself. Raising one is a line in a diff that somebody must defend.
MAX_LINES = 52_271
MAX_LINES_OF_ROOM = {
    "files at the root": 1_592,
    "ask": 1_295,
    "basics": 979,
    "basics.pages": 257,
    "cli": 2_965,
    "engine": 9,
    "engine.memory": 1_832,
    "engine.models": 5_023,
    "engine.models.gguf": 1_394,
    "engine.sparse": 1_711,
    "engine.sparse.patches": 2_683,
    "engine.sparse.rows": 1_144,
    "engine.training": 3_932,
    "export": 1_861,
    "lessons": 2_265,
    "machine": 1_167,
    "reading": 6_390,
    "research": 1_609,
    "run": 5_798,
    "serve": 3_761,
    "store": 2_769,
    "values": 1_835,
}
MAX_ENTRIES_AT_ROOT = 20
MAX_IMPORTS_WITHIN_FUNCTIONS = 40
MAX_LINES_OF_TESTS = 58_109
MAX_REPLACED_ATTRIBUTES = 219

# Heavy libraries stay where a reader expects them.
HOMES = {
    "transformers": ("sebp_edge/engine/models/", "sebp_edge/engine/sparse/hoist.py"),
    "peft": ("sebp_edge/engine/models/lora.py",),
    "triton": ("kernels/ops/gpu/", "kernels/ops/choices.py"),
    "huggingface_hub": ("sebp_edge/engine/models/hub.py", "sebp_edge/cli/doctor_checks.py"),
    "gguf": (
        "sebp_edge/export/",
        *(f"sebp_edge/engine/models/gguf/{name}.py" for name in ("families", "rotary", "writer")),
    ),
    "xllamacpp": ("sebp_edge/export/llama_cpp.py",),
    "mlx_lm": ("sebp_edge/export/mlx_lm.py",),
    "filelock": ("sebp_edge/store/lock.py", "sebp_edge/store/new_folder.py"),
    "pathspec": ("sebp_edge/values/folder.py", "sebp_edge/reading/find_files.py"),
    "turbohtml": ("sebp_edge/reading/formats/html.py", "sebp_edge/reading/formats/encodings.py"),
    "yaml": ("sebp_edge/reading/formats/front_matter.py",),
    "pypdf": ("sebp_edge/reading/formats/pdf.py",),
    # Whoever starts a program makes it end with this one: see basics/children.py.
    "subprocess": (
        "sebp_edge/basics/children.py",
        "sebp_edge/export/child.py",
        "sebp_edge/machine/host.py",
        "sebp_edge/serve/processes.py",
        "sebp_edge/serve/streams.py",
        "sebp_edge/lessons/template_child.py",
    ),
    "typer": ("sebp_edge/cli/",),
    "rich": ("sebp_edge/cli/",),
    # Chat templates are programs in its language.
    "jinja2": ("sebp_edge/basics/pages/", "sebp_edge/lessons/templates.py", "sebp_edge/lessons/template_child.py"),
    "platformdirs": ("sebp_edge/store/", "sebp_edge/basics/files.py"),
}

# What apps and researchers import. All else is internal.
PUBLIC = {
    "sebp_edge": """
        AdaptResult Adapter AdapterRecord AdapterStore Analysis Answer Completion ExportResult Folder Inspection
        Personalizer Plan Politeness Receipt Recipe SavedAdapter SebpEdgeError UnchangedResult
        __version__ sparsify
    """,
    "sebp_edge.errors": """
        AdapterError BaseModelMismatch BudgetExceeded BusyError CannotCapture ClosedError ExportError Interrupted
        JobError MachineError ModelAccessError ModelError ModelOfflineError NonFiniteLoss OptionError OwnerUnknown
        Paused RecipeError SebpEdgeError SparsityError StorageError TextsChanged TextsError TrainingStopped
    """,
    "sebp_edge.events": """
        PROTOCOL AdapterSaved Evaluated Event ExampleAnalyzed ExamplesEvaluated GraphCaptured JobProgress JobStarted
        JsonLines LearningOn MemoryPlanned MemoryPressure MemoryProbed MemoryRanOut ModelLoaded NameInUse Notice
        PreparationProgress Sink Started StepDone TensorWritten TextsRead TrainingStarted Waiting message new_job silent
    """,
    "sebp_edge.ops": """
        ACTIVATIONS ActiveRows AdamW Chunks FourBits GatedInputs LoraGroup LoraProjection Moments
        Prefixes QuantisedScales QuantisedWeight Recompute Rows Scores ScratchBuffer Selector adamw_ detect
        gated gated_delta_rule gated_linear_attention gated_lora_linear gather_rows keep_rows linear_cross_entropy
        lora_linear nonzero_rows
        precise_sums prune_ rms_norm row_norms runs_flash_attention runs_kernels scatter_rows select_rows
        sequence_attention_ short_convolution shrink_pruned_ sparse_linear sparse_rowwise state_space tuning
    """,
    "sebp_edge.serve.client": """
        Client ServerError
    """,
    "sebp_edge.serve.http.door": """
        open_endpoint
    """,
    "sebp_edge.research": """
        ActiveTokens CapturedGradients DroppedRows Energy Hoisted HoistedEncoder NmSparse RowPlan SemiStructured
        Sparsified Threshold TopN analyze learning_rates nm_sparse semi_structured sparsify
    """,
}

# Errors outside of errors.py's tree: those that Python and the libraries require, and signals that the package catches
# itself.
OTHER_ERRORS = {
    "kernels/ops/": "ValueError RuntimeError",  # as torch's own operations; docstrings list them
    "sebp_edge/__init__.py": "AttributeError",  # of a module that lacks a name
    "sebp_edge/cli/": "typer.Exit typer.BadParameter KeyboardInterrupt SystemExit",  # the last ends PyInstaller
    # What becomes the error of an answer, and what the clients raise.
    "sebp_edge/serve/": "Refusal Damaged ToolError ValueError",
    # Reasons to refuse a file, which become an AdapterError, a ModelError or an entry of `left_out`.
    "sebp_edge/store/archive.py": "ValueError _Damaged",
    "sebp_edge/store/version_documents.py": "ValueError",
    "sebp_edge/store/erasure.py": "ValueError",
    "sebp_edge/run/forgetting.py": "UnknownDocument",
    "sebp_edge/store/record.py": "ValueError",
    "sebp_edge/store/salt.py": "ValueError",
    "sebp_edge/basics/files.py": "NewerFormat ValueError",
    "sebp_edge/engine/models/gguf/file.py": "_Unusable",
    "sebp_edge/engine/models/known_tokenizer.py": "ValueError",  # as transformers' own tokenizers
    "sebp_edge/engine/models/lora.py": "ValueError",
    "sebp_edge/basics/weights.py": "TypeError",
    # A chat template's own errors too, and signals between the processes that render it.
    "sebp_edge/values/documents.py": "Unreadable",
    "sebp_edge/lessons/": "EOFError NotShown SecurityError TemplateError TemplateRefuses TooLong Unreadable _Exceeded",
    "sebp_edge/reading/": "EOFError Unreadable ValueError json.JSONDecodeError",
    # Signals from within a computation to whoever started it.
    "sebp_edge/engine/models/decoding.py": "NonFiniteLogits",
    "sebp_edge/engine/models/small_copy.py": "ValueError",
    "sebp_edge/basics/stopping.py": "PauseRequested StopRequested",
    "sebp_edge/run/conditions.py": "NotKnown",
    "sebp_edge/engine/training/checkpoint.py": "ValueError",
    "sebp_edge/engine/training/recovery.py": "MemoryError",
    # Internal calls with wrong arguments, which no user can cause.
    "sebp_edge/engine/training/comparison.py": "ValueError",
}


def sources():
    for folder in ("sebp_edge", "kernels/ops"):
        yield from sorted((ROOT / folder).rglob("*.py"))


def room_of(module: str, rooms: Iterable[str] = USES | GROUND) -> str:
    """The room of a module below sebp_edge: the innermost folder, or file, that is one of the rooms."""
    while module not in rooms and "." in module:
        module = module.rpartition(".")[0]
    return module


def room_of_file(path: Path) -> str:
    return room_of(module_of(path).partition(".")[2]) or "__init__"


def used_rooms(rooms: Iterable[str], within: str) -> dict[str, set[str]]:
    """By room, the other rooms that it imports from; the package's own names are for apps, and above all rooms."""
    found = {room: set() for room in rooms}
    for path in sources():
        module = module_of(path)
        names = (name.removeprefix(within) for name in imports_of(path) if name.startswith(within))
        if module.startswith(within) and (room := room_of(module.removeprefix(within), rooms)) in rooms:
            found[room] |= {room_of(name, rooms) for name in names} - {room}
    return found


def test_rooms_use_what_the_lists_say_and_no_more():
    found = used_rooms(USES | GROUND, "sebp_edge.")
    besides = {room: names - GROUND.keys() if room in USES else names for room, names in found.items()}
    assert besides == {room: {*names.split()} for room, names in (USES | GROUND).items()}
    inside = used_rooms(ENGINE, "sebp_edge.engine.")
    assert inside == {room: {*names.split()} for room, names in ENGINE.items()}


def test_no_two_rooms_use_each_other():
    graph = {room: {*names.split()} | (GROUND.keys() if room in USES else set()) for room, names in USES.items()}
    graphlib.TopologicalSorter(graph | {room: {*names.split()} for room, names in GROUND.items()}).prepare()
    graphlib.TopologicalSorter({room: {*names.split()} for room, names in ENGINE.items()}).prepare()


@pytest.mark.parametrize("room", ["reading", "lessons", "store", "ask"])
def test_a_room_alone_needs_neither_torch_nor_a_room_that_it_does_not_use(room):
    modules = [module_of(path) for path in sources() if room_of_file(path) == room]
    barred = {f"sebp_edge.{other}" for other in USES if other not in (room, *USES[room].split())} | {"torch"}
    code = f"""
import importlib, sys

class Barred:
    def find_spec(self, name, path=None, target=None):
        if any(name == each or name.startswith(each + ".") for each in {barred}):
            raise ImportError(f"{{name}} is barred")

sys.meta_path.insert(0, Barred())
for module in {modules}:
    importlib.import_module(module)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_imports_within_functions_are_few():
    """They keep torch out of the command line; elsewhere they mostly hide a circle."""
    count = 0
    for path in (ROOT / "sebp_edge").rglob("*.py"):
        if not re.search(r"^\s+(from|import) ", path.read_text(encoding="utf-8"), re.MULTILINE):
            continue
        functions = [node for node in nodes_of(path) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        inner = {node for one in functions for node in ast.walk(one) if isinstance(node, ast.Import | ast.ImportFrom)}
        count += len(inner)
    assert count <= MAX_IMPORTS_WITHIN_FUNCTIONS


def test_no_room_outgrows_its_cap():
    """Lines of Python of each folder, and of all files beside them."""
    lines = Counter()
    for path in (ROOT / "sebp_edge").rglob("*.py"):
        room = "files at the root" if path.parent == ROOT / "sebp_edge" else room_of_file(path)
        if room == "engine" and path.parent.name != "engine":
            room = f"engine.{room_of(module_of(path).removeprefix('sebp_edge.engine.'), ENGINE)}"
        lines[room] += path.read_text(encoding="utf-8").count("\n")
    over = {room: count for room, count in lines.items() if count > MAX_LINES_OF_ROOM.get(room, 0)}
    assert over == {}
    assert lines.keys() == MAX_LINES_OF_ROOM.keys()
    assert lines.total() <= MAX_LINES


def test_tests_do_not_outgrow_their_caps():
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py")]
    assert sum(len(re.findall(r"\.(?:setattr|delattr)\b", text)) for text in texts) <= MAX_REPLACED_ATTRIBUTES
    assert sum(text.count("\n") for text in texts) <= MAX_LINES_OF_TESTS


def test_the_root_has_few_entries():
    entries = {path.name for path in (ROOT / "sebp_edge").iterdir()} - {"__pycache__"}
    assert len(entries) <= MAX_ENTRIES_AT_ROOT, sorted(entries)


def test_every_mutation_still_applies(monkeypatch):
    """`tests/proof/mutations.py` is run by hand; code that has changed meanwhile would end it."""
    monkeypatch.syspath_prepend(ROOT / "tests" / "proof")
    texts = [path.read_text(encoding="utf-8") for path in sources()]
    mutations = importlib.import_module("mutations").MUTATIONS
    assert [each.name for each in mutations if sum(each.code in text for text in texts) != 1] == []


def test_contributing_lists_the_rooms():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rooms = [*USES, *(f"engine.{room}" for room in ENGINE), *GROUND]
    assert re.findall(r"^- `([\w.]+)`: ", text, re.MULTILINE) == rooms


def test_ops_import_each_other_relatively():
    """Tools that read the checkout cannot know that kernels/ops is installed as sebp_edge.ops."""
    for path in (ROOT / "kernels/ops").rglob("*.py"):
        for node in nodes_of(path):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            if isinstance(node, ast.ImportFrom):
                names = [f"{'.' * node.level}{node.module or ''}.{name}" for name in names]
            assert not any(name.startswith("sebp_edge.ops") for name in names), path


def test_modules_import_each_other_in_one_direction():
    """Imports within functions count, and so do kernels, which `backend` imports by name."""
    files = {module_of(path): path for path in sources()}
    del files["sebp_edge"]  # knows the homes of the public names
    graph = {
        module: {name if name in files else name.rpartition(".")[0] for name in imports_of(path)} & files.keys()
        for module, path in files.items()
    }
    graph["sebp_edge.ops.backend"] |= {module for module in files if module.startswith("sebp_edge.ops.gpu.")}
    graphlib.TopologicalSorter(graph).prepare()


@pytest.mark.slow
@pytest.mark.parametrize("library", HOMES)
def test_libraries_stay_in_their_rooms(library):
    for path in sources():
        where = path.relative_to(ROOT).as_posix()
        if any(name.split(".")[0] == library for name in imports_of(path)):
            assert where.startswith(HOMES[library]), where


def test_a_checkout_is_importable_without_an_import_hook():
    """Type checkers, and other tools that run no hook, find an editable installation by its folder."""
    assert (
        tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["distutils"]["editable_wheel"]["mode"] == "compat"
    )
    code = f"""
import importlib.util, sys
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in repr(finder).lower()]
sys.path = [path for path in sys.path if "editable" not in path] + [{str(ROOT)!r}]
for name in ("sebp_edge.ops", "sebp_edge.recipes", "sebp_edge.serve.client"):
    print(next(iter(importlib.util.find_spec(name).submodule_search_locations or [name])))
"""
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True, cwd="/")
    assert done.stdout.split() == [str(ROOT / "kernels/ops"), str(ROOT / "recipes"), "sebp_edge.serve.client"]


def test_every_package_is_shipped():
    shipped = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    existing = {".".join(path.parent.relative_to(ROOT).parts) for path in (ROOT / "sebp_edge").rglob("__init__.py")}
    assert sorted(shipped) == sorted(existing | {"sebp_edge.ops", "sebp_edge.ops.gpu", "sebp_edge.recipes"})


@pytest.mark.parametrize(
    ("package", "files"),
    [
        ("sebp_edge.ops", "kernels/ops/*.json"),
        ("sebp_edge.engine.models", "sebp_edge/engine/models/*/*.json"),
        ("sebp_edge.store", "sebp_edge/store/*.html"),
        ("sebp_edge.research.analysis", "sebp_edge/research/analysis/*.html"),
        ("sebp_edge.basics.pages", "sebp_edge/basics/pages/*.html"),
        ("sebp_edge.cli.frozen", "sebp_edge/cli/frozen/*/*.py"),
        ("sebp_edge.lessons", "sebp_edge/lessons/probe/*"),
        ("sebp_edge.cli.frozen", "sebp_edge/cli/frozen/*.dat"),
        ("sebp_edge.cli.frozen", "sebp_edge/cli/frozen/rthooks/*.py"),
        ("sebp_edge.serve", "sebp_edge/serve/*.ts"),
        ("sebp_edge.serve", "sebp_edge/serve/*.js"),
        ("sebp_edge.serve", "sebp_edge/serve/*.pyi"),
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


@pytest.mark.parametrize("module", PUBLIC)
def test_the_public_names(module):
    found = importlib.import_module(module)
    assert found.__all__ == PUBLIC[module].split()
    for name in found.__all__:
        assert getattr(found, name) is not None


def test_unknown_names_are_attribute_errors():
    with pytest.raises(AttributeError):
        _ = sebp_edge.nonsense


def test_every_event_and_every_error_is_public():
    for module, base in ((events, events.Event), (errors, errors.SebpEdgeError)):
        named = {name for name, value in vars(module).items() if isinstance(value, type) and issubclass(value, base)}
        assert named <= set(module.__all__)


def test_every_other_folder_says_that_it_is_internal():
    for path in sources():
        if path.name == "__init__.py" and module_of(path) not in PUBLIC:
            public = "`sebp_edge.ops`" if room_of_file(path) == "ops" else "`sebp_edge` or `sebp_edge.research`"
            assert f"Internal: import from {public}." in ast.get_docstring(tree_of(path)).split("\n"), path


def shown_code() -> dict[str, str]:
    """The Python code of the examples and documents, by location."""
    found = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "examples").rglob("*.py")}
    for path in ROOT.rglob("*.md"):
        blocks = re.findall(r"^```python\n(.*?)^```", path.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
        found |= {f"{path.relative_to(ROOT)}, block {number}": block for number, block in enumerate(blocks, start=1)}
    return found


def test_examples_and_documents_import_public_names_only():
    public = {f"{module}.{name}" for module, names in PUBLIC.items() for name in names.split()} | PUBLIC.keys()
    used = {
        (location, name)
        for location, text in shown_code().items()
        for name in names_in(ast.walk(ast.parse(text)), "")
        if name.split(".")[0] == "sebp_edge"
    }
    assert ("quickstart.py", "sebp_edge.Personalizer") in used
    assert {(location, name) for location, name in used if name not in public} == set()


def raised() -> set[tuple[str, str]]:
    """Each file of the package with the error classes that it raises by name."""
    found = set()
    for path in sources():
        for node in nodes_of(path):
            if isinstance(node, ast.Raise) and node.exc is not None:
                name = ast.unparse(node.exc.func if isinstance(node.exc, ast.Call) else node.exc)
                if name.split(".")[-1].lstrip("_")[:1].isupper():
                    found.add((path.relative_to(ROOT).as_posix(), name))
    return found


def test_every_error_is_in_the_tree_or_the_list():
    others = {(file, name) for file, name in raised() if name not in errors.__all__}
    unknown = {
        (file, name)
        for file, name in others
        if not any(file.startswith(prefix) and name in names.split() for prefix, names in OTHER_ERRORS.items())
    }
    assert unknown == set()
    for prefix, names in OTHER_ERRORS.items():
        assert {name for file, name in others if file.startswith(prefix)} == set(names.split()), prefix


def test_the_version_is_the_packages():
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == sebp_edge.__version__


def test_every_module_says_what_it_is_for():
    for path in sources():
        assert ast.get_docstring(tree_of(path)), path


def test_importing_the_package_imports_no_torch():
    code = """
import sys, sebp_edge, sebp_edge.cli, sebp_edge.engine.memory.memory_plan
sys.exit("torch" in sys.modules or "transformers" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.slow
def test_every_module_can_be_imported_alone():
    for path in sorted((ROOT / "sebp_edge").rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        if path.stem.isidentifier():  # else it is a hook that PyInstaller runs, see test_frozen.py
            assert importlib.import_module(name)
