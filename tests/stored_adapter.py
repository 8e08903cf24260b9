"""A record and a fake adaptation for tests of the store."""

from pathlib import Path

RECORD = {
    "base_model": "sebp-edge/tiny",
    "model": "tiny",
    "fingerprint": "abc",
    "recipe": {"name": "notes", "method": "lora"},
    "documents": 12,
    "examples": 13,
    "tokens": 1400,
    "heldout_loss_before": 3.5,
    "heldout_loss_after": 3.1,
    "seed": 0,
}


class FakeAdaptation:
    """Stands in for an adaptation; saves files, one of them in a subfolder."""

    def __init__(self, content=b"weights"):
        self.content = content

    def save(self, folder: Path) -> None:
        (folder / "adapter_model.safetensors").write_bytes(self.content)
        (folder / "templates").mkdir()
        (folder / "templates" / "chat.jinja").write_bytes(self.content)

    def detach(self) -> None: ...
