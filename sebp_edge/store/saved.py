"""A saved version of an adapter, and the names of its files.

    adapter_model.safetensors, adapter_config.json      the weights, in PEFT's layout
    sebp_edge.json      the record
    README.md           the model card
    documents.json      names, salted hashes and splits of the documents
    known_texts.json    salted hashes of the texts
    tested.json         salted hashes of the test documents, with their losses
    report.json         how it was trained and tested
    samples.json        words and names of the user's, only if asked for
    judged/<number>/    the states that the gate judged, if the version was trained on all documents afterwards

A version contains none of the user's texts or paths, apart from samples.json and the names of documents.
"""

import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from sebp_edge.basics.files import storage_errors
from sebp_edge.errors import AdapterError
from sebp_edge.store.folders import Saveable, version_numbers, write_version
from sebp_edge.store.new_folder import new_folder
from sebp_edge.store.record import AdapterRecord
from sebp_edge.store.training_report import read_report, read_samples
from sebp_edge.store.version_report import VersionReport

JUDGED = "judged"
DOCUMENTS = "documents.json"


@dataclass(frozen=True)
class SavedAdapter:
    """An adapter on disk. `name` and `version` are None for one saved outside the store."""

    path: Path
    record: AdapterRecord
    name: str | None = None
    version: int | None = None
    active: bool = False

    def to_dict(self) -> dict:
        """Returns which version it is, and its record, as JSON-ready values."""
        where = {"name": self.name, "version": self.version, "active": self.active, "adapter_path": str(self.path)}
        return where | asdict(self.record)

    def judged_states(self) -> list[Path]:
        """Returns the folders of the states that the gate judged; its own if it was not trained again.

        Raises:
            AdapterError: one of them is missing.
        """
        folder = self.path / JUDGED
        numbers = version_numbers(folder)
        if numbers != list(range(1, len(numbers) + 1)):
            raise AdapterError(f"A judged state is missing in {str(folder)!r}, which has {numbers}.")
        return [folder / str(number) for number in numbers] or [self.path]

    def weights_hash(self) -> str:
        """Returns the SHA-256 of its weights and of those of its judged states, as hexadecimal digits.

        Raises:
            StorageError: they cannot be read.
        """
        digest = hashlib.sha256()
        with storage_errors("Cannot read the weights in", self.path, ""):
            for path in sorted(self.path.rglob("*.safetensors")):
                with path.open("rb") as file:
                    own = hashlib.file_digest(file, "sha256").hexdigest()
                digest.update(f"{path.relative_to(self.path).as_posix()} {own}\n".encode())
        return digest.hexdigest()

    def report(self, *, with_samples: bool = False) -> VersionReport:
        """Returns how it was made and tested, with `to_html()`, a page in one file, and `to_dict()`.

        Args:
            with_samples: whether it has the samples and names of documents, if the version was made with
                `keep_samples`. Without them it contains no text of the user's.

        Raises:
            AdapterError: a file of it is damaged, or a newer sebp-edge wrote it.
        """
        samples = read_samples(self.path) if with_samples else None
        training = read_report(self.path)
        return VersionReport(self.name, self.version, self.active, self.record, training, samples, with_samples)


def refuse_truncated(folder: Path) -> None:
    """Raises an AdapterError if the file of weights is not as long as its header says; reads no more than that."""
    try:
        with safe_open(folder / "adapter_model.safetensors", framework="numpy"):
            pass
    except (OSError, SafetensorError) as error:
        raise AdapterError(f"The adapter in {str(folder)!r} is damaged ({error}).") from error


def save_to(adaptation: Saveable, record: AdapterRecord, out: Path) -> SavedAdapter:
    """Saves an adapter into a new folder outside the store."""
    out = out.absolute()
    with new_folder(out, "Cannot save to") as temporary:
        write_version(adaptation, record, temporary)
    return SavedAdapter(out, record)
