"""Finds the base model of a saved adapter."""

from sebp_edge.errors import ModelError, ModelOfflineError


def find_base_model(record) -> str:
    """Returns the name of an adapter's base model; refuses to download it, since the record may be from others."""
    from sebp_edge.models.catalog import resolve
    from sebp_edge.models.hub import local_folder
    from sebp_edge.models.installed import GGUF, LM_STUDIO, OLLAMA

    is_named = "/" in record.base_model or record.base_model.startswith((OLLAMA, LM_STUDIO))
    reference = resolve(record.model) if is_named else None
    if reference is None or reference.has_path:
        # Adapters for a model in a local folder or file record its name, never its path.
        kind = "file" if record.base_model.endswith(GGUF) else "folder"
        raise ModelError(
            f"The adapter was made for the model in a {kind} {record.base_model!r}; give that {kind} with --model."
        )
    if local_folder(reference) is None:
        raise ModelOfflineError(
            f"The adapter was made for {record.model!r}, which is not on this machine; to download it, pass "
            f"--model {record.model}."
        )
    return record.model
