"""Measures the memory that loading a GGUF file takes, in a process of its own. Linux only."""

from command import python

_CHILD = """
import gc, re, sys
from pathlib import Path
import torch
from sebp_edge import Recipe
from sebp_edge.machine import devices
from sebp_edge.machine.devices import release_memory
from sebp_edge.engine.models.catalog import resolve
from sebp_edge.engine.models.loading import load_base_model
file, precision = sys.argv[1:]
devices.multiplies_bf16 = lambda: False  # in which the weights would be half of it
recipe, cpu = Recipe.load("notes").replace(load_in_4bit=precision == "4 bits"), torch.device("cpu")
load_base_model(resolve("tiny"), recipe, cpu)  # so that no library is loaded later
gc.collect()
release_memory(cpu)
def kilobytes(what):
    return int(re.search(what + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
before = kilobytes("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # starts the peak anew
base = load_base_model(resolve(file), recipe, cpu)
weights = sum(weight.nbytes for weight in base.model.parameters())
print((kilobytes("VmHWM") - before) * 1024 / weights)
"""


def peak_of_loading(path, precision: str) -> float:
    """Returns the peak memory of loading a file in "full" precision or in "4 bits", divided by the weights' size."""
    return float(python(_CHILD, path, precision))
