"""A command imports torch without its compiler and distributed tensors, and has the compiler once it is wanted."""

import subprocess
import sys

import pytest

CODE = """
import sys
from sebp_edge.engine.models.libraries import quick_import_of_torch
with quick_import_of_torch():
    from sebp_edge.personalizer import Personalizer
import torch
print(Personalizer("tiny", device="cpu").generate("The", max_new_tokens=2, temperature=0) != "")
print([name for name in ("torch.distributed.tensor", "torch._inductor") if name in sys.modules])
print(torch.distributed.is_available(), hasattr(torch._dynamo, "__wrapped__"))
{wanted}
print(vars(sys.modules["torch._dynamo"])["disable"] is torch._dynamo.disable)
"""
# What loads the compiler.
WANTED = {
    "compiled": "print(torch.compile(lambda x: x + 1, backend='eager')(torch.ones(2)).tolist() == [2, 2])",
    "configured": "print(torch._dynamo.config.recompile_limit > 0)",
    "a part": "from torch._dynamo.utils import counters; print(torch._dynamo.utils.counters is counters)",
}


@pytest.mark.slow
@pytest.mark.parametrize("wanted", WANTED)
def test_the_compiler_is_loaded_once_it_is_wanted(wanted):
    code = CODE.format(wanted=WANTED[wanted])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines() == ["True", "[]", "True False", "True", "True"], done.stderr
