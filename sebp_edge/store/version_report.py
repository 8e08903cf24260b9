"""What is known of one version: its record, how it was trained and tested; as JSON and as a page."""

from dataclasses import asdict, dataclass
from pathlib import Path

from sebp_edge.basics.pages import chart
from sebp_edge.basics.pages.render import mark, render
from sebp_edge.basics.units import duration, gigabytes, percent, plural
from sebp_edge.store.record import AdapterRecord
from sebp_edge.store.training_report import KeptSamples, TrainingReport

MARK = mark("adapters report")


@dataclass(frozen=True)
class VersionReport:
    """One version of an adapter.

    Attributes:
        name, version: None for an adapter outside the store.
        training: how it was trained and tested; None if it was saved before sebp-edge kept that.
        samples: words and names of the user's; None if they were not asked for now, or not kept then.
    """

    name: str | None
    version: int | None
    active: bool
    record: AdapterRecord
    training: TrainingReport | None
    samples: KeptSamples | None
    with_samples: bool = False

    def to_dict(self) -> dict:
        """Returns it as JSON-ready values: all that the page shows."""
        values = asdict(self)
        del values["with_samples"]
        return values

    def to_html(self) -> str:
        """Returns a page that is one file, loads nothing, and has no script."""
        filters = {
            "loss": lambda loss: "–" if loss is None else f"{loss:.3f}",
            "percent": lambda share: "–" if share is None else percent(share),
            "change": _change,
            "better": lambda gain: f"{percent(abs(gain))} {'worse' if gain < 0 else 'better'}",
            "count": lambda number: "–" if number is None else f"{number:,}",
            "counted": plural,
            "size": lambda size: "–" if size is None else gigabytes(size),
            "duration": lambda seconds: "–" if seconds is None else duration(seconds),
        }
        return render(
            Path(__file__).with_name("version.html"),
            filters,
            mark=MARK,
            report=self,
            record=self.record,
            training=self.training,
            chart=chart,
        )


def _change(gain: float | None) -> str:
    """Formats by how much a loss changed, given by what share it fell: "−4.4 %" for 0.044."""
    if gain is None:
        return "–"
    shown = percent(-gain)
    return shown.replace("-", "−") if shown.startswith(("-", "0.0 ")) else f"+{shown}"
