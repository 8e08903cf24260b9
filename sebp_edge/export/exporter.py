"""The main path of an export: a saved adapter in, a new folder out that was read back."""

import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from sebp_edge.basics.units import percent, sizes_apart
from sebp_edge.errors import MachineError, OptionError, suggest
from sebp_edge.events import Notice
from sebp_edge.export.export_result import ExportProgress, ExportResult, GainKept
from sebp_edge.export.formats import FORMATS, QUANTISED, Format, Gguf
from sebp_edge.export.gguf_file import QUANTISATIONS
from sebp_edge.export.llama_cpp import K_QUANTS, find_program
from sebp_edge.export.read_back import CPU, BaseComparison, memory_needed
from sebp_edge.export.source import Source
from sebp_edge.machine import devices
from sebp_edge.store.new_folder import check_new, check_space, new_folder
from sebp_edge.store.saved import SavedAdapter
from sebp_edge.values.model_reference import ModelReference
from sebp_edge.values.reading import Reading

SMALLEST = "smallest"
DEFAULT_QUANT = "q8_0"
# The share of the adapter's gain that the smallest quantisation must keep.
ENOUGH = 0.9
_CANNOT = "Cannot export to"


def check_options(format: str, quant: str | None, *, has_texts: bool) -> str | None:
    """Returns the quantisation to write; None for formats without one, and to let the adapter's record decide."""
    if format not in FORMATS:
        raise OptionError(f"There is no format {format!r}; {suggest(str(format), FORMATS)}")
    if format not in QUANTISED:
        if quant is not None:
            raise OptionError(f"The format {format!r} is not quantised; leave out quant, or choose gguf or ollama.")
        return None
    known = [*QUANTISATIONS, *K_QUANTS, SMALLEST]
    if quant is not None and quant not in known:
        raise OptionError(f"There is no quantisation {quant!r}; {suggest(str(quant), known)}")
    if quant == SMALLEST and not has_texts:
        raise OptionError("The smallest quantisation is found by the adapter's gain; give the texts it was made from.")
    if quant in K_QUANTS:
        find_program(quant)
    return quant


def export(
    name: str,
    saved: SavedAdapter,
    reference: ModelReference,
    to: str | Path,
    format: str,
    quant: str | None,
    reading: Reading | None,
    progress: ExportProgress,
) -> ExportResult:
    """Exports an adapter into a new folder, which is written whole or not at all.

    Args:
        quant: from `check_options`; by default q8_0.
        reading: texts to measure the gain on; None for general text, and no gain.
    """
    begin, target = time.perf_counter(), check_new(to, _CANNOT)
    source, warnings, kept = Source.open(name, saved.path, saved.record, reference), [], []
    if format in QUANTISED and quant is None:
        quant = DEFAULT_QUANT
    # Refuses what cannot be written before the model is loaded.
    written = _make(source, format, QUANTISATIONS[-1] if quant == SMALLEST else quant)
    check_space("The export", written.num_bytes, target, _CANNOT)
    comparison = _load(source, reading, warnings, progress)
    if quant == SMALLEST and comparison is None:
        raise MachineError(f"{warnings[0]} The smallest quantisation cannot be found; choose one.")
    if reading is not None and comparison is not None and format in QUANTISED and quant not in K_QUANTS:
        tried = QUANTISATIONS if quant == SMALLEST else [quant]
        kept = measure(source, comparison, [_make(source, format, each) for each in tried])
        written = _make(source, format, kept[-1].quant)
    with new_folder(target, _CANNOT) as temporary:
        written.write(temporary, progress)
        found = written.read_back(temporary, comparison) if comparison else written.check_tensors(temporary, progress)
        sizes = {path.name: path.stat().st_size for path in temporary.iterdir()}
    return ExportResult(
        path=str(target),
        files=tuple(sorted(sizes)),
        format=format,
        quant=getattr(written, "quant", None),
        num_bytes=sum(sizes.values()),
        seconds=time.perf_counter() - begin,
        prompts=saved.record.prompts,
        merged_into=None if written.is_adapter else source.merged_into,
        read_back_by=found.program,
        mean_difference=found.agreement and found.agreement.mean_difference,
        largest_difference=found.agreement and found.agreement.largest_difference,
        same_likeliest=found.agreement and found.agreement.same_likeliest,
        loss_base=comparison and comparison.loss_base,
        loss_adapter=comparison and comparison.loss_adapter,
        loss=found.loss,
        gain_kept=tuple(kept),
        warnings=(*warnings, *written.warnings(), *_losses(written, kept, comparison, found.loss, reading)),
    )


def _make(source: Source, format: str, quant: str | None) -> Format:
    return FORMATS[format](source) if quant is None else FORMATS[format](source, quant)


def _load(
    source: Source, reading: Reading | None, warnings: list[str], progress: ExportProgress
) -> BaseComparison | None:
    """Loads the base model to compare with; returns None, and adds a warning, if the free memory does not hold it."""
    needed, free = memory_needed(source), devices.free_memory(CPU)
    if needed <= free:
        return BaseComparison(source, reading, progress)
    size, left = sizes_apart(needed, free)
    warnings.append(f"The model was not run to compare it, since that needs {size} of memory, and {left} are free.")
    progress.on_event(Notice(warnings[0]))
    return None


def measure(source: Source, comparison: BaseComparison, formats: Iterable[Gguf]) -> list[GainKept]:
    """Measures how much of the adapter's gain quantisations keep, up to the first that keeps enough.

    The gain is over the base model that the user has, which is not rounded.
    """
    gain, found = comparison.loss_base - comparison.loss_adapter, []
    base = source.weights.of_base()
    for each in formats:
        loss_base = comparison.loss_with_weights(each.rounded(base.read))
        loss = comparison.loss_with_weights(each.rounded(source.weights.read))
        share = (comparison.loss_base - loss) / gain if gain > 0 else None
        found.append(GainKept(each.quant, loss_base, loss, share))
        if share is not None and share >= ENOUGH:
            break
    return found


def _losses(
    written: Format,
    kept: list[GainKept],
    comparison: BaseComparison | None,
    loss: float | None,
    reading: Reading | None,
) -> Iterator[str]:
    """Yields what the user should know about the loss of quantised files, beside that of the model that they have."""
    if not isinstance(written, Gguf) or comparison is None or loss is None:
        return
    base, adapter = comparison.loss_base, comparison.loss_adapter
    # Rounding costs more than the adapter changes, for better or worse; so the file is also worse than the base model.
    if loss - adapter > abs(base - adapter):
        on = "general text" if reading is None else "these texts"
        yield (
            f"This file is worse than the model without the adapter: {loss:.3f} instead of {base:.3f} nats per token "
            f"on {on} ({adapter:.3f} with the adapter, before rounding to {written.quant}); choose a larger "
            "quantisation."
        )
    elif kept and kept[-1].share is None:
        yield "The adapter does not lower the loss on these texts, so there is no gain to keep."
    elif kept and kept[-1].share < ENOUGH:
        share = percent(kept[-1].share, 0)
        yield f"{kept[-1].quant} keeps only {share} of the adapter's gain on these texts; choose a larger quantisation."
