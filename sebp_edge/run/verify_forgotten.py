"""Verifies a receipt of `forget`: no version knows the documents, and a training gives the weights once more."""

import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from sebp_edge.errors import AdapterError, MachineError
from sebp_edge.machine import devices
from sebp_edge.machine.packages import package_versions
from sebp_edge.run.adaptation_job import AdaptationJob
from sebp_edge.run.adapting import adapt_again
from sebp_edge.run.model_call import ModelCall
from sebp_edge.run.remaining import Remaining, find_remaining, versions_with
from sebp_edge.run.saving import Place
from sebp_edge.store.adapter import Adapter
from sebp_edge.store.erasure import Receipt, read_receipts
from sebp_edge.store.record import AdapterRecord


@dataclass(frozen=True)
class Verification:
    """What the newest receipt of an adapter is worth.

    Attributes:
        name: the adapter's name.
        receipt: the file of the receipt.
        verified: whether all that it says was found to be so.
        version: the version that was trained again; None if the receipt names none.
        weights: the hash of its weights in the receipt; None without a version.
        trained_again: the hash of those of the training that was made to verify it; None if none was made.
        explanation: what was found, in words.
    """

    name: str
    receipt: str
    verified: bool
    version: int | None
    weights: str | None
    trained_again: str | None
    explanation: str

    def to_dict(self) -> dict:
        """Returns it as JSON-ready values."""
        return asdict(self)


def run_verify(call: ModelCall, place: Place, texts) -> Verification:
    """Verifies the newest receipt of `forget` by a training that is made again, outside the store.

    Args:
        texts: the documents that remain; by default, they are read where they were learnt.
    """
    devices.refuse_several_processes()
    if call.device.type != "cpu":
        raise MachineError(
            "A GPU adds in another order each time, so a training cannot be made again bit for bit there; verify with "
            "device='cpu' what was forgotten on the CPU."
        )
    in_use = call.in_use
    used = in_use.adapter_folder, in_use.prompts

    try:
        return _verify(call, place, texts)
    finally:
        in_use.detach_adapter()
        in_use.adapter_folder, in_use.prompts = used
        if in_use.base is not None:
            in_use.restore_adapter(call.job)


def _verify(call: ModelCall, place: Place, texts) -> Verification:
    adapter = place.adapter
    receipts = read_receipts(adapter)
    if not receipts:
        raise AdapterError(f"The adapter {adapter.name!r} has no receipt of `sebp-edge forget` that could be verified.")
    receipt = receipts[-1]
    version, forgotten = receipt.replaced_by, {int(hash, 16) for hash in receipt.documents}

    def found(verified: bool, explanation: str, again: str | None = None) -> Verification:
        return Verification(adapter.name, receipt.path, verified, version, receipt.weights, again, explanation)

    if knowing := versions_with(adapter, forgotten):
        return found(False, f"Version {knowing[-1]} of {adapter.name!r} knows what was forgotten; it was learnt again.")
    if version is None:
        return found(
            True, f"No version of {adapter.name!r} knows what was forgotten, and none was trained in its place."
        )
    _require(adapter, receipt)
    saved = adapter.open(version)
    if saved.weights_hash() != receipt.weights:
        return found(False, f"The weights of version {version} of {adapter.name!r} are not those of the receipt.")
    again = _hash_of_training(call, place, find_remaining(call, adapter, version, texts))
    if again == receipt.weights:
        return found(
            True,
            f"No version of {adapter.name!r} knows what was forgotten, and version {version} is, bit for bit, what a "
            f"training on its {saved.record.documents:,} documents gives.",
            again,
        )
    return found(
        False, f"A training on the documents of version {version} gives other weights{_others(saved.record)}.", again
    )


def _hash_of_training(call: ModelCall, place: Place, remaining: Remaining) -> str:
    """Trains on what remains from the base model, outside the store; returns the hash of the weights."""
    with tempfile.TemporaryDirectory(prefix="sebp-edge-verify-") as folder:
        outside = replace(place, out=Path(folder) / "adapter")
        job = AdaptationJob.begin(call, outside, "forget", {}, None)
        with devices.limited_threads(remaining.record.threads):  # another number rounds differently
            return adapt_again(call, outside, remaining, job, activate_anyway=False).weights_hash()


def _require(adapter: Adapter, receipt: Receipt) -> None:
    version = receipt.replaced_by
    if receipt.weights is None:
        raise AdapterError(
            f"The receipt {receipt.path!r} has no hash of weights: version {version} was trained on a GPU, where "
            "trainings differ by rounding, or by an older sebp-edge."
        )
    if version not in adapter.versions():
        raise AdapterError(
            f"Version {version} of the adapter {adapter.name!r}, which was trained without the documents, was removed; "
            "so there is nothing to compare."
        )


def _others(record: AdapterRecord) -> str:
    """Returns which packages are others than those of the training, as the end of a sentence."""
    before = record.packages or {}
    changed = [
        f"{name} {before.get(name)}, now {now}" for name, now in package_versions().items() if before.get(name) != now
    ]
    return f", but it was made with {'; '.join(changed)}" if changed else ""
