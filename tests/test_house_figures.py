"""The figures of a small made-up checkout, counted by hand."""

import pytest
from house_figures import MEASURES, Checkout

FILES = {
    "sebp_edge/__init__.py": "from sebp_edge.run.adapting import Adapting\n",
    "sebp_edge/errors.py": "class SebpEdgeError(Exception): ...\n",
    "sebp_edge/run/__init__.py": "",
    "sebp_edge/run/adapting.py": """
from collections.abc import Callable
from sebp_edge import errors, texts
from sebp_edge.texts.reading import Reader
from ..texts.formats.files import Text as Plain
from .helping import helped, Sink

Done = Callable[[], None]

class Adapting(Reader[int]):
    def run(self, done: Done, sink: Sink | None, *args):
        self.a, self.found = found = args
        one = helped(*found, *found) + helped(*args) + helped(*(1, 2))
        for each in one: self.read(each, found=one)
""",
    "sebp_edge/run/helping.py": "\n" * 80 + "def helped(*values): return lambda known: known\n",
    "sebp_edge/texts/__init__.py": "",
    "sebp_edge/texts/reading.py": """
from sebp_edge.errors import SebpEdgeError
from sebp_edge.ops.rows import Rows
class Reader:
    def read(self, text):
        self.text = self.a = text
        text.other = self.text
class Text: ...
class _Row: ...
""",
    "sebp_edge/texts/formats/__init__.py": "",
    "sebp_edge/texts/formats/files.py": "class Text: ...\nclass _Row: ...\n",
    "sebp_edge/texts/formats/reading.py": "",
    "kernels/ops/__init__.py": "",
    "kernels/ops/rows.py": "from .gpu import rows\nclass Rows: ...\n",
    "kernels/ops/gpu/__init__.py": "",
    "kernels/ops/gpu/rows.py": "",
    "tests/test_house.py": 'PUBLIC = {\n    "sebp_edge": "Adapting",\n    "sebp_edge.ops": "rows",\n}\n',
    "tests/test_face.py": """import math
from sebp_edge import Adapting
from sebp_edge.ops import rows
from sebp_edge.texts import read
""",
    "tests/test_inside.py": "from sebp_edge.texts import reading\npatch.setattr(reading, 'Reader', 1)\n",
    "tests/helper.py": "from sebp_edge.run.adapting import Adapting\n" + "\n" * 9,
    "README.md": "# Three words\n",
    "CHANGELOG.md": "- one\n",
    "tests/page.md": "not counted",
    "examples/notes/diary.md": "not counted",
    ".venv/library.md": "not counted",
}

EXPECTED = {
    # run -> texts, texts -> ops, __init__ -> run
    "pairs of rooms that import, without ground": "3",
    # ops or errors, texts, run
    "floors": "3",
    # run -> texts 3, texts -> ops 1, __init__ -> run 1
    "names across rooms, without ground": "5",
    "names into `run`": "4",
    "lines of sebp_edge and kernels/ops": "110",
    "largest class: lines, attributes": "5 (Adapting), 2 (Reader)",
    "… with its bases": "9 (Adapting), 3 (Adapting)",
    "calls with a starred local tuple": "1",
    "parameters that are callables": "1 (2)",
    # reading, formats.files, gpu.rows by the ops' import, adapting, rows, texts/__init__; helping is too long
    "modules of at most 80 lines with one user": "6",
    "test lines": "20",
    "… of test files through a face": "80.0%, 2 of 3 files",
    "replaced attributes": "1",
    "words on pages": "5 on 2",
    "words of CHANGELOG": "2",
    "words of README": "3",
    "class names used twice": "1: Text",
    "file names used twice": "1: reading",
    "filler names": "found 1, each 1, own 0, one 1, known 1, values 1, before 0",
}


@pytest.fixture
def checkout(tmp_path):
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return Checkout(tmp_path)


def test_figures_of_a_small_checkout(checkout):
    assert {measure: str(count(checkout)) for measure, count in MEASURES.items()} == EXPECTED


def test_rooms_in_a_circle_have_no_floors(checkout):
    (checkout.root / "sebp_edge/texts/formats/files.py").write_text("from sebp_edge.run import adapting\n")
    assert MEASURES["floors"](checkout) in ("a circle: run texts run", "a circle: texts run texts")
