"""What the tests of the house read of Python files: their names, their imports and their trees, each parsed once."""

import ast
import importlib.util
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]


def module_of(path: Path) -> str:
    """The name that a file is imported under; kernels/ops is installed as sebp_edge.ops."""
    is_op = path.is_relative_to(ROOT / "kernels")
    parts = path.relative_to(ROOT / "kernels" if is_op else ROOT).with_suffix("").parts
    return ".".join(["sebp_edge"] * is_op + list(parts)).removesuffix(".__init__")


@cache
def imports_of(path: Path) -> list[str]:
    """The full name of each import of a file, relative imports resolved."""
    module = module_of(path)
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
