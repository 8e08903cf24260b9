"""Libraries print nothing into the host program, whose own settings stay as they are."""

import io
import json
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import warm

from sebp_edge.engine.models.catalog import bundled_config, resolve
from sebp_edge.engine.models.libraries import quiet_libraries

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
    too_big = json.loads(bundled_config(resolve("llama-3.2-3b")).read_text()) | {"architectures": ["LlamaForCausalLM"]}
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


@pytest.fixture
def transformers_logger():
    """A function that adds a handler to transformers' logger, and returns what that writes."""
    logger, added = logging.getLogger("transformers"), []

    def add(kind):
        written = io.StringIO()
        added.append(kind(written))
        logger.addHandler(added[-1])
        return written

    yield add
    for handler in added:
        logger.removeHandler(handler)


class OfTheHost(logging.StreamHandler):
    """A handler that the host program has added."""


def test_the_host_gets_all_messages_and_its_terminal_none(transformers_logger):
    printed, received = transformers_logger(logging.StreamHandler), transformers_logger(OfTheHost)
    with quiet_libraries(), quiet_libraries():
        logging.getLogger("transformers.modeling_utils").error("advice")
    assert (printed.getvalue(), received.getvalue()) == ("", "advice\n")
    logging.getLogger("transformers.modeling_utils").error("afterwards")
    assert (printed.getvalue(), received.getvalue()) == ("afterwards\n", "advice\nafterwards\n")


def test_only_the_calling_thread_is_quiet(transformers_logger):
    printed = transformers_logger(logging.StreamHandler)
    with quiet_libraries():
        thread = threading.Thread(target=logging.getLogger("transformers.trainer").error, args=("the app's",))
        thread.start()
        thread.join()
        logging.getLogger("transformers.trainer").error("ours")
    assert printed.getvalue() == "the app's\n"
