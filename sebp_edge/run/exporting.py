"""Exports a saved adapter for other programs."""

from pathlib import Path

from sebp_edge.export.export_result import ExportProgress, ExportResult
from sebp_edge.export.exporter import check_options, export
from sebp_edge.reading.readers import read_texts
from sebp_edge.run.call import Call
from sebp_edge.run.phases import phases_of_export
from sebp_edge.store.names import is_plain


def export_adapter(
    call: Call, adapter: str | Path, version: int | None, to: str | Path, format: str, quant: str | None, texts
) -> ExportResult:
    """See `Personalizer.export`."""
    quant, progress = check_options(format, quant, has_texts=texts is not None), ExportProgress(call.notify, call.check)
    call.job.begin(phases_of_export())
    found = call.store.find(adapter, version)
    reading = None if texts is None else read_texts(texts, progress=call.progress)
    call.in_use.release()
    name = adapter if isinstance(adapter, str) and is_plain(adapter) else "adapter"
    result = export(name, found.path, found.record, call.reference, to, format, quant, reading, progress)
    call.remember_model_of(found)
    return result
