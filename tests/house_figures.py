"""Counts how a checkout is built, as a Markdown table; with two checkouts, a column for each.

    python tests/house_figures.py [CHECKOUT] [OTHER_CHECKOUT]

It reads files and imports none of them. Product code is what `sebp_edge` and `kernels/ops` hold, and the docstring of
each measure says what is counted. A room is the outermost folder or file of a module, so a layer such as
`sparse.patches` belongs to `sparse`; the ops are a room, and so is the package's own `__init__`. Public names are those
of the checkout's tests/test_house.py.
"""

import argparse
import ast
import importlib.util
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1]

# Rooms that every other one may use; imports to and from them are not counted.
GROUND = {"basics", "machine", "errors", "events", "recipe", "values"}
# Aliases of Callable that have always been counted; the others are counted beside them.
CALLABLES = {"Callable", "Sink", "Check"}
MAX_SMALL = 80
FILLERS = ["found", "each", "own", "one", "known", "values", "before"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs="*", type=Path, default=[ROOT], metavar="CHECKOUT")
    checkouts = [Checkout(path.resolve()) for path in parser.parse_args().checkouts]
    print("| measure |", *(f"{checkout.root.name} |" for checkout in checkouts))
    print("|---|" + "---|" * len(checkouts))
    for measure, count in MEASURES.items():
        print(f"| {measure} |", *(f"{count(checkout)} |" for checkout in checkouts))


@dataclass(eq=False)
class Checkout:
    """The files of a checkout, parsed when they are asked for."""

    root: Path

    @cached_property
    def modules(self) -> dict[str, Path]:
        """The files of product code by the names that they are imported under."""
        paths = [path for folder in ("sebp_edge", "kernels/ops") for path in (self.root / folder).rglob("*.py")]
        return {module_of(path, self.root): path for path in sorted(paths)}

    @cached_property
    def tests(self) -> list[Path]:
        return sorted((self.root / "tests").rglob("*.py"))

    @cached_property
    def public(self) -> dict[str, str]:
        """Public names, separated by spaces, by the modules that have them."""
        body = tree_of(self.root / "tests" / "test_house.py").body
        return next(ast.literal_eval(node.value) for node in body if ast.unparse(node).startswith("PUBLIC = "))

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return [node for path in self.modules.values() for node in nodes_of(path)]

    @cached_property
    def imports(self) -> list[tuple[str, str]]:
        """Each import of a name of the package, as (importing module, full name)."""
        names = ((module, name) for module, path in self.modules.items() for name in imports_of(path, self.root))
        return [(module, name) for module, name in names if name.split(".")[0] == "sebp_edge"]

    @cached_property
    def crossing(self) -> Counter[tuple[str, str]]:
        """Names that are imported from one room into another, by (importing room, other room)."""
        rooms = [(room_of(module), room_of(self.home_of(name))) for module, name in self.imports]
        return Counter((importing, other) for importing, other in rooms if importing != other)

    def home_of(self, name: str) -> str:
        """The module that an imported name is from, or is."""
        while name not in self.modules and "." in name:
            name = name.rpartition(".")[0]
        return name


def module_of(path: Path, root: Path = ROOT) -> str:
    """The name that a file is imported under; kernels/ops is installed as sebp_edge.ops."""
    is_op = path.is_relative_to(root / "kernels")
    parts = path.relative_to(root / "kernels" if is_op else root).with_suffix("").parts
    return ".".join(["sebp_edge"] * is_op + list(parts)).removesuffix(".__init__")


def room_of(module: str) -> str:
    """The outermost folder or file below sebp_edge."""
    return [*module.split("."), "__init__"][1]


@cache
def imports_of(path: Path, root: Path = ROOT) -> list[str]:
    """The full name of each import of a file, relative imports resolved."""
    module = module_of(path, root)
    return [*names_in(nodes_of(path), module if path.name == "__init__.py" else module.rpartition(".")[0])]


