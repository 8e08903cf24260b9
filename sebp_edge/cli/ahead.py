"""Does what needs no library while these are imported: starts the GPU's driver, and reads the model's weights.

Each takes up to seconds, in which Python's lock is free. Errors are left to those who need the GPU or the file next.
"""

import ctypes
import os
import sys
from contextlib import suppress
from pathlib import Path
from threading import Thread

from sebp_edge.engine.models.catalog import resolve
from sebp_edge.engine.models.hub_cache import local_folder
from sebp_edge.errors import SebpEdgeError
from sebp_edge.machine.host import free_host_memory, gpu_use_at_first

_CHUNK_BYTES = 2**23


def begin_ahead(model: str | Path, device: str | None) -> list[Thread]:
    """Starts both in threads, which are returned; without a GPU if the device is another one."""
    threads = [Thread(target=_read_weights, args=(model,), name="sebp-edge weights ahead", daemon=True)]
    if device is None or device.startswith("cuda"):
        number = (device or "").partition(":")[2]
        index = int(number) if number.isdecimal() else 0
        threads.append(Thread(target=_start_gpu, args=(index,), name="sebp-edge GPU ahead", daemon=True))
    for thread in threads:
        thread.start()
    return threads


def _start_gpu(index: int) -> None:
    """Makes the context of an NVIDIA GPU that torch's CUDA runtime uses, too; first, asks what is in use without it."""
    gpu_use_at_first()
    os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")  # as torch does, but the driver reads it only once
    with suppress(OSError, AttributeError):
        driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        gpu, context = ctypes.c_int(), ctypes.c_void_p()
        if driver.cuInit(0) == driver.cuDeviceGet(ctypes.byref(gpu), index) == 0:
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), gpu)


def _read_weights(model: str | Path) -> None:
    """Reads a model's weights into the page cache, unless they would take most of the free memory."""
    with suppress(OSError, SebpEdgeError):
        path = local_folder(resolve(model))
        files = [] if path is None else [path] if path.is_file() else sorted(path.glob("*.safetensors"))
        if 2 * sum(file.stat().st_size for file in files) > free_host_memory():
            return
        chunk = bytearray(_CHUNK_BYTES)
        for file in files:
            with file.open("rb", buffering=0) as stream:
                while stream.readinto(chunk):
                    pass
