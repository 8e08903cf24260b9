"""Finds the base model that an adapter was made for; imports no torch."""

from sebp_edge.engine.models.catalog import resolve
from sebp_edge.engine.models.hub_cache import local_folder
from sebp_edge.engine.models.installed import GGUF, LM_STUDIO, OLLAMA
from sebp_edge.errors import ModelError, ModelOfflineError
from sebp_edge.store.adapter_store import AdapterStore
from sebp_edge.store.record import AdapterRecord


def find_base_model(store: AdapterStore, record: AdapterRecord) -> str:
    """Returns the name of an adapter's base model, or its path if it was given as a folder or a file.

    Refuses to download it, since the record may be from others.
    """
    is_named = "/" in record.base_model or record.base_model.startswith((OLLAMA, LM_STUDIO))
    reference = resolve(record.model) if is_named else None
    if reference is None or reference.has_path:
        return _remembered_path(store, record)
    if local_folder(reference) is None:
        raise ModelOfflineError(
            f"The adapter was made for {record.model!r}, which is not on this machine; to download it, pass "
            f"--model {record.model}."
        )
    return record.model


def _remembered_path(store: AdapterStore, record: AdapterRecord) -> str:
    """Returns where the base model is; adapters record its name only, but the store remembers its path."""
    kind = "file" if record.base_model.endswith(GGUF) else "folder"
    made_for = f"The adapter was made for the model in a {kind} {record.base_model!r}"
    path = store.model_path(record)
    if path is None:
        raise ModelError(f"{made_for}; give that {kind} with --model.")
    try:
        resolve(path)
    except ModelError as error:
        raise ModelError(
            f"{made_for}, which is no longer at {str(path)!r}; give the adapter's name, and with --model the {kind}'s "
            "new place."
        ) from error
    return str(path)
