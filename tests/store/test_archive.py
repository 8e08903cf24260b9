"""Archives of versions: what was exported is imported bit for bit, and a damaged or hostile file changes nothing."""

import io
import json
import os
import random
import signal
import stat
import subprocess
import sys
import tarfile

import pytest
import torch
from safetensors.torch import save_file
from stored_adapter import RECORD, listing, save

from sebp_edge import AdapterRecord, AdapterStore, SebpEdgeError
from sebp_edge.errors import AdapterError, OptionError, StorageError


@pytest.fixture
def store(tmp_path):
    store = AdapterStore(tmp_path / "data")
    save(store, "日記 2", content=os.urandom(5000))
    return store


@pytest.fixture
def other(tmp_path):
    return AdapterStore(tmp_path / "other")


@pytest.fixture
def archive(store, tmp_path):
    store.adapter("日記 2").export_archive(tmp_path / "moved.tar")
    return tmp_path / "moved.tar"


def members(archive):
    with tarfile.open(archive) as file:
        return [(member.name, file.extractfile(member).read()) for member in file]


def rewrite(archive, found, **changes):
    """Writes members again, which are pairs or (TarInfo, content)."""
    with tarfile.open(archive, "w", format=tarfile.GNU_FORMAT) as file:
        for name, content in found:
            header = name if isinstance(name, tarfile.TarInfo) else tarfile.TarInfo(name)
            header.size = len(content)
            file.addfile(header, io.BytesIO(content))


def assert_refused(other, archive, reason):
    with pytest.raises(AdapterError, match=rf"moved\.tar' is not a whole archive of an adapter: .*{reason}"):
        other.import_archive(archive)
    assert other.names() == []
    assert not any(path.name.startswith(".saving") for path in other.folder.glob(".*"))


# ------------------------------------------------------------------------------------------------------------- moving


def test_a_version_is_moved_bit_for_bit(store, other, archive):
    saved = other.import_archive(archive)
    assert (saved.name, saved.version, saved.active) == ("日記 2", 1, False)
    assert listing(saved.path) == listing(store.adapter("日記 2").open().path)
    assert saved.record == store.adapter("日記 2").open().record
    assert other.adapter("日記 2").active() is None
    assert other.adapter(saved.name).activate(saved.version).active
    again = other.import_archive(archive, "new name")
    assert (again.name, again.version, other.names()) == ("new name", 1, ["new name", "日記 2"])
    assert store.import_archive(archive).version == 2


def test_an_archive_is_a_plain_tar_file_that_only_its_owner_can_read(store, archive):
    assert stat.S_IMODE(archive.stat().st_mode) == 0o600
    found = dict(members(archive))
    listed = json.loads(found.pop("archive.json"))
    assert (listed["format"], listed["name"]) == (1, "日記 2")
    assert found == listing(store.adapter("日記 2").open().path)
    assert [each["path"] for each in listed["files"]] == list(found)


def test_a_file_is_never_overwritten(store, archive, tmp_path):
    before = archive.read_bytes()
    with pytest.raises(OptionError, match=r"moved\.tar' already exists; choose a new file"):
        store.adapter("日記 2").export_archive(archive)
    assert archive.read_bytes() == before
    with pytest.raises(StorageError, match=r"Cannot write to '.*': No such file or directory"):
        store.adapter("日記 2").export_archive(tmp_path / "nowhere" / "x")
    with pytest.raises(AdapterError, match="has no version 7"):
        store.adapter("日記 2").export_archive(tmp_path / "x", 7)


def test_files_that_are_not_plain_are_not_exported(store, tmp_path):
    (store.adapter("日記 2").open().path / "link").symlink_to("/etc/passwd")
    with pytest.raises(AdapterError, match="has files that sebp-edge did not write"):
        store.adapter("日記 2").export_archive(tmp_path / "x")
    assert not (tmp_path / "x").exists()


# ------------------------------------------------------------------------------------------------- damaged and hostile


@pytest.mark.slow
def test_a_damaged_archive_is_one_sentence_and_changes_nothing(other, archive):
    content, draw = archive.read_bytes(), random.Random(0)
    imported = 0
    for number in range(300):
        damaged = bytearray(content)
        if number % 3 == 0:
            damaged = damaged[: draw.randrange(len(content) - 1024)]
        else:
            for _ in range(draw.randint(1, 4)):
                damaged[draw.randrange(len(damaged))] ^= 1 << draw.randrange(8)
        archive.write_bytes(damaged)
        try:
            saved = other.import_archive(archive)
        except AdapterError as error:
            assert str(error).count("\n") == 0
        else:  # the change was in what nothing depends on, such as the padding
            imported += 1
            assert number % 3
            assert AdapterRecord(**RECORD | {"created": saved.record.created}) == saved.record
            other.adapter(saved.name).remove()
        assert list(other.folder.glob(".saving*")) == []
    assert imported < 100


