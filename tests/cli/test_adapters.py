"""`sebp-edge adapters`: every command of the history, for people and as JSON."""

import json
import re

import pytest
from command import assert_one_sentence, contents, records, run
from stored_adapter import RECORD, FakeAdaptation
from terminals import run_on_terminal

from sebp_edge import AdapterRecord, AdapterStore

pytestmark = pytest.mark.usefixtures("unassessed")

NAME = "日記 2026"
WORDS = {"keystrokes": 1000, "saved_before": 31, "saved_after": 46, "saved_more_lowest": 0.01}
WORDS |= {"saved_more_highest": 0.02, "words": 200, "guessed_before": 54, "guessed_after": 58}
WORDS |= {"guessed_more_lowest": None, "guessed_more_highest": None}


@pytest.fixture
def store(own_data_folder):
    """A store with four versions, of which 1, 2 and 4 have been active in this order."""
    store = AdapterStore()
    for number in range(1, 5):
        store.adapter(NAME).save(FakeAdaptation(b"x" * 10**6), AdapterRecord(**RECORD), activate=number != 3)
    return store


def test_a_list_has_the_guessed_words_or_else_the_loss(store):
    saved = store.adapter(NAME).save(FakeAdaptation(), AdapterRecord(**RECORD), activate=False)
    path = saved.path / "sebp_edge.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"words": WORDS}))
    listed = [line.split("\t")[4] for line in run("adapters", "list").stdout.splitlines()]
    assert listed == ["loss 3.500 → 3.100"] * 4 + ["words guessed 27 → 29 of 100"]
    assert contents(run("adapters", "list", "--json").stdout)[-1]["words"]["saved_after"] == 46


def test_versions_are_chosen_and_gone_back_to(store):
    assert run("adapters", "activate", NAME, 3).stdout == f"Version 3 of '{NAME}' is active now.\n"
    assert run("adapters", "rollback", NAME).stdout == f"Version 4 of '{NAME}' is active now.\n"
    assert run("adapters", "rollback", NAME).stdout == f"Version 2 of '{NAME}' is active now.\n"
    assert store.adapter(NAME).active() == 2
    assert_one_sentence(run("adapters", "activate", NAME, 9), r"has no version 9; it has \[1, 2, 3, 4\]")
    assert run("adapters", "rollback", NAME).exit_code == 0
    assert_one_sentence(run("adapters", "rollback", NAME), "was active before version 1; activate one of")


def test_what_was_changed_is_said_as_json(store, tmp_path):
    for arguments, version in ((("activate", NAME, 3), 3), (("rollback", NAME), 4)):
        (changed,) = contents(run("adapters", *arguments, "--json").stdout)
        assert (changed["event"], changed["name"], changed["version"]) == ("adapter", NAME, version)
        assert changed["active"] and store.adapter(NAME).active() == version
    (written,) = contents(
        run("adapters", "export", NAME, "--to", tmp_path / "one.zip", "--version", 2, "--json").stdout
    )
    assert (written["version"], written["active"]) == (2, False) and (tmp_path / "one.zip").exists()
    (renamed,) = contents(run("adapters", "rename", NAME, "other", "--json").stdout)
    assert renamed == {"v": 1, "event": "renamed", "name": NAME, "new_name": "other"} and store.names() == ["other"]
    for arguments in (("activate", "nobody", 1), ("rollback", "nobody"), ("rename", "nobody", "a")):
        (error,) = contents(run("adapters", *arguments, "--json").stdout)
        assert error["code"] == "adapter"


def test_removing_the_active_version_says_what_is_active_then(store):
    assert run("adapters", "remove", NAME, "--version", 3, "--yes").stdout == f"Deleted version 3 of '{NAME}'.\n"
    removed = run("adapters", "remove", NAME, "--version", 4, "--yes").stdout
    assert removed == f"Deleted version 4 of '{NAME}'.\nVersion 2 of '{NAME}' is active now.\n"
    run("adapters", "remove", NAME, "--version", 1, "--yes")
    store.adapter(NAME).save(FakeAdaptation(), AdapterRecord(**RECORD), activate=False)
    removed = run("adapters", "remove", NAME, "--version", 2, "--yes").stdout
    assert f"No version of '{NAME}' is active now; `sebp-edge adapters activate` chooses one." in removed
    assert_one_sentence(run("adapters", "remove", NAME, "--version", 2), r"has no version 2; it has \[5\]")


def test_what_was_removed_is_said_as_json_and_needs_a_yes(store):
    asked = run("adapters", "remove", NAME, "--version", 3, "--json")
    assert (asked.exit_code, records(asked.stdout)[-1]["error"]) == (2, "OptionError")
    assert (
        f"This deletes version 3 of '{NAME}'. Nothing was deleted; pass --yes" in records(asked.stdout)[-1]["message"]
    )
    assert store.adapter(NAME).versions() == [1, 2, 3, 4]
    for version, active in ((3, 4), (4, 2)):
        (removed,) = records(run("adapters", "remove", NAME, "--version", version, "--yes", "--json").stdout)
        assert (removed["event"], removed["versions"], removed["active"]) == ("removed", [version], active)
    (removed,) = records(run("adapters", "remove", NAME, "--yes", "--json").stdout)
    assert (removed["name"], removed["versions"], removed["active"]) == (NAME, [1, 2], None)
    (unknown,) = records(run("adapters", "remove", NAME, "--yes", "--json").stdout)
    assert (unknown["event"], unknown["error"]) == ("error", "AdapterError")


