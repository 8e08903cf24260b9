"""Changes a store of adapters while it is killed, its disk fills up, its power is cut, or others change it.

    store_faults.py kills FOLDER 500       kills at random instants
    store_faults.py events FOLDER [STEP]   a kill before each (every STEP-th) file event of each operation
    store_faults.py full FOLDER [STEP]     a disk that is full from each file event on
    store_faults.py power FOLDER [STEP]    a power cut before each event: what was not synced is gone
    store_faults.py crowd FOLDER 60        8 processes that write and read, for a minute

Prints one line of JSON with counts; ends with a traceback if a version that existed is lost or half visible, if
`active` does not name a whole version, if a number is used twice, or if a kill blocks the next operation.
"""

import errno
import hashlib
import importlib
import json
import os
import random
import shutil
import signal
import stat
import sys
import time
import traceback
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path

from stored_adapter import RECORD

from sebp_edge import AdapterStore, Folder
from sebp_edge.errors import AdapterError, SebpEdgeError
from sebp_edge.store.names import folder_of
from sebp_edge.store.record import AdapterRecord
from sebp_edge.store.where import Where

WRITES = ("os.mkdir", "os.rename", "os.link", "os.chmod", "fsync")
OTHERS = ("os.remove", "os.rmdir", "shutil.rmtree", "os.listdir", "os.scandir")
NAMES = ("mine", "日記 2", "third")
WHERE = Where(texts=((Folder("/home/anna/notes"),),))


class Weights:
    """An adaptation whose files can be checked."""

    def save(self, folder: Path) -> None:
        content = os.urandom(3000)
        for part in (folder, folder / "judged" / "1"):
            part.mkdir(parents=True, exist_ok=True)
            (part / "adapter_model.safetensors").write_bytes(content)
            (part / "sum.txt").write_text(hashlib.sha256(content).hexdigest())


def record(**values) -> AdapterRecord:
    return AdapterRecord(**RECORD | values)


def content_of(folder: Path) -> str:
    """Returns the sum of a version, which must be whole."""
    sums = {(part / "sum.txt").read_text() for part in (folder, folder / "judged" / "1")}
    for part in (folder, folder / "judged" / "1"):
        sums.add(hashlib.sha256((part / "adapter_model.safetensors").read_bytes()).hexdigest())
    (found,) = sums
    return found


def state_of(store: AdapterStore) -> dict[str, tuple[dict[int, str], list[int]]]:
    """Returns the contents of all versions, and those that have been active, of each adapter; all must be whole."""
    state = {}
    for name in store.names():
        versions = {}
        for version in store.adapter(name).versions():
            saved = store.adapter(name).open(version)
            assert saved.record.base_model == RECORD["base_model"]
            versions[version] = content_of(saved.path)
        active, file = store.adapter(name).active(), store.folder / folder_of(name) / "active"
        assert active is None or store.adapter(name).open().version == active in versions
        activated = [int(line) for line in file.read_text().split()] if file.exists() else []
        assert activated[:1] == ([] if active is None else [active])
        assert store.adapter(name).wheres().keys() <= versions.keys(), "a path is remembered longer than its version"
        state[name] = (versions, [version for version in activated if version in versions])
    return state


def make_template(folder: Path) -> AdapterStore:
    """Makes a store with three versions of "mine" and two of the second name, and an archive beside it."""
    store = AdapterStore(folder)
    for name, versions in zip(NAMES, (4, 2, 0), strict=True):
        for number in range(versions):
            store.adapter(name).save(Weights(), record(), activate=number != 1, where=WHERE)
    store.adapter("mine").export_archive(folder / "archive", 1)
    return store


def collect(store: AdapterStore) -> None:
    store.gc(store.garbage(keep=1))


