"""A name that has an adapter already: of other texts, of another model; and two adaptations of one name at once."""

import shutil
import signal

import pytest
from builders import make_sentences
from command import halted_before_it_saves, records, run, without_controls
from terminals import run_on_terminal

from sebp_edge import AdapterStore, Folder
from sebp_edge.events import NameInUse

pytestmark = pytest.mark.usefixtures("unassessed")


class Stop(Exception):
    """An app does not go on."""


@pytest.fixture
def other_folder(tmp_path):
    """A folder of another person's notes."""
    folder = tmp_path / "letters of Anna"
    folder.mkdir()
    for number, text in enumerate(make_sentences(24, seed=7)):
        (folder / f"{number}.md").write_text(text)
    return folder


def move(folder, tmp_path):
    return [folder.rename(tmp_path / "moved")]


def rewrite(folder, tmp_path):
    for number, path in enumerate(sorted(folder.iterdir())):
        path.write_text(f"Entirely new text number {number}.")
    return [folder]


def inner(folder, tmp_path):
    (folder / "2027").mkdir()
    (folder / "2027" / "new.md").write_text("Nothing that was there before.")
    return [folder / "2027"]


def around(folder, tmp_path):
    rewrite(folder, tmp_path)
    return [tmp_path / "notes" / ".."]


def through_a_link(folder, tmp_path):
    (tmp_path / "link").symlink_to(folder)
    rewrite(folder, tmp_path)
    return [tmp_path / "link"]


def with_another(folder, tmp_path):
    rewrite(folder, tmp_path)
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "a.md").write_text("Another one.")
    return [tmp_path / "more", Folder(folder, exclude=["note-01.md"])]


def as_strings(folder, tmp_path):
    return [path.read_text() for path in sorted(folder.iterdir())[:3]]