def test_an_adapter_is_renamed(store):
    assert run("adapters", "rename", NAME, "my notes").stdout == f"The adapter '{NAME}' is now 'my notes'.\n"
    assert store.names() == ["my notes"]
    assert_one_sentence(
        run("adapters", "rename", "my notes", "a/b"), "Invalid adapter name 'a/b': it could be mistaken"
    )


def test_gc_says_first_what_it_frees_and_needs_a_yes(store):
    asked = run("adapters", "gc", "--keep", 1)
    assert asked.exit_code == 2
    assert [line.split("\t") for line in asked.stdout.splitlines()] == [
        [NAME, "1", "old", "2 MB"],
        [NAME, "3", "old", "2 MB"],
    ]
    assert re.search("Deleting these 2 frees 4 MB. Nothing was deleted; pass --yes", asked.stderr)
    refused = run("adapters", "gc", "--keep", 1, "--json")
    assert (refused.exit_code, records(refused.stdout)[-1]["error"]) == (2, "OptionError")
    assert store.adapter(NAME).versions() == [1, 2, 3, 4]
    (done,) = records(run("adapters", "gc", "--keep", 1, "--yes", "--json").stdout)
    assert [(one["version"], one["reason"]) for one in done["versions"]] == [(1, "old"), (3, "old")]
    assert done["size"] == sum(one["size"] for one in done["versions"]) > 4e6
    assert store.adapter(NAME).versions() == [2, 4]
    assert run("adapters", "gc").stdout == "There is nothing to delete.\n"
    (nothing,) = records(run("adapters", "gc", "--json").stdout)
    assert (nothing["event"], nothing["versions"], nothing["size"]) == ("garbage", [], 0)
    assert_one_sentence(run("adapters", "gc", "--keep", 0), "keep is 0; it must be 1 or more", 2)


@pytest.mark.slow
@pytest.mark.parametrize(("answer", "remaining"), [("n", [1, 2, 3, 4]), ("y", [2, 4])])
def test_gc_asks_on_a_terminal(store, answer, remaining):
    exit_code, output, _ = run_on_terminal("adapters", "gc", "--keep", "1", typed=f"{answer}\n")
    assert "Deleting these 2 frees 4 MB. Delete?" in output
    assert store.adapter(NAME).versions() == remaining
    assert exit_code == int(answer == "n")


def test_a_version_is_moved_in_one_file(store, tmp_path):
    file = tmp_path / "moved"
    assert run("adapters", "export", NAME, "--to", file).stdout == f"Version 4 of '{NAME}' is in {str(file)!r}.\n"
    assert_one_sentence(run("adapters", "export", NAME, "--to", file), "already exists; choose a new file", 2)
    imported = run("adapters", "import", file, "--name", "other one").stdout
    assert imported.startswith("Saved as version 1 of 'other one'. Activate it with: sebp-edge adapters activate 'othe")
    (shown,) = records(run("adapters", "import", file, "--json").stdout)
    assert (shown["name"], shown["version"], shown["active"]) == (NAME, 5, False)
    file.write_bytes(file.read_bytes()[:5000])
    assert_one_sentence(
        run("adapters", "import", file), "is not a whole archive of an adapter: .*export the adapter again"
    )
    assert_one_sentence(run("adapters", "import", tmp_path / "no"), "No such file or directory; check the path")


@pytest.mark.slow
def test_the_documents_of_versions_are_shown_and_compared(adapt, notes_folder, after_learning):
    """Of adaptations, with their documents."""
    after_learning(AdapterStore())
    paths = sorted(notes_folder.iterdir())
    texts = [path.read_text() for path in paths]
    paths[0].write_text(texts[0] + "\n\nThe ferry is late again today.\n")
    paths[1].unlink()
    (notes_folder / "zz-new.md").write_text("Nobody had seen the lighthouse keeper since the storm in early spring.\n")
    run(*adapt)
    (found,) = contents(run("adapters", "diff", "default", 1, 2, "--json").stdout)
    assert contents(run("adapters", "diff", "default", "--json").stdout) == [found]
    assert (len(found["came"]), len(found["went"]), len(found["changed"])) == (1, 1, 1)
    assert found["came"][0]["tokens"] > 0
    lines = run("adapters", "diff", "default").stdout.splitlines()
    assert [line.split("\t")[:2] for line in lines[:-1]] == [
        ["came", "zz-new.md"],
        ["went", paths[1].name],
        ["changed", paths[0].name],
    ]
    assert re.fullmatch(r"1 came, 1 went, 1 changed, \d+ unchanged from version 1 to version 2\.", lines[-1])
    (shown,) = records(run("adapters", "show", "default", "--version", 2, "--json").stdout)
    there = [document for document in shown["manifest"] if not document["absent"]]
    assert len(there) == shown["documents"]
    assert sum(document["tokens"] for document in there) == shown["tokens"]
    # It also knows the earlier text of the note that has changed.
    gone = [document["name"] for document in shown["manifest"] if document["absent"]]
    assert sorted(gone) == [paths[0].name, paths[1].name]
    assert shown["packages"].keys() == {"python", "torch", "transformers", "peft", "safetensors"}
    assert shown["explanation"]
    assert shown["compared_with"] == 1
    assert [document["name"] for document in there] == sorted(path.name for path in notes_folder.iterdir())
    assert (
        "\tfold 1\t" in run("adapters", "show", "default", "--version", 2).stdout
        or "\ttest\t" in run("adapters", "show", "default", "--version", 2).stdout
    )
