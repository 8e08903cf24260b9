"""Downloads a base model, and tells how far that is."""

from dataclasses import asdict, dataclass

from sebp_edge.engine.models import hub
from sebp_edge.events import Sink
from sebp_edge.run.job import PREPARING, JobSink, Phase
from sebp_edge.values.model_reference import ModelReference
from sebp_edge.values.preparation_progress import Progress


@dataclass(frozen=True)
class Downloaded:
    """A base model that is on this machine, by its name."""

    model: str

    def to_dict(self) -> dict:
        """Returns it as JSON-ready values."""
        return asdict(self)


def download(reference: ModelReference, on_event: Sink) -> Downloaded:
    """Downloads a model unless it is on this machine; only the end of the process stops it before."""
    with JobSink(on_event) as job:
        job.begin([Phase("downloading", {PREPARING: 100}, {PREPARING: 1.0})])
        hub.download(reference, Progress(job, job.tick))
        job.finish()
    return Downloaded(reference.public_name)
