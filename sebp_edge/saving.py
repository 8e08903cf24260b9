"""Saves the adapter of a training run; if that fails, saves it elsewhere so that it is not lost."""

import secrets
import tempfile
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from sebp_edge.adapters.store import AdapterRecord, AdapterStore, SavedAdapter
from sebp_edge.errors import Interrupted, NonFiniteLoss, SebpEdgeError, StorageError, TrainingStopped
from sebp_edge.models.adaptation import Adaptation
from sebp_edge.training.loop import Progress
from sebp_edge.training.run import GateResult, TrainingRun


def save(
    store: AdapterStore,
    adaptation: Adaptation,
    record: AdapterRecord,
    name: str,
    *,
    out: Path | None = None,
    prefix: str = "",
) -> SavedAdapter:
    """Saves an adaptation as a version of `name` without activating it, or into the new folder `out`.

    Args:
        prefix: the beginning of an error's message.

    Raises:
        StorageError: it could not be saved there; the message says where it was saved instead.
    """
    try:
        if out is None:
            return store.save(adaptation, record, name, activate=False)
        return store.save_to(adaptation, record, out)
    except SebpEdgeError as error:
        message = " ".join(filter(None, [prefix, str(error), _save_elsewhere(store, adaptation, record, name, out)]))
        raise StorageError(message) from error


def save_best_state(
    store: AdapterStore, run: TrainingRun, stop: BaseException, name: str, seed: int
) -> tuple[TrainingStopped, SavedAdapter | None]:
    """Saves the best state of a stopped run as a version of `name` that is not active, if it has learnt anything.

    Args:
        stop: what ended the training: a KeyboardInterrupt, NonFiniteLoss or BudgetExceeded.

    Returns:
        The error to raise, which says what was saved; and the saved adapter, or None.

    Raises:
        StorageError: see `save`.
    """
    error_type, reason = (
        (Interrupted, "Interrupted.") if isinstance(stop, KeyboardInterrupt) else (type(stop), str(stop))
    )
    progress = run.progress[-1] if run.progress else Progress()
    if not progress.steps or (error_type is NonFiniteLoss and not progress.best_epoch):
        return error_type(f"{reason} No state better than the start was found, so nothing was saved."), None
    saved = save(store, run.adaptation, make_record(run, None, seed), name, prefix=reason)
    message = (
        f"{reason} The best state so far is saved as version {saved.version} of the adapter {name!r}; it is not active."
    )
    return error_type(message, name=name, version=saved.version), saved


def describe_location(saved: SavedAdapter) -> str:
    """Describes in words where a saved adapter is."""
    if saved.name is None:
        return f"the adapter is saved in {str(saved.path)!r}"
    state = "and active" if saved.active else "but not active"
    return f"version {saved.version} of the adapter {saved.name!r} is saved {state}"


def make_record(run: TrainingRun, gate_result: GateResult | None, seed: int) -> AdapterRecord:
    """Makes the record of a run's adapter; `gate_result` is None if the adapter was not tested."""
    base, data = run.base, run.dataset
    return AdapterRecord(
        base_model=base.reference.public_name,
        model=base.reference.name,
        fingerprint=base.fingerprint,
        recipe=asdict(run.recipe),
        documents=data.num_documents,
        examples=len(data.examples),
        tokens=data.num_tokens,
        heldout_loss_before=gate_result.before.mean if gate_result else None,
        heldout_loss_after=gate_result.after.mean if gate_result else None,
        seed=seed,
        chat=data.is_chat,
    )


def _save_elsewhere(
    store: AdapterStore, adaptation: Adaptation, record: AdapterRecord, name: str, out: Path | None
) -> str:
    """Saves into the store if `out` failed, else into the system's temporary folder; returns where, as a sentence."""
    if out is not None:
        with suppress(SebpEdgeError):
            saved = store.save(adaptation, record, name, activate=False)
            return f"Instead, {describe_location(saved)}."
    with suppress(SebpEdgeError):
        folder = Path(tempfile.gettempdir()) / f"sebp-edge-{name}-{secrets.token_hex(4)}"
        store.save_to(adaptation, record, folder)
        return f"Instead, the adapter is saved in {str(folder)!r}; move it before the system deletes it."
    return "The adapter could not be saved anywhere."
