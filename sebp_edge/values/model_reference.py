"""Where to find a model."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

BUNDLED_FOLDER = Path(__file__).parents[1] / "engine" / "models" / "tiny"


@dataclass(frozen=True)
class ModelReference:
    """Where to find a model.

    Attributes:
        name: its name in reports and in saved adapters; never a path.
        kind: "bundled"; "local", a folder; "gguf", a file; "installed", a GGUF file of Ollama or LM Studio; "hub".
        location: a folder, a file or a Hub id.
        open_alternative: for a gated model, the short name of an open one of about the same size.
    """

    name: str
    kind: Literal["bundled", "local", "gguf", "installed", "hub"]
    location: str
    open_alternative: str | None = None

    @property
    def public_name(self) -> str:
        """Name of the base model in saved adapters: the Hub id, or a name without a path."""
        return {"hub": self.location, "bundled": f"sebp-edge/{self.name}"}.get(self.kind, self.name)

    @property
    def is_gguf(self) -> bool:
        """Whether the model is a GGUF file."""
        return self.kind in ("gguf", "installed")

    @property
    def has_path(self) -> bool:
        """Whether the model was given as a path, which no adapter records."""
        return self.kind in ("local", "gguf")