def copied_and_changed(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    for path in sorted(copy.iterdir())[5:]:
        path.write_text(f"Entirely new text in {path.name}.")
    return [copy]


SAME = [move, rewrite, inner, around, through_a_link, with_another, as_strings, copied_and_changed]


@pytest.mark.slow
def test_the_same_folder_and_the_same_documents_elsewhere_are_no_other_texts(
    make, notes_folder, other_folder, tmp_path
):
    personalizer = make()
    personalizer.adapt(notes_folder, activate_anyway=True)
    said = "Version 1 of the adapter 'default' knows"

    for change in SAME:
        copy = tmp_path / "kept"
        shutil.copytree(notes_folder, copy)
        beginning = personalizer.inspect(change(notes_folder, tmp_path)).beginning
        assert not beginning.startswith(said), change.__name__
        shutil.rmtree(notes_folder, ignore_errors=True)
        copy.rename(notes_folder)
    few = [*make_sentences(20, seed=7), (notes_folder / "note-00.md").read_text()]
    for texts, known in ((other_folder, "none of which is among these 24"), (few, "only 1 of which is among these 21")):
        assert personalizer.inspect(texts).beginning.startswith(f"{said} 24 documents, {known}.")


@pytest.mark.slow
def test_other_texts_are_said_first_and_an_app_can_stop_then(make, notes_folder, other_folder):
    personalizer, events = make(after=True), []

    def sink(event):
        events.append(event)
        if isinstance(event, NameInUse):
            raise Stop

    personalizer.on_event = sink
    with pytest.raises(Stop):
        personalizer.adapt(other_folder)
    assert {event.event for event in events} == {"job_started", "progress", "preparing", "name_in_use"}
    assert events[-1].message == (
        "Version 1 of the adapter 'default' knows 24 documents, none of which is among these 24. To keep the two "
        "apart, give this adapter a name of its own, such as --name 'letters of Anna' (name='letters of Anna')."
    )
    assert events[-1].proposal == "letters of Anna"
    message = events[-1].message
    assert personalizer.store.adapter("default").versions() == [1]
    # With fresh=True, too, since the name stays the same.
    with pytest.raises(Stop):
        personalizer.adapt(other_folder, fresh=True)
    personalizer.on_event = events.append
    assert personalizer.inspect(other_folder).beginning.startswith(message)
    # Whoever goes on loses nothing, and is not asked about this folder again.
    result = personalizer.adapt(other_folder, activate_anyway=True)
    assert (result.version, result.active) == (2, True)
    assert personalizer.store.adapter("default").versions() == [1, 2]
    (other_folder / "new.md").write_text("A text that nobody knows yet.")
    for folder in (notes_folder, other_folder):
        assert personalizer.inspect(folder).beginning.startswith(("Learning on", "Nothing is new"))


def test_a_name_that_is_taken_is_not_proposed(make, other_folder):
    def stop(event):
        if isinstance(event, NameInUse):
            proposed.append(event.proposal)
            raise Stop

    personalizer, proposed = make(after=True, on_event=stop), []
    personalizer.store.adapter("default").rename("letters of Anna")
    for texts in (other_folder, make_sentences(3, seed=8), other_folder.with_name("...--")):
        if texts == other_folder.with_name("...--"):
            other_folder.rename(texts)
        with pytest.raises(Stop):
            personalizer.adapt(texts, name="letters of Anna")
    assert proposed == ["letters of Anna-2", "letters of Anna-2", "another"]


@pytest.mark.slow
@pytest.mark.parametrize(("answer", "name"), [("", "letters of Anna"), ("n", "default")])
def test_on_a_terminal_it_asks_for_the_name(adapt, after_learning, other_folder, answer, name):
    after_learning(AdapterStore())
    exit_code, _, said = run_on_terminal("adapt", other_folder, *adapt[2:], typed=f"{answer}\n")
    said = " ".join(" ".join(without_controls(said)).split())
    assert "note: Version 1 of the adapter 'default' knows 24 documents, none of which is among these 24." in said
    assert "Name it 'letters of Anna' instead? [Y/n]" in said
    versions = {each: AdapterStore().adapter(each).versions() for each in AdapterStore().names()}
    assert versions == {"default": [1], name: [1, 2] if name == "default" else [1]}
    # With its own name, it is compared with nothing, and so it is active.
    assert exit_code == (3 if name == "default" else 0)


@pytest.mark.slow
def test_in_a_pipe_it_says_so_first_and_goes_on(adapt, after_learning, other_folder):
    after_learning(AdapterStore())
    said = run("adapt", other_folder, *adapt[2:])
    assert said.stderr.startswith("note: Version 1 of the adapter 'default' knows 24 documents, none of which is among")
    assert said.stderr.count("Version 1 of the adapter") == 1
    assert said.exit_code == 3, said.output  # its test documents are gone, so that the gate compares nothing
    for path in other_folder.iterdir():
        path.unlink()
    (other_folder / "b.md").write_text("Yet another one.")
    _, first, *_ = records(
        run("adapt", other_folder.rename(other_folder.with_name("third")), *adapt[2:], "--json").stdout
    )
    assert (first["event"], first["differs"], first["version"]) == ("name_in_use", ["texts"], 1)


@pytest.mark.slow
def test_a_version_is_not_activated_over_one_that_it_was_not_compared_with(adapt, notes_folder):
    """Two processes adapt one name; the first one waits before it saves until the second one has ended."""
    going = halted_before_it_saves(*adapt, "--json", "--epochs", 2)
    assert run(*adapt).exit_code == 0
    assert AdapterStore().adapter("default").active() == 1
    going.send_signal(signal.SIGCONT)
    lines, errors = going.communicate(timeout=120)
    assert going.returncode == 3, errors
    result = records(lines)[-1]
    assert (result["passed"], result["active"], result["version"], result["overtaken_by"]) == (True, False, 2, 1)
    assert result["summary"].startswith("Better: version 2 of 'default' is saved, but not active. ")
    assert result["summary"].endswith(
        " But version 1 became active meanwhile, and the two were not compared. Activate it anyway: sebp-edge adapters "
        "activate default 2"
    )
    assert AdapterStore().adapter("default").active() == 1
    assert run("adapters", "activate", "default", 2).exit_code == 0
    assert AdapterStore().adapter("default").open().record.compared_with is None


@pytest.mark.slow
def test_what_is_asked_for_is_activated_whatever_became_active_meanwhile(make, notes_folder):
    personalizer, other = make(), make()

    def adapt_meanwhile(event):
        if event.event == "step" and other.store.names() == []:
            other.adapt(notes_folder, activate_anyway=True)

    personalizer.on_event = adapt_meanwhile
    result = personalizer.adapt(notes_folder, activate_anyway=True)
    assert (result.version, result.active, result.overtaken_by) == (2, True, None)