@pytest.mark.parametrize(
    "path", ["../x", "/tmp/x", "a/../../x", "a//x", "./x", ".salt", "C:\\x", "a\\x", "con", "x.", "a/b/c/d/e", "x" * 99]
)
def test_a_path_that_leaves_the_folder_is_refused(other, archive, tmp_path, path):
    found = members(archive)
    listed = json.loads(found[0][1])
    listed["files"][0]["path"] = path
    accepted = path == "x" * 99
    rewrite(archive, [("archive.json", json.dumps(listed).encode()), (path, found[1][1]), *found[2:]])
    before = set(tmp_path.rglob("*"))
    if accepted:
        assert other.import_archive(archive).version == 1
        return
    assert_refused(other, archive, "archive.json is damaged")
    assert {path for path in tmp_path.rglob("*") if not path.is_relative_to(other.folder.parent)} == before


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE, tarfile.DIRTYPE])
def test_links_and_devices_are_refused(other, archive, kind):
    found = members(archive)
    header = tarfile.TarInfo(found[1][0])
    header.type, header.linkname = kind, "/etc/passwd"
    rewrite(archive, [found[0], (header, b""), *found[2:]])
    assert_refused(other, archive, "it contains something other than files")


def with_list(change):
    def damage(archive):
        found = members(archive)
        listed = json.loads(found[0][1])
        change(listed)
        rewrite(archive, [("archive.json", json.dumps(listed).encode()), *found[1:]])

    return damage


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda archive: archive.write_bytes(b""), "cut short or no archive"),
        (lambda archive: archive.write_bytes(bytes(5000)), "cut short or no archive"),
        (lambda archive: archive.write_bytes(b"PK\x03\x04" * 500), "cut short or no archive"),
        (lambda archive: rewrite(archive, members(archive)[1:]), "does not begin with archive.json"),
        (lambda archive: rewrite(archive, [("archive.json", b" " * 2**21)]), "does not begin with archive.json"),
        (lambda archive: rewrite(archive, [("archive.json", b"[" * 10**5)]), "archive.json is damaged"),
        (lambda archive: rewrite(archive, [("archive.json", b"[]")]), "archive.json is damaged"),
        (lambda archive: rewrite(archive, members(archive)[:-1]), "cut short|is missing"),
        (lambda archive: rewrite(archive, members(archive)[::-1]), "does not begin with"),
        (with_list(lambda listed: listed.update(format=2)), "its format is '2', and this sebp-edge reads 1"),
        (with_list(lambda listed: listed.update(name=5)), "archive.json is damaged"),
        (with_list(lambda listed: listed.update(files=listed["files"] * 1000)), "archive.json is damaged"),
        (with_list(lambda listed: listed.update(files=listed["files"] * 2)), "two files of one name"),
        (with_list(lambda listed: listed["files"][0].update(path="sebp_edge.json/x")), "two files of one name"),
        (with_list(lambda listed: listed["files"][0].update(size=10**15)), "is missing"),
        (with_list(lambda listed: listed["files"][0].update(size=-1)), "archive.json is damaged"),
        (with_list(lambda listed: listed["files"][0].update(size="1")), "archive.json is damaged"),
        (with_list(lambda listed: listed["files"][0].update(sha256="0" * 64)), "has changed"),
        (with_list(lambda listed: listed["files"][0].update(sha256=None)), "archive.json is damaged"),
    ],
)
def test_a_list_that_does_not_fit_is_refused(other, archive, damage, reason):
    damage(archive)
    with pytest.raises(SebpEdgeError, match=rf"{reason}|The adapter needs 1000000\.0 GB"):
        other.import_archive(archive)
    assert other.names() == []
    assert not list(other.folder.glob(".saving-*"))


@pytest.mark.parametrize("name", ["../x", "a\x1b[0m", "", ".salt", "x" * 100])
def test_a_name_that_is_not_valid_is_refused_and_another_one_can_be_given(other, archive, name):
    with_list(lambda listed: listed.update(name=name))(archive)
    with pytest.raises(AdapterError, match="Invalid adapter name"):
        other.import_archive(archive)
    assert other.import_archive(archive, "mine").name == "mine"