def names_in(nodes: Iterable[ast.AST], package: str) -> Iterator[str]:
    """Yields the full name of each import of Python code; relative imports are from `package`."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            yield from (f"{module}.{alias.name}" for alias in node.names)


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(tree_of(path)))


def lines_of(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def words_of(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").split())


def beyond_ground(checkout: Checkout) -> list[int]:
    """Names imported by each pair of rooms of which neither is ground."""
    return [count for rooms, count in checkout.crossing.items() if GROUND.isdisjoint(rooms)]


def floors(checkout: Checkout) -> int | str:
    """Rooms of the longest chain of imports; the package's own name is above all and not counted."""
    graph = {}
    for importing, other in checkout.crossing:
        if "__init__" not in (importing, other):
            graph.setdefault(importing, set()).add(other)
    heights = {}
    try:
        for room in TopologicalSorter(graph).static_order():
            heights[room] = 1 + max((heights[other] for other in graph.get(room, ())), default=0)
    except CycleError as error:
        return f"a circle: {' '.join(error.args[1])}"
    return max(heights.values(), default=1)


def names_into_run(checkout: Checkout) -> int:
    """Names that `run` imports from other rooms, ground included."""
    return sum(count for (importing, _), count in checkout.crossing.items() if importing == "run")


def product_lines(checkout: Checkout) -> int:
    """Lines of Python, blank ones included."""
    return sum(map(lines_of, checkout.modules.values()))


@cache
def classes(checkout: Checkout) -> dict[str, ast.ClassDef]:
    """Classes by full name."""
    files = ((module, nodes_of(path)) for module, path in checkout.modules.items())
    return {
        f"{module}.{node.name}": node for module, nodes in files for node in nodes if isinstance(node, ast.ClassDef)
    }


def family_of(checkout: Checkout, name: str) -> set[ast.ClassDef]:
    """A class and its bases in the product."""
    module = checkout.home_of(name)
    family = {classes(checkout)[name]}
    for base in classes(checkout)[name].bases:
        written = ast.unparse(base).partition("[")[0]
        imported = imports_of(checkout.modules[module], checkout.root)
        full = [f"{module}.{written}", *(full for full in imported if full.endswith(f".{written}"))]
        family = family.union(
            *(family_of(checkout, each) for each in full if each in classes(checkout) and each != name)
        )
    return family


def attributes_of(family: Iterable[ast.ClassDef]) -> set[str]:
    """Attributes that classes set on `self`."""
    nodes = (node for each in family for node in ast.walk(each) if isinstance(node, ast.Attribute) and is_set(node))
    return {node.attr for node in nodes if ast.unparse(node.value) == "self"}


def is_set(node: ast.Attribute | ast.Name) -> bool:
    return isinstance(node.ctx, ast.Store)


def largest_class(families: dict[str, Iterable[ast.ClassDef]]) -> str:
    """The most lines, and the most attributes set on `self`, of a class or of a class with its bases in the product."""
    sizes = ((sum(each.end_lineno - each.lineno + 1 for each in family), name) for name, family in families.items())
    counts = ((len(attributes_of(family)), name) for name, family in families.items())
    return ", ".join(f"{most:,} ({name.rpartition('.')[2]})" for most, name in map(max, (sizes, counts)))


def starred_calls(checkout: Checkout) -> int:
    """Calls with a name after `*`; `*args` passes on what was given."""
    starred = [
        [each.value.id for each in node.args if isinstance(each, ast.Starred) and isinstance(each.value, ast.Name)]
        for node in checkout.nodes
        if isinstance(node, ast.Call)
    ]
    return sum(any(name != "args" for name in names) for names in starred)


def callable_parameters(checkout: Checkout) -> str:
    """Parameters whose annotation names Callable, Sink or Check; in brackets, or any alias of Callable."""
    aliases = {
        ast.unparse(target)
        for path in checkout.modules.values()
        for node in tree_of(path).body
        if isinstance(node, ast.Assign) and "Callable" in ast.unparse(node.value)
        for target in node.targets
    }
    annotations = [node.annotation for node in checkout.nodes if isinstance(node, ast.arg) and node.annotation]
    named = [{each.id for each in ast.walk(one) if isinstance(each, ast.Name)} for one in annotations]
    few, all_ = (sum(bool(names & counted) for names in named) for counted in (CALLABLES, CALLABLES | aliases))
    return f"{few} ({all_})"


def small_modules(checkout: Checkout) -> int:
    """Modules of at most MAX_SMALL lines that exactly one other module imports."""
    users = {(checkout.home_of(name), module) for module, name in checkout.imports}
    counts = Counter(home for home, module in users if home != module)
    return sum(count == 1 and lines_of(checkout.modules[home]) <= MAX_SMALL for home, count in counts.items())


