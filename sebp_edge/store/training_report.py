"""The files report.json and samples.json of a version: how it was trained and tested, for its page.

report.json has counts and figures only. samples.json has words and names of the user's; it is there only if the user
asked to keep samples. Versions that were saved before have neither file.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from sebp_edge.basics.files import NewerFormat, parse_dataclass, read_json, write_atomically
from sebp_edge.errors import AdapterError
from sebp_edge.events import finite
from sebp_edge.values.answers import Answered
from sebp_edge.values.documents import LeftOut
from sebp_edge.values.training_facts import CopiedRun, ReportedFacts, Sample, TrainingFacts, facts_for

REPORT, SAMPLES = "report.json", "samples.json"
_FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class TrainingReport(ReportedFacts):
    """What report.json says."""

    format: int = _FORMAT


@dataclass(frozen=True)
class KeptSamples:
    """What samples.json says: words and names of the user's, which are saved only if the user asked to keep them.

    Attributes:
        left_out: what was left out, by name.
        copies: the names of the documents in `TrainingReport.copies`, in that order.
        answers: those of the quiz; empty without a quiz.
    """

    samples: tuple[Sample, ...]
    left_out: tuple[LeftOut, ...]
    copies: tuple[str, ...]
    answers: tuple[Answered, ...] = ()
    format: int = _FORMAT


def write_report(folder: Path, facts: TrainingFacts, *, keeps_words: bool) -> None:
    """Writes the files into the folder of a version.

    Args:
        keeps_words: whether words and names of the user's are kept.

    Raises:
        OSError: they cannot be written.
    """
    runs = None if facts.copies is None else tuple(CopiedRun(copy.run, copy.base_run) for copy in facts.copies)
    files = {REPORT: facts_for(TrainingReport, facts, copies=runs)}
    if keeps_words:
        files[SAMPLES] = facts_for(KeptSamples, facts, copies=tuple(copy.document for copy in facts.copies or ()))
    for name, content in files.items():
        text = json.dumps(finite(asdict(content)), allow_nan=False) + "\n"
        write_atomically(folder / name, text)


def read_report(folder: Path) -> TrainingReport | None:
    """Reads report.json of a version; returns None if it has none."""
    return _read(folder / REPORT, TrainingReport)


def read_samples(folder: Path) -> KeptSamples | None:
    """Reads samples.json of a version; returns None if it has none."""
    return _read(folder / SAMPLES, KeptSamples)


def _read(path: Path, kind: type):
    try:
        return parse_dataclass(read_json(path), kind)
    except NewerFormat as newer:
        raise AdapterError(
            f"{str(path)!r} was written by a newer sebp-edge, in format {newer}; this one reads format {_FORMAT}. "
            "Upgrade sebp-edge."
        ) from newer
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        reason = f" ({error.strerror})" if isinstance(error, PermissionError) else ""
        raise AdapterError(
            f"{str(path)!r} cannot be read{reason}; restore the file, or delete it to do without it."
        ) from error
