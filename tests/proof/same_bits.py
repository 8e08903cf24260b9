"""Hashes what 28 configurations compute, and compares the hashes of two checkouts.

    python tests/proof/same_bits.py run CHECKOUT HASHES.json [--python PYTHON] [--only NAME...] [--keep FOLDER]
    python tests/proof/same_bits.py compare BEFORE.json AFTER.json

`run` imports the project from CHECKOUT, whatever PYTHON has installed; each configuration runs in a process that is
forked then. `--keep` leaves what was written, and a list of what was hashed, in a new folder, for `diff`. `recorder.py`
says what is not compared.
"""

import gc
import importlib
import sys
from functools import partial
from pathlib import Path

import checkout


def make_parts(work: Path, of: Path) -> checkout.Parts:
    """Returns the configurations."""
    gc.disable()
    for name in ("sebp_edge.ops", "sebp_edge.research", "sebp_edge.cli", "transformers.models.llama.modeling_llama"):
        importlib.import_module(name)
    import torch

    import sebp_edge

    _ = sebp_edge.Personalizer
    from configurations import CONFIGURATIONS

    torch.set_num_threads(1)
    gc.enable()
    return {name: partial(run_one, run) for name, run in CONFIGURATIONS.items()}


def run_one(run, folder: Path, work: Path) -> dict:
    """Runs one configuration in its own folder; returns the hashes of what it found."""
    from recorder import Recorder

    recorder = Recorder(folder, work)
    run(recorder)
    recorder.documents()
    recorder.files()
    return recorder.found


if __name__ == "__main__":
    sys.exit(checkout.main(__file__, __doc__, make_parts))
