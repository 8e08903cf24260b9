"""Verifies what was forgotten, by a training that is made again."""

import tempfile
from dataclasses import replace
from pathlib import Path

from sebp_edge.errors import MachineError
from sebp_edge.machine import devices
from sebp_edge.run.adapting import train_again
from sebp_edge.run.call import Call
from sebp_edge.run.forgetting import Remaining
from sebp_edge.run.reporting import package_versions
from sebp_edge.run.saving import Place
from sebp_edge.run.verification import Verification, verify
from sebp_edge.run.work import Work
from sebp_edge.values.folder import Folder


def run_verify(call: Call, place: Place, texts) -> Verification:
    """Verifies the newest receipt of `forget` by a training that is made again, outside the store.

    Args:
        texts: the documents that remain; by default, they are read where they were learnt.

    Raises:
        AdapterError: there is no receipt with the hash of weights, or its version was removed.
        TextsError: a document has changed or cannot be read.
        MachineError: the training would be on a GPU.
    """
    devices.refuse_several_processes()
    if texts is not None:
        texts = [texts] if isinstance(texts, str | Path | Folder | dict) else list(texts)
    if call.device.type != "cpu":
        raise MachineError(
            "A GPU adds in another order each time, so a training cannot be made again bit for bit there; verify with "
            "device='cpu' what was forgotten on the CPU."
        )
    in_use = call.in_use
    used = in_use.adapter_folder, in_use.prompts

    def train(remaining: Remaining) -> str:
        with tempfile.TemporaryDirectory(prefix="sebp-edge-verify-") as folder:
            outside = replace(place, out=Path(folder) / "adapter")
            work = Work.begin(call, outside, "forget", {}, None)
            with devices.limited_threads(remaining.record.threads):  # another number rounds differently
                return train_again(call, outside, work, remaining, activate_anyway=False).weights_hash()

    try:
        return verify(place.adapter, texts, call.read, train, package_versions())
    finally:
        in_use.detach_adapter()
        in_use.adapter_folder, in_use.prompts = used
        if in_use.base is not None:
            in_use.restore_adapter(call.job)
