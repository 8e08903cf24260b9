"""The end of an adaptation: signals, full disks and conflicting folders while the adapter is saved."""

import os
import re
import shutil
import signal
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from command import halted_before_it_saves

from sebp_edge import AdapterRecord, AdapterStore, SebpEdgeError
from sebp_edge.errors import Interrupted, MachineError, ModelError, StorageError
from sebp_edge.events import AdapterSaved, Evaluated, Notice, TrainingStarted

pytestmark = pytest.mark.skipif(os.name == "nt", reason="Windows cannot halt a process and send it signals")


@pytest.fixture
def make(make, recipe):
    """A function that makes a Personalizer whose adapters are kept."""
    return partial(make, recipe=str(recipe))


@pytest.fixture
def store(own_data_folder):
    return AdapterStore()


def after_training(do):
    """A sink that calls `do` between the last training and the assessment."""

    def sink(event):
        if isinstance(event, Evaluated) and event.phase == "all documents":
            do()

    return sink


@pytest.mark.slow
def test_a_signal_at_any_instant_of_the_end_loses_nothing(make, notes_folder):
    """A timer sends signals to this process at different times after the training."""
    begins = []
    make(on_event=after_training(lambda: begins.append(time.perf_counter()))).adapt(notes_folder)
    duration = time.perf_counter() - begins[0]
    for attempt in range(1, 4):

        def begin_timer(delay=duration * attempt / 4):
            signal.setitimer(signal.ITIMER_REAL, delay)

        before, personalizer = signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT)), None
        previous_handler = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            personalizer = make(on_event=after_training(begin_timer))
            result = personalizer.adapt(notes_folder, fresh=True)
            signal.setitimer(signal.ITIMER_REAL, 0)
            assert result.version == attempt + 1
        except Interrupted as stop:
            assert f"version {attempt + 1} of the adapter 'default'" in str(stop)
            assert ("is saved and active" in str(stop)) == (
                personalizer.store.adapter("default").active() == attempt + 1
            )
        except KeyboardInterrupt:
            pass  # the signal came after `adapt`
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
            signal.signal(signal.SIGINT, previous_handler)
        assert personalizer.store.adapter("default").versions() == list(range(1, attempt + 2))


@pytest.mark.slow
def test_a_version_is_saved_even_if_its_adapter_is_removed_meanwhile(adapt, store, after_learning):
    """While the new version is written."""
    after_learning(store)
    with halted_before_it_saves(*adapt, "--fresh") as one:
        store.adapter("default").remove()
        one.send_signal(signal.SIGCONT)
        _, errors = one.communicate(timeout=200)
    assert one.returncode == 0, errors
    assert store.adapter("default").versions() == [store.adapter("default").active()]


# ------------------------------------------------------------------------------------------------------ failing saves


@pytest.mark.slow
@pytest.mark.usefixtures("unassessed")
def test_an_out_folder_created_meanwhile_loses_no_adapter(make, notes_folder, tmp_path):
    out = tmp_path / "out"
    personalizer = make(on_event=after_training(out.mkdir))
    with pytest.raises(
        StorageError,
        match=r"'.*out' already exists; nothing was overwritten\. Instead, "
        r"version 1 of the adapter 'default' is saved but not active\.$",
    ):
        personalizer.adapt(notes_folder, out=out)
    assert list(out.iterdir()) == []
    assert (personalizer.store.adapter("default").versions(), personalizer.store.adapter("default").active()) == (
        [1],
        None,
    )
    assert personalizer.load_adapter("default", 1).heldout_loss_after is not None


def test_a_dangling_link_at_out_is_refused_before_training(make, notes_folder, tmp_path):
    (tmp_path / "out").symlink_to(tmp_path / "nowhere")
    events = []
    with pytest.raises(SebpEdgeError, match="already exists"):
        make(on_event=events.append).adapt(notes_folder, out=tmp_path / "out")
    assert events == []


@pytest.fixture
def small_disk(mount_disk):
    return mount_disk("4m")