def through_a_face(checkout: Checkout) -> str:
    """Share of lines of test files that import nothing of the package but public names and what rooms' folders have."""
    public = {f"{module}.{name}" for module, names in checkout.public.items() for name in names.split()}
    faces = checkout.public.keys() | {f"sebp_edge.{room_of(module)}" for module in checkout.modules}

    def is_of_a_face(name: str) -> bool:
        return name.split(".")[0] != "sebp_edge" or name in public or checkout.home_of(name) in faces

    files = [path for path in checkout.tests if path.name.startswith("test_")]
    faced = [path for path in files if all(map(is_of_a_face, names_in(nodes_of(path), "tests")))]
    return f"{sum(map(lines_of, faced)) / max(1, sum(map(lines_of, files))):.1%}, {len(faced)} of {len(files)} files"


def replaced_attributes(checkout: Checkout) -> int:
    """Uses of pytest's `setattr` and `delattr` in tests, whatever the fixture is called."""
    nodes = (node for path in checkout.tests for node in nodes_of(path))
    return sum(isinstance(node, ast.Attribute) and node.attr in ("setattr", "delattr") for node in nodes)


def words(checkout: Checkout) -> str:
    """Words of all Markdown pages but those of tests, hidden folders and the example's notes; the number of pages."""
    others = [("tests",), ("examples", "notes")]
    folders = {page: page.relative_to(checkout.root).parts[:-1] for page in checkout.root.rglob("*.md")}
    hidden = {page for page, parts in folders.items() if any(part.startswith(".") for part in parts)}
    pages = [page for page, parts in folders.items() if page not in hidden and not {parts[:1], parts[:2]} & {*others}]
    return f"{sum(map(words_of, pages)):,} on {len(pages)}"


def repeated(names: Iterable[str]) -> str:
    """How many names occur more than once, and which."""
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    return f"{len(twice)}{': ' * bool(twice)}{' '.join(twice)}"


def repeated_classes(checkout: Checkout) -> str:
    """Names of classes, but private ones, that are used more than once."""
    return repeated(node.name for node in classes(checkout).values() if not node.name.startswith("_"))


def repeated_files(checkout: Checkout) -> str:
    """Names of importable files of sebp_edge used more than once; an op and its kernels share theirs on purpose."""
    paths = (path for module, path in checkout.modules.items() if room_of(module) != "ops")
    return repeated(path.stem for path in paths if path.stem.isidentifier() and path.stem != "__init__")


def filler_names(checkout: Checkout) -> str:
    """How often each filler is assigned to or is a parameter."""
    assigned = [node.id for node in checkout.nodes if isinstance(node, ast.Name) and is_set(node)]
    counts = Counter(assigned + [node.arg for node in checkout.nodes if isinstance(node, ast.arg)])
    return ", ".join(f"{name} {counts[name]}" for name in FILLERS)


MEASURES = {
    "pairs of rooms that import, without ground": lambda checkout: len(beyond_ground(checkout)),
    "floors": floors,
    "names across rooms, without ground": lambda checkout: f"{sum(beyond_ground(checkout)):,}",
    "names into `run`": names_into_run,
    "lines of sebp_edge and kernels/ops": lambda checkout: f"{product_lines(checkout):,}",
    "largest class: lines, attributes": lambda checkout: largest_class(
        {name: [node] for name, node in classes(checkout).items()}
    ),
    "… with its bases": lambda checkout: largest_class({name: family_of(checkout, name) for name in classes(checkout)}),
    "calls with a starred local tuple": starred_calls,
    "parameters that are callables": callable_parameters,
    f"modules of at most {MAX_SMALL} lines with one user": small_modules,
    "test lines": lambda checkout: f"{sum(map(lines_of, checkout.tests)):,}",
    "… of test files through a face": through_a_face,
    "replaced attributes": replaced_attributes,
    "words on pages": words,
    "words of CHANGELOG": lambda checkout: f"{words_of(checkout.root / 'CHANGELOG.md'):,}",
    "words of README": lambda checkout: f"{words_of(checkout.root / 'README.md'):,}",
    "class names used twice": repeated_classes,
    "file names used twice": repeated_files,
    "filler names": filler_names,
}


if __name__ == "__main__":
    main()
