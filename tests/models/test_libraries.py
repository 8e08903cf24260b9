"""Libraries print nothing into the host program, whose own settings stay as they are."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import warm

from models import published_sizes

SMALL = """
import os, sys, logging, warnings
before = dict(os.environ), list(logging.root.handlers), logging.getLogger("transformers").level
import sebp_edge
from pathlib import Path
sys.path.append(sys.argv.pop(1))
from warm import shorten_assessment
shorten_assessment()
from sebp_edge import AdapterStore, Personalizer, Recipe
from sebp_edge.errors import MachineError
from sebp_edge.machine import devices
filters = list(warnings.filters)
model, folder = sys.argv[1:]
recipe = Recipe.load("notes").replace(r=4, epochs=1, batch_tokens=200, context_length=64)
personalizer = Personalizer(model, recipe=recipe, device="cpu", store=AdapterStore(folder))
texts = [f"The ferry number {number} left at six with the mail." for number in range(24)]
personalizer.adapt(texts, activate_anyway=True)
personalizer.generate("The ferry", max_new_tokens=2)
devices.free_memory = lambda device: int(2e9)
try:
    Personalizer("org/big", device="cpu", store=AdapterStore(folder)).adapt(texts)
except MachineError as error:
    print(error)
assert logging.root.handlers == before[1] and warnings.filters == filters
changed = {name for name in before[0].keys() | os.environ.keys() if before[0].get(name) != os.environ.get(name)}
print("changed:", changed, "torch._inductor.compile_fx" in sys.modules)
"""
# What torch itself sets on import.
OWN = {"TORCHINDUCTOR_CACHE_DIR"}
LOUD = {"TOKENIZERS_PARALLELISM": "true", "PYTHONDEVMODE": "0", "CI": "true", "TERM": "xterm-256color"}
# Any value switches the development mode on, which else fills all memory that is allocated.
LOUD |= {"PYTHONMALLOC": "pymalloc"}
# Which a CPU with bf16 would have set.
LOUD |= {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64", "LRU_CACHE_CAPACITY": "64"}


@pytest.mark.slow
def test_an_app_that_adapts_and_generates_prints_nothing_and_asks_for_nothing(small_hub, put_into_cache, tmp_path):
    """Even if bitsandbytes is installed, which logs on import, loads torch's compiler, and asks the Hub for kernels.

    Of a model that turns out to be too big, only the config is downloaded.
    """
    package = tmp_path / "fakes" / "bitsandbytes"
    (package / "nn").mkdir(parents=True)
    (package / "nn" / "__init__.py").touch()
    (package / "__init__.py").write_text(
        "import logging, torch\n"
        "from bitsandbytes import nn\n"
        "torch.compile(lambda: None)\n"
        "try:\n    import kernels\n"
        "except ImportError:\n    logging.getLogger('bitsandbytes.backends.cpu.ops').warning('Failed to load')\n"
        "else:\n    print('Downloads a kernel')\n"
    )
    (package.parent / "kernels.py").touch()
    config = json.loads(small_hub.files["config.json"]) | {"bos_token_id": 50256}  # transformers logs a warning
    put_into_cache(tmp_path, "org/model", small_hub.files | {"config.json": json.dumps(config).encode()})
    too_big = published_sizes("llama-3.2-3b") | {"architectures": ["LlamaForCausalLM"]}
    small_hub.files = {"config.json": json.dumps(too_big).encode(), "model.safetensors": b""}
    environment = {name: value for name, value in os.environ.items() if name not in {"HF_HUB_OFFLINE", *OWN}}
    environment |= LOUD | {"PYTHONPATH": str(package.parent)}
    environment |= {"HF_HOME": str(tmp_path), "HF_HUB_DISABLE_XET": "1", "HF_ENDPOINT": small_hub.address}
    arguments = map(str, (Path(warm.__file__).parent, "org/model", tmp_path / "store"))
    command = [sys.executable, "-W", "error", "-c", SMALL, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    refused, *others = done.stdout.splitlines()
    assert refused.startswith("'org/big' has 3.21 billion parameters and needs at least ") and "2.0 GB free" in refused
    assert others == [f"changed: {OWN} False"]
    assert small_hub.requests
    assert all("org/big/" in path and path.endswith("/config.json") for path in small_hub.requests)
