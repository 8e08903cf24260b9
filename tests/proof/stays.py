"""Counts the way of a text and of an adapter's name: the functions that receive it, in order, in a real adaptation.

    python tests/proof/stays.py CHECKOUT [--python PYTHON] [--list]

A stay is a call that receives the thing as an argument; calls from one line to one function are one stay. Rooms are the
files of the stays, a return is a stay in a room that was left before, and a climb leads into a higher layer of the
checkout's tests/test_house.py. `--list` prints the stays.
"""

import argparse
import ast
import os
import subprocess
import sys
import tempfile
from array import array
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from recorder import anyway
from same_bits import link_package

NAME = "name-in-question"
# In each note, and in no other text.
WORD = "xyzzy"
# Attributes from an argument to the text, as in `run.dataset.examples[0].input_ids`.
MAX_DEPTH = 3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)  # set in the process that does the work
    given = parser.parse_args()
    if given.work:
        walk_through(given.work, layers_of(given.checkout), with_stays=given.list)
        return 0
    with tempfile.TemporaryDirectory(prefix="stays-") as work:
        link_package(given.checkout.resolve(), Path(work, "site"))
        settings = {"PYTHONPATH": str(Path(work, "site")), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        command = [given.python, __file__, given.checkout.resolve(), "--work", work, *["--list"] * given.list]
        return subprocess.run(command, env=os.environ | settings, check=False).returncode


def layers_of(checkout: Path) -> dict[str, int]:
    """Returns the depth of each room, from 0 at the top, in an order in which the checkout's house test lists it."""
    tree = ast.parse((checkout / "tests" / "test_house.py").read_text(encoding="utf-8"))
    lists = (ast.unparse(node.value) for node in tree.body if ast.unparse(node).startswith(("USES = ", "GROUND = ")))
    ground, uses = map(ast.literal_eval, lists)
    return {name: depth for depth, name in enumerate([*uses, *ground])}


@dataclass
class Walk:
    """The stays of one thing, and how to recognise it among the arguments of a call."""

    what: str
    is_thing: object
    is_over: bool = False
    stays: dict[tuple, str] = field(default_factory=dict)
    _looks: Counter = field(default_factory=Counter)

    def see(self, frame, package: Path) -> None:
        """Adds the call that begins with this frame, if it receives the thing."""
        code, caller = frame.f_code, frame.f_back
        while caller is not None and caller.f_code.co_name.startswith("<"):
            caller = caller.f_back
        site = caller and (caller.f_code.co_filename, caller.f_lineno), code
        if site in self.stays or self._looks[site] >= 3:  # loops need not be looked at again and again
            return
        self._looks[site] += 1
        count = code.co_argcount + code.co_kwonlyargcount
        names = [name for name in code.co_varnames[:count] if name not in ("self", "cls")]
        if any(self.is_thing(frame.f_locals.get(name)) for name in names):
            file = Path(code.co_filename).relative_to(package).as_posix()
            self.stays[site] = f"{file} {code.co_qualname}"

    def row(self, layers: dict[str, int]) -> str:
        files = [stay.split()[0] for stay in self.stays.values()]
        depths = [layers.get(file.split("/")[0].removesuffix(".py"), 0) for file in files]
        climbs = sum(after < before for before, after in pairwise(depths))
        rooms = len(set(files))
        return f"{self.what:48}{len(files):>6}{rooms:>6}{climbs:>7}{len(files) - rooms:>8}"


class Watch:
    """A profile function that shows each call of the package to the walks that are not over."""

    def __init__(self, package: Path, walks: list[Walk]):
        self.package, self.walks = package, walks

    def __call__(self, frame, kind: str, value) -> None:
        code = frame.f_code
        if kind == "call" and code.co_filename.startswith(str(self.package)) and not code.co_name.startswith("<"):
            for walk in self.walks:
                if not walk.is_over:
                    walk.see(frame, self.package)
        if (
            kind == "return"
            and not self.walks[0].is_over
            and hasattr(value, "documents")
            and hasattr(value, "left_out")
        ):
            self.walks[0].is_over, self.walks[1].is_over = True, False

    def __enter__(self):
        sys.setprofile(self)

    def __exit__(self, *_):
        sys.setprofile(None)


def walk_through(work: Path, layers: dict[str, int], *, with_stays: bool) -> None:
    """Adapts to notes, adapts again to new ones and generates text; prints the walks of the last two calls."""
    import torch
    from materials import QUICK, save_models, sentences, write_notes

    import sebp_edge
    from sebp_edge import Personalizer, Recipe

    package, notes = work / "site" / "sebp_edge", work / "notes"
    save_models(work / "models")
    write_notes(notes, [f"{text} {WORD} and so on." for text in sentences(24)])
    tokens = f" {WORD}"

    def carries(value, depth: int = MAX_DEPTH) -> bool:
        """Whether the value is, or holds, a note as text or tokens."""
        if isinstance(value, str):
            return WORD in value
        if isinstance(value, array):
            return has_tokens(value)
        if isinstance(value, torch.Tensor):
            return not value.is_floating_point() and value.dim() <= 2 and has_tokens(value.flatten().tolist())
        if isinstance(value, list | tuple):
            return has_tokens(value) if value and type(value[0]) is int else any(carries(v, depth) for v in value[:3])
        if isinstance(value, dict):
            return any(carries(one, depth) for one in list(value.values())[:3])
        if depth and type(value).__module__.startswith("sebp_edge") and not isinstance(value, torch.nn.Module):
            held = list(vars(value)) if hasattr(value, "__dict__") else getattr(value, "__slots__", ())
            return any(carries(getattr(value, name, None), depth - 1) for name in held)
        return False

    def has_tokens(ids) -> bool:
        count = len(ids_of_word)
        return any(list(ids[at : at + count]) == ids_of_word for at in range(len(ids) - count + 1))

    def is_given(value) -> bool:
        """Whether the value is the given folder, is in it, or holds that."""
        if isinstance(value, list | tuple):
            return any(is_given(one) for one in value[:3])
        path = getattr(value, "path", value)
        return (isinstance(path, Path) and path.is_relative_to(notes)) or carries(value)

    walks = [
        Walk("texts given to adapt, until they are read", is_given),
        Walk("what was read, until it is trained on", carries, is_over=True),
        Walk("an adapter's name given to adapt", lambda value: isinstance(value, str) and value == NAME),
    ]

    def end_at_first_step(event) -> None:
        if event.event == "step":
            walks[1].is_over = True

    from transformers import AutoTokenizer

    model = work / "models" / "llama"
    ids_of_word = AutoTokenizer.from_pretrained(model)(tokens, add_special_tokens=False)["input_ids"]
    recipe = Recipe.load("notes").replace(**QUICK)
    app = Personalizer(model, recipe=recipe, device="cpu", store=work / "store", on_event=end_at_first_step)
    walks[1].is_over = True
    app.adapt(notes, name=NAME, **{anyway(): True})
    write_notes(notes, [f"{text} {WORD} and so on." for text in sentences(32)])
    with Watch(package, walks):
        app.adapt(notes, name=NAME, **{anyway(): True})
    in_generate = Walk(
        "an adapter given to generate", lambda value: isinstance(value, str | Path) and NAME in str(value)
    )
    with Watch(package, [in_generate]):
        app.generate("the ferry", adapter=NAME, max_new_tokens=2, seed=0)
    print(f"{'walk':48}{'stays':>6}{'rooms':>6}{'climbs':>7}{'returns':>8}   sebp_edge {sebp_edge.__version__}")
    for walk in (*walks, in_generate):
        print(walk.row(layers))
    for walk in (*walks, in_generate) if with_stays else ():
        print(f"\n{walk.what}:", *walk.stays.values(), sep="\n  ")


if __name__ == "__main__":
    sys.exit(main())
