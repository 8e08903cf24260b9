"""A small Hub on this machine, and huggingface_hub's cache."""

import pytest
from small_hub import SHA, open_hub


@pytest.fixture
def small_hub(model_folder):
    with open_hub(model_folder) as hub:
        yield hub


@pytest.fixture
def put_into_cache():
    """A function that writes files like huggingface_hub: blobs, and a snapshot of links to them."""

    def put(home, repository, files):
        folder = home / "hub" / f"models--{repository.replace('/', '--')}"
        snapshot = folder / "snapshots" / SHA
        for part in (folder / "blobs", folder / "refs", snapshot):
            part.mkdir(parents=True)
        (folder / "refs" / "main").write_text(SHA)
        for name, data in files.items():
            (folder / "blobs" / f"blob-{name}").write_bytes(data)
            (snapshot / name).symlink_to(f"../../blobs/blob-{name}")
        return snapshot

    return put