OPERATIONS = {
    "save": lambda store: store.adapter("mine").save(Weights(), record(), activate=False, where=WHERE),
    "save and activate": lambda store: store.adapter("mine").save(Weights(), record(), activate=True),
    "save the first": lambda store: store.adapter("third").save(Weights(), record(), activate=True),
    "activate": lambda store: store.adapter("mine").activate(min(store.adapter("mine").versions())),
    "rollback": lambda store: store.adapter("mine").rollback(),
    "rename": lambda store: store.adapter("日記 2").rename("third"),
    "remove the active": lambda store: store.adapter("mine").remove(store.adapter("mine").active()),
    "remove one": lambda store: store.adapter("mine").remove(min(store.adapter("mine").versions())),
    "remove all": lambda store: store.adapter("日記 2").remove(),
    "gc": collect,
    "import": lambda store: store.import_archive(store.folder.parent / "archive"),
    "export": lambda store: store.adapter("mine").export_archive(store.folder.parent / f"archive-{random.random()}"),
}
DELETING = ("remove", "gc", "rename")


def check(operation: str, before: dict, store: AdapterStore, used: dict[str, int]) -> dict:
    """Checks that the store is as it was before an operation, as it should be after, or whole in between."""
    after = state_of(store)
    contents = {content for versions, _ in after.values() for content in versions.values()}
    for name, (versions, activated) in before.items():
        found, activated_now = after.get(name, ({}, []))
        for version, content in versions.items():
            assert found.get(version, content) == content, "a version has changed"
            assert version in found or operation.startswith(DELETING), f"version {version} of {name} is lost"
            assert content in contents or operation.startswith(("remove", "gc")), "a version is lost"
        if activated and found and not (operation.startswith("remove") and len(activated) == 1):
            assert activated_now, f"no version of {name} is active any more"
        assert len(versions.keys() - found.keys()) <= 1 or not operation.startswith("remove one"), "too many are gone"
    for name, (versions, _) in after.items():
        new = versions.keys() - before.get(name, ({}, []))[0].keys()
        assert len(new) <= 1 or operation == "rename"
        if operation != "rename":
            assert all(version > used.get(name, 0) for version in new), "a number is used twice"
        used[name] = max(used.get(name, 0), *versions)
    for path in store.folder.parent.glob("archive-*"):
        with_name = store.import_archive(path, "checked")
        content_of(with_name.path)
        store.adapter("checked").remove()
    return after


def fork(work) -> int:
    """Runs `work` in a child process; returns its number."""
    if not (child := os.fork()):
        code = 1
        try:
            work()
            code = 0
        except SebpEdgeError:
            code = 3
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return child


def end_of(child: int) -> int | None:
    """Waits for a child process; returns its exit code, or None if it was killed."""
    _, status = os.waitpid(child, 0)
    return None if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def new_store(folder: Path) -> AdapterStore:
    """Makes a store that is the template's copy."""
    shutil.rmtree(folder / "store", ignore_errors=True)
    shutil.copytree(folder / "template", folder / "store")
    return AdapterStore(folder / "store")


def at_event(number: int, act, kinds) -> None:
    """Calls `act` at each file event of this process from the given one on."""
    events = [0]

    def hook(event, arguments):
        if event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR):
            event = kinds[0]
        if event in kinds:
            events[0] += 1
            if events[0] >= number:
                act()

    fsync = os.fsync

    def audited(descriptor):
        sys.audit("fsync", descriptor)
        fsync(descriptor)

    os.fsync = audited
    sys.addaudithook(hook)


def refuse() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def sweep(folder: Path, act, kinds, step: int) -> dict:
    """Runs each operation once for every `step`-th of its file events, at which `act` begins."""
    make_template(folder / "template")
    faults, used = 0, {}
    for operation, work in OPERATIONS.items():
        for number in range(random.randint(1, step), 1000, step):
            store = new_store(folder)
            before = state_of(store)

            def child(number=number, work=work, store=store):
                at_event(number, act, kinds)
                work(store)

            code = end_of(fork(child))
            used = {name: max(versions) for name, (versions, _) in before.items()}
            check(operation, before, store, used)
            assert code in (0, 3, None), (operation, number)
            assert store.adapter("mine").save(Weights(), record(), activate=True).version > used["mine"]
            if code == 0:
                break
            faults += 1
    return {"faults": faults, "operations": len(OPERATIONS)}