def test_a_version_without_a_readable_record_is_refused(other, archive):
    with_list(lambda listed: listed.update(files=[each for each in listed["files"] if "sebp" not in each["path"]]))(
        archive
    )
    rewrite(archive, [each for each in members(archive) if "sebp_edge" not in each[0]])
    with pytest.raises(AdapterError, match=r"moved\.tar' is not an adapter of sebp-edge"):
        other.import_archive(archive)
    assert other.names() == []


def test_a_pipe_or_a_folder_or_no_file_is_refused_at_once(other, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    signal.alarm(20)
    for path, words in (("pipe", "not a regular file"), ("data", "Is a directory|is not"), ("nowhere", "No such file")):
        (tmp_path / "data").mkdir(exist_ok=True)
        with pytest.raises(AdapterError, match=words):
            other.import_archive(tmp_path / path)
    signal.alarm(0)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_large_archive_is_imported_in_bounded_memory(other, archive):
    """The process may hold 200 MB beside a file of 307 MB."""
    found = members(archive)
    listed = json.loads(found[0][1])
    size = 600_000 * 512
    listed["files"][0].update(size=size)
    header = tarfile.TarInfo(listed["files"][0]["path"])
    header.size = size
    text = json.dumps(listed).encode()
    rewrite(archive, [("archive.json", text)])
    with archive.open("r+b") as file:
        file.seek(512 + len(text) + -len(text) % 512)
        file.write(header.tobuf(tarfile.GNU_FORMAT))
        file.truncate(file.tell() + size)
    code = """
import sys
from sebp_edge import AdapterStore
from sebp_edge.errors import SebpEdgeError
try:
    AdapterStore(sys.argv[1]).import_archive(sys.argv[2])
except SebpEdgeError as error:
    print(error)
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""
    done = subprocess.run([sys.executable, "-c", code, other.folder.parent, archive], capture_output=True, text=True)
    message, peak = done.stdout.splitlines()
    assert "has changed" in message
    assert int(peak) * 1024 < 200_000_000
    assert other.names() == []


# ------------------------------------------------------------------------------------------------ strangers' weights


class Weights:
    """Stands in for an adaptation with matrices of the rank 2."""

    def __init__(self, dtype=torch.float32, value=1.0, config=None):
        self.value, self.dtype, self.config = value, dtype, {"r": 2} if config is None else config

    def save(self, folder):
        # More values than are read at once; the odd one is the last of all.
        lora_A, lora_B = torch.ones(2, 700_000), torch.ones(8, 2, dtype=torch.float64)
        lora_B[-1, -1] = self.value
        tensors = {"x.lora_A.weight": lora_A.to(self.dtype), "x.lora_B.weight": lora_B.to(self.dtype)}
        for part in (folder, folder / "judged" / "1"):
            part.mkdir(parents=True, exist_ok=True)
            save_file(tensors, part / "adapter_model.safetensors")
            (part / "adapter_config.json").write_text(json.dumps(self.config))


def moved(weights, tmp_path, other):
    store = AdapterStore(tmp_path / "strange")
    store.adapter("theirs").save(weights, AdapterRecord(**RECORD), activate=True)
    store.adapter("theirs").export_archive(tmp_path / "theirs.tar")
    return other.import_archive(tmp_path / "theirs.tar")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2])
def test_weights_with_nan_or_infinity_are_not_imported(tmp_path, other, dtype):
    assert moved(Weights(dtype, torch.finfo(dtype).max), tmp_path, other).version == 1
    for value in (float("nan"), float("inf"), -float("inf")):
        (tmp_path / "theirs.tar").unlink()
        with pytest.raises(AdapterError, match=r"theirs\.tar' is not imported: its weights have NaN or infinity"):
            moved(Weights(dtype, value), tmp_path, other)
    assert other.adapter("theirs").versions() == [1]


@pytest.mark.parametrize("r", [2**31, 10**400, 1, 0, -2, 2.5, "2", None, [2], True])
def test_a_rank_that_the_matrices_do_not_have_is_not_imported(tmp_path, other, r):
    with pytest.raises(AdapterError, match=r"theirs\.tar' is not imported: .* another rank than"):
        moved(Weights(config={"r": r}), tmp_path, other)
    assert other.names() == []
