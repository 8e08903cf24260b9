"""What apps import and parse: the public names with their signatures, and the messages' schema and types."""

import ast
import importlib
import inspect
import json
import re
from hashlib import sha256
from pathlib import Path

# Where a class is defined may change, and addresses do.
_PLACES = re.compile(r"\b(?:sebp_edge|kernels)(?:\.\w+)+\.(?=\w)")
_ADDRESSES = re.compile(r" at 0x[0-9a-f]+")


def record_names(checkout: Path) -> dict:
    """Returns each public name of the checkout's list with what it offers."""
    found = {}
    for module, names in public_names(checkout).items():
        imported = importlib.import_module(module)
        found |= {f"{module}.{name}": describe(getattr(imported, name)) for name in sorted(names.split())}
        found[f"{module}.__all__"] = sorted(imported.__all__)
    return found


def public_names(checkout: Path) -> dict[str, str]:
    """Returns `PUBLIC` of tests/test_house.py."""
    tree = ast.parse((checkout / "tests" / "test_house.py").read_text(encoding="utf-8"))
    assigned = [node for node in tree.body if isinstance(node, ast.Assign)]
    return next(ast.literal_eval(one.value) for one in assigned if one.targets[0].id == "PUBLIC")


def describe(value):
    """Returns the signature of a callable, those of a class and its own public members, or else a value."""
    if isinstance(value, type):
        bases = [base.__name__ for base in value.__mro__[1:-1]]
        return {"bases": bases, "signature": signature(value), "members": members(value)}
    if isinstance(value, classmethod | staticmethod):
        return f"{type(value).__name__} {signature(value.__func__)}"
    if callable(value):
        return signature(value)
    return repr(value) if isinstance(value, str | int | float | tuple) else type(value).__name__


def members(kind: type) -> dict:
    """Returns the public members of a class that the project defines."""
    own = [base for base in reversed(kind.__mro__) if base.__module__.startswith("sebp_edge")]
    found = {name: value for base in own for name, value in vars(base).items() if not name.startswith("_")}
    return {name: describe(value) for name, value in sorted(found.items())}


def signature(value) -> str:
    """Returns the text of a signature, without the places of classes."""
    try:
        return _ADDRESSES.sub("", _PLACES.sub("", str(inspect.signature(value))))
    except (TypeError, ValueError):
        return "no signature"


def record_schema(site: Path) -> dict:
    """Returns the keys and a hash of each definition of the schema that ships, and hashes of the files beside it."""
    shipped = sorted((site / "sebp_edge").glob("*/*"))
    files = {path.name: path for path in shipped if path.suffix in (".js", ".ts") or path.name == "schema.json"}
    definitions = json.loads(files["schema.json"].read_text(encoding="utf-8"))["$defs"]
    found = {name: [*one.get("properties", ()), digest(json.dumps(one))] for name, one in definitions.items()}
    return found | {name: digest(path.read_text(encoding="utf-8")) for name, path in files.items()}


def digest(text: str) -> str:
    """Returns a hash of a text."""
    return sha256(text.encode()).hexdigest()[:16]