def kill_at_random(folder: Path, count: int, seed: int) -> dict:
    """Kills random operations at random instants, one store through all of them."""
    draw, store = random.Random(seed), make_template(folder / "store")
    used = {name: max(versions) for name, (versions, _) in state_of(store).items()}
    kills, finished, durations = 0, 0, {}
    while kills < count:
        for name, needed in (("mine", 3), ("日記 2", 1)):
            while len(store.adapter(name).versions() if name in store.names() else ()) < needed:
                version = store.adapter(name).save(Weights(), record(), activate=True).version
                assert version > used.get(name, 0), "a number is used twice"
                used[name] = version
        if "third" in store.names():
            store.adapter("third").remove()
        before, operation = state_of(store), draw.choice(list(OPERATIONS))
        begin = time.perf_counter()

        def work(operation=operation):
            with suppress(AdapterError):  # nothing to roll back to
                OPERATIONS[operation](store)

        child = fork(work)
        # One of five is measured instead.
        if killed := operation in durations and draw.random() >= 0.2:
            time.sleep(draw.uniform(0, durations[operation]))
            os.kill(child, signal.SIGKILL)
        code = end_of(child)
        if code is None:
            kills += 1
        else:
            assert code == 0, operation
            finished += 1
            if not killed:
                durations[operation] = time.perf_counter() - begin
        check(operation, before, store, used)
        for path in store.folder.parent.glob("archive-*"):
            path.unlink()
    return {"kills": kills, "finished": finished}


# ---------------------------------------------------------------------------------------------------------- power cuts


class Disk:
    """What of a folder is on the disk: the contents of files and the entries of folders when they were last synced."""

    def __init__(self, folder: Path):
        self.folder, self._kept = folder, []
        self.files: dict[int, bytes] = {}
        self.entries: dict[int, dict[str, int]] = {}
        for path in (folder, *folder.rglob("*")):
            self.sync(os.open(path, os.O_RDONLY))

    def sync(self, descriptor: int) -> None:
        # Stays open, so that no new file gets the number of a deleted one.
        self._kept.append(os.dup(descriptor))
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            with os.scandir(descriptor) as entries:
                self.entries[status.st_ino] = {entry.name: entry.inode() for entry in entries}
        else:
            self.files[status.st_ino] = os.pread(descriptor, status.st_size, 0)

    def survivors(self) -> dict[str, bytes | None]:
        """Returns the files and folders (None) that a power cut would leave: only what was synced."""
        found = {}
        folders = self.entries.keys() | {path.stat().st_ino for path in self.folder.rglob("*") if path.is_dir()}

        def walk(number: int, path: str) -> None:
            for name, inner in self.entries.get(number, {}).items():
                if inner in folders:
                    found[f"{path}{name}"] = None
                    walk(inner, f"{path}{name}/")
                else:
                    found[f"{path}{name}"] = self.files.get(inner, b"")

        walk(self.folder.stat().st_ino, "")
        return found

    def named(self) -> dict[str, bytes | None]:
        """Returns what a power cut would leave if all names but only synced contents are on the disk."""
        found = {}
        for path in self.folder.rglob("*"):
            relative = str(path.relative_to(self.folder))
            found[relative] = None if path.is_dir() else self.files.get(path.stat().st_ino, b"")
        return found

    def close(self) -> None:
        for descriptor in self._kept:
            os.close(descriptor)


