"""Saves the adapter of a trial; if its place fails, saves it elsewhere so that nothing is lost."""

import secrets
import tempfile
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from sebp_edge.adapters.store import AdapterRecord, AdapterStore, SavedAdapter
from sebp_edge.errors import Interrupted, NonFiniteLoss, SebpEdgeError, StorageError, TrainingStopped
from sebp_edge.models.adaptation import Adaptation
from sebp_edge.training.loop import Progress
from sebp_edge.training.trial import Judgement, Trial


def save(
    store: AdapterStore,
    adaptation: Adaptation,
    record: AdapterRecord,
    name: str,
    *,
    out: Path | None = None,
    because: str = "",
) -> SavedAdapter:
    """Saves an adaptation as a version of `name` without activating it, or into the new folder `out`.

    Args:
        because: the beginning of an error's message.

    Raises:
        StorageError: it could not be saved there; the message says where it was saved instead.
    """
    try:
        if out is None:
            return store.save(adaptation, record, name, activate=False)
        return store.save_to(adaptation, record, out)
    except SebpEdgeError as error:
        message = " ".join(filter(None, [because, str(error), _saved_elsewhere(store, adaptation, record, name, out)]))
        raise StorageError(message) from error


def save_best_state(
    store: AdapterStore, trial: Trial, stop: BaseException, name: str, seed: int
) -> tuple[TrainingStopped, SavedAdapter | None]:
    """Saves a stopped trial's best state as a version of `name` that is not active, if it has one worth saving.

    Args:
        stop: what ended the training: a KeyboardInterrupt, NonFiniteLoss or BudgetExceeded.

    Returns:
        The error to raise, which says what was saved; and the saved adapter, or None.

    Raises:
        StorageError: see `save`.
    """
    kind, why = (Interrupted, "Interrupted.") if isinstance(stop, KeyboardInterrupt) else (type(stop), str(stop))
    progress = trial.progress[-1] if trial.progress else Progress()
    if not progress.steps or (kind is NonFiniteLoss and not progress.best_epoch):
        return kind(f"{why} This training had no better state yet, so nothing was saved."), None
    saved = save(store, trial.adaptation, record_of(trial, None, seed), name, because=why)
    message = (
        f"{why} The best state so far is saved as version {saved.version} of the adapter {name!r}; it is not active."
    )
    return kind(message, name=name, version=saved.version), saved


def place_of(saved: SavedAdapter) -> str:
    """Says where a saved adapter is, in words."""
    if saved.name is None:
        return f"the adapter is saved in {str(saved.path)!r}"
    state = "and active" if saved.active else "but not active"
    return f"version {saved.version} of the adapter {saved.name!r} is saved {state}"


def record_of(trial: Trial, judgement: Judgement | None, seed: int) -> AdapterRecord:
    """Makes the record of a trial's adapter; `judgement` is None if the adapter was not tested."""
    base, data = trial.base, trial.dataset
    return AdapterRecord(
        base_model=base.reference.public_name,
        model=base.reference.name,
        fingerprint=base.fingerprint,
        recipe=asdict(trial.recipe),
        documents=data.documents,
        examples=len(data.examples),
        tokens=data.tokens,
        heldout_loss_before=judgement.before.mean if judgement else None,
        heldout_loss_after=judgement.after.mean if judgement else None,
        seed=seed,
        chat=data.chat,
    )


def _saved_elsewhere(
    store: AdapterStore, adaptation: Adaptation, record: AdapterRecord, name: str, out: Path | None
) -> str:
    """Saves into the store if `out` failed, else into the system's temporary folder, and says where."""
    if out is not None:
        with suppress(SebpEdgeError):
            saved = store.save(adaptation, record, name, activate=False)
            return f"What was learnt is saved all the same: {place_of(saved)}."
    with suppress(SebpEdgeError):
        folder = Path(tempfile.gettempdir()) / f"sebp-edge-{name}-{secrets.token_hex(4)}"
        store.save_to(adaptation, record, folder)
        return f"What was learnt is saved in {str(folder)!r} all the same; move it before the system clears it."
    return "What was learnt is lost."