def fill(disk):
    with pytest.raises(OSError, match="No space left"), (disk / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 4096)


def test_too_little_disk_space_is_found_before_the_training(make, notes_folder, small_disk):
    (small_disk / "filler").write_bytes(b"x" * 3_000_000)
    events = []
    personalizer = make(store=AdapterStore(small_disk), on_event=events.append)
    with pytest.raises(
        StorageError, match=r"The adapter needs 2 MB, but only 1 MB are free in .*; free space or choose"
    ):
        personalizer.adapt(notes_folder)
    assert not any(isinstance(event, TrainingStarted) for event in events)


@pytest.mark.skipif(sys.platform != "linux", reason="only there a name may have any bytes")
def test_a_store_that_libraries_cannot_open_is_refused_before_the_training(make, notes_folder, model_folder, tmp_path):
    odd, events = tmp_path / os.fsdecode(b"odd \xff"), []
    with pytest.raises(StorageError, match="is not in UTF-8, so libraries cannot open it; rename it or choose another"):
        make(store=AdapterStore(odd), on_event=events.append).adapt(notes_folder)
    assert not any(isinstance(event, TrainingStarted) for event in events)
    assert not AdapterStore(odd).names()
    with pytest.raises(ModelError, match="is not in UTF-8"):
        make(model=shutil.copytree(model_folder, odd / "model"))


@pytest.mark.slow
@pytest.mark.usefixtures("unassessed")
def test_a_disk_that_fills_up_meanwhile_loses_no_adapter(make, notes_folder, small_disk, temporary_folder):
    personalizer = make(store=AdapterStore(small_disk), on_event=after_training(lambda: fill(small_disk)))
    with pytest.raises(
        StorageError, match=r"No space left on device; .* Instead, the adapter is saved in '(.*)'; move"
    ):
        personalizer.adapt(notes_folder)
    (folder,) = temporary_folder.iterdir()
    assert AdapterRecord.read(folder).heldout_loss_after is not None
    make().load_adapter(folder)


@pytest.mark.slow
@pytest.mark.usefixtures("unassessed")
def test_a_version_that_cannot_be_activated_is_named(make, notes_folder):
    """A folder is where the file with the active version's number should be."""
    personalizer = make()
    blocked = personalizer.store.folder / "default" / "active"
    personalizer.on_event = after_training(lambda: (blocked / "x").mkdir(parents=True))
    with pytest.raises(StorageError, match=r"^Version 1 of the adapter 'default' was saved but not activated: "):
        personalizer.adapt(notes_folder)
    assert personalizer.store.adapter("default").versions() == [1]
    assert Path(personalizer.store.adapter("default").open(1).path).is_dir()


def test_a_version_that_is_removed_while_it_is_assessed_is_no_error(make, notes_folder):
    notices = []

    def sink(event):
        if isinstance(event, AdapterSaved):
            personalizer.store.adapter("default").remove()
        notices.extend([event.message] if isinstance(event, Notice) else [])

    personalizer = make(on_event=sink)
    assert personalizer.adapt(notes_folder).version == 1
    assert re.fullmatch(
        r"Cannot write to '.*': No such .*; the version is saved without what was assessed\.", notices[-1]
    )


def test_a_version_stays_active_if_memory_runs_out_while_it_is_assessed(make, notes_folder, monkeypatch):
    def copies(*_):
        raise MemoryError

    monkeypatch.setattr("sebp_edge.run.assessment.longest_copies", copies)
    personalizer = make()
    why = r"^Out of CPU memory after the training, while the adapter was assessed: version 1 .* is saved and active\.$"
    with pytest.raises(MachineError, match=why):
        personalizer.adapt(notes_folder)
    adapter = personalizer.store.adapter("default")
    assert (adapter.active(), adapter.jobs, adapter.open().record.verdict) == (1, [], "better")
    assert personalizer.generate("the ferry", max_new_tokens=2, seed=1)