def build(tree: dict[str, bytes | None], folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for path, content in sorted(tree.items()):
        if content is None:
            (folder / path).mkdir(exist_ok=True)
        else:
            (folder / path).write_bytes(content)


def cut_power(folder: Path, step: int) -> dict:
    """Rebuilds the store as each power cut during each operation would leave it."""
    make_template(folder / "template")
    cuts, watching = 0, []

    events = count(random.randrange(step))

    def hook(event, arguments):
        if watching and (event in WRITES or event in OTHERS[:2]) and not next(events) % step:
            disk, trees = watching.pop()  # no events of its own
            for tree in (disk.survivors(), disk.named()):
                if tree not in trees:
                    trees.append(tree)
            watching.append((disk, trees))

    fsync = os.fsync

    def synced(descriptor):
        sys.audit("fsync", descriptor)
        fsync(descriptor)
        if watching:
            disk, trees = watching.pop()
            disk.sync(descriptor)
            watching.append((disk, trees))

    os.fsync = synced
    sys.addaudithook(hook)
    for operation, work in OPERATIONS.items():
        store = new_store(folder)
        before, trees = state_of(store), []
        disk = Disk(folder / "store")
        watching.append((disk, trees))
        work(store)
        watching.clear()
        done, final = state_of(store), disk.survivors()
        for tree in [*trees, final]:
            build(tree, folder / "rebuilt")
            rebuilt = AdapterStore(folder / "rebuilt")
            used = {name: max(versions) for name, (versions, _) in before.items()}
            after = check(operation, before, rebuilt, used)
            assert tree is not final or after == done, f"{operation} was reported but is not on the disk"
            assert rebuilt.adapter("mine").save(Weights(), record(), activate=True).version > used["mine"]
            cuts += 1
        disk.close()
    return {"cuts": cuts, "operations": len(OPERATIONS)}


# --------------------------------------------------------------------------------------------------------------- crowd


def write_at_random(store: AdapterStore, seed: int, end: float) -> dict:
    draw, saved, removed = random.Random(seed), [], []
    while time.monotonic() < end or not saved:
        name = draw.choice(NAMES)
        try:
            action = draw.randrange(8)
            if action <= 2:
                saved.append([name, store.adapter(name).save(Weights(), record(), activate=action < 2).version])
            elif action == 3:
                saved.append([name, store.import_archive(store.folder.parent / "archive", name).version])
            elif action == 4:
                store.adapter(name).activate(draw.choice(store.adapter(name).versions()))
            elif action == 5:
                store.adapter(name).rollback()
            elif action == 6:
                version = draw.choice(store.adapter(name).versions())
                store.adapter(name).remove(version)
                removed.append([name, version])
            elif len(store.adapter(name).versions()) > 10:
                removed += [[one.name, one.version] for one in store.gc(store.garbage(keep=5)).versions]
        except AdapterError:  # another process has removed it, or nothing to roll back to
            continue
    return {"saved": saved, "removed": removed}


def read_at_random(store: AdapterStore, seed: int, end: float) -> dict:
    draw, reads = random.Random(seed), 0
    while time.monotonic() < (end if reads else end + 60):  # none if the others have removed all
        name = draw.choice(NAMES)
        try:
            saved = store.adapter(name).open(draw.choice([None, *store.adapter(name).versions()]))
        except AdapterError:
            continue
        try:
            content_of(saved.path)
            reads += 1
        except FileNotFoundError:
            assert not saved.path.exists(), "half a version is visible"
    return {"reads": reads}


def crowd(folder: Path, seconds: float) -> dict:
    store = make_template(folder / "store")
    saved = [[name, version] for name in store.names() for version in store.adapter(name).versions()]
    removed, reads, end = [], 0, time.monotonic() + seconds

    def work(seed: int) -> None:
        found = (write_at_random if seed < 5 else read_at_random)(store, seed, end)
        (folder / f"{seed}.json").write_text(json.dumps(found))

    children = {seed: fork(partial(work, seed)) for seed in range(8)}
    for seed, child in children.items():
        assert end_of(child) == 0
        found = json.loads((folder / f"{seed}.json").read_text())
        saved += found.get("saved", [])
        removed += found.get("removed", [])
        reads += found.get("reads", 0)
    pairs = list(map(tuple, saved))
    assert len(set(pairs)) == len(pairs), "a number was used twice"
    present = {(name, version) for name, (versions, _) in state_of(store).items() for version in versions}
    assert present == set(pairs) - set(map(tuple, removed)), "a version is lost, or is there again"
    return {"saves": len(saved), "removals": len(removed), "reads": reads, "processes": 8}


def main() -> None:
    importlib.import_module("sebp_edge.basics.weights")  # else each child would import torch
    mode, folder, *rest = sys.argv[1:]
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    step = int(rest[0]) if rest else 1
    if mode == "kills":
        found = kill_at_random(folder, int(rest[0]), int(rest[1]) if rest[1:] else 0)
    elif mode == "events":
        found = sweep(folder, lambda: os.kill(os.getpid(), signal.SIGKILL), (*WRITES, *OTHERS), step)
    elif mode == "full":
        found = sweep(folder, refuse, WRITES, step)
    elif mode == "power":
        found = cut_power(folder, step)
    else:
        found = crowd(folder, float(rest[0]))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
