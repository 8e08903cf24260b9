"""Whose words in chats are learnt is said, asked on a terminal, or refused in a pipe; others are named nowhere else."""

import re
import shutil
import sys
import zipfile

import pytest
from builders import make_sentences
from command import assert_one_sentence, records, run
from failing_memory import RECIPE
from terminals import run_on_terminal

from sebp_edge import AdapterStore, Personalizer
from sebp_edge.errors import OwnerUnknown

FOUND = "a WhatsApp chat with 2 people, 144 messages"


def chat(days: int) -> str:
    """A chat of two people; each day Bob writes first."""
    texts = iter(make_sentences(6 * days, words=12))
    return "".join(
        f"13/{1 + day % 12:02}/{2020 + day // 12}, 10:0{number} - {author}: {next(texts)}\n"
        for day in range(days)
        for number, author in enumerate(("Bob", "Anna", "Anna", "Bob", "Anna", "Bob"))
    )


@pytest.fixture
def export(tmp_path):
    path = tmp_path / "export.zip"
    with zipfile.ZipFile(path, "w") as made:
        made.writestr("_chat.txt", chat(24))
    return path


@pytest.fixture
def adapt_export(adapt, export):
    return ["adapt", str(export), *adapt[2:]]


@pytest.mark.slow
def test_an_adapter_writes_as_its_owner_does_and_holds_nobody_elses_name_or_words(make, export):
    personalizer = make(me="Anna")
    result = personalizer.adapt(export, activate_anyway=True)
    assert result.documents == 24
    assert result.expectation.startswith("It writes as you do in chats, but do not rely on it")
    assert result.samples
    assert {sample.beginning for sample in result.samples} == {""}
    for path in personalizer.store.folder.rglob("*"):
        assert not path.is_file() or not re.search(rb"Bob|Anna", path.read_bytes()), path
    assert not re.search("Bob|Anna", f"{result!r} {result.to_dict()} {result.summary}")


@pytest.mark.slow
def test_without_a_chat_template_chats_are_learnt_shown_and_answered_too(model_folder, export, tmp_path):
    plain = shutil.copytree(model_folder, tmp_path / "plain")
    (plain / "chat_template.jinja").unlink()
    personalizer = Personalizer(plain, recipe=RECIPE, device="cpu", store=tmp_path / "store", me="Anna")
    result = personalizer.adapt(export, activate_anyway=True)
    assert {sample.beginning for sample in result.samples} == {""}
    assert personalizer.generate("Are you coming?", temperature=0) == personalizer.generate(
        [{"role": "user", "content": "Are you coming?"}], temperature=0
    )


@pytest.mark.slow
def test_the_owner_is_said_on_the_screen_and_a_later_export_of_the_chat_adds_its_new_days(
    make, adapt_export, recipe, export, own_data_folder
):
    shown = " ".join(run(*adapt_export, "--me", "Anna", "--activate-anyway").stdout.split())
    assert "The words learnt are those of Anna in WhatsApp (72 messages). It writes as Anna does in chats" in shown
    personalizer = make(me="Anna", recipe=str(recipe), store=AdapterStore())
    assert personalizer.adapt(export).unchanged
    with zipfile.ZipFile(export, "w") as later:
        later.writestr("WhatsApp Chat with Bob.txt", chat(26))
    assert personalizer.inspect(export).beginning.startswith(
        "Learning on from version 1: 2 new and 0 changed documents"
    )


def test_an_app_can_ask_and_go_on_with_what_was_read(make, export):
    with pytest.raises(OwnerUnknown) as caught:
        make().adapt(export)
    reading = caught.value.reading
    assert [author.name for author in reading.authors] == ["Bob", "Anna"]
    export.unlink()
    assert make(me=[reading.authors[1].id]).inspect(reading).documents == 24


@pytest.mark.slow
def test_a_day_of_a_chat_or_the_chat_can_be_forgotten_by_name(make, tmp_path):
    (tmp_path / "_chat.txt").write_text(chat(24))
    (tmp_path / "other.txt").write_text(chat(36).partition("13/01/2022")[2].join(("13/01/2022", "")))
    personalizer = make(me="Anna")
    personalizer.adapt(tmp_path, activate_anyway=True)
    receipt = personalizer.forget(["_chat.txt, 2020-03-13", "other.txt"], activate_anyway=True)
    assert len(receipt.documents) == 1 + 12


@pytest.mark.slow
def test_a_chat_that_was_moved_and_renamed_is_forgotten_by_its_content_whoever_the_owner_is(make, tmp_path):
    for number, sentence in enumerate(make_sentences(12, words=30)):
        (tmp_path / f"texts/{number}.md").parent.mkdir(exist_ok=True)
        (tmp_path / f"texts/{number}.md").write_text(sentence)
    (tmp_path / "texts/_chat.txt").write_text(chat(10))
    personalizer = make(me="Anna")
    personalizer.adapt(tmp_path / "texts", activate_anyway=True)
    moved = (tmp_path / "texts/_chat.txt").rename(tmp_path / "renamed.txt")
    receipt = make(store=personalizer.store).forget(moved, activate_anyway=True)
    assert len(receipt.documents) == 10


def test_in_a_pipe_an_adaptation_to_chats_is_refused_and_nobody_is_named(adapt_export):
    for command in (adapt_export, ["inspect", *adapt_export[1:]]):
        refused = run(*command)
        assert_one_sentence(
            refused, rf"sebp-edge: These texts are {FOUND}: say which names are yours, with me= or --me"
        )
        assert "Bob" not in refused.stderr


def test_in_a_pipe_a_folder_that_is_not_notes_is_learnt_only_if_that_is_said(adapt, notes_folder):
    for number in range(24):
        (notes_folder / f"{number}.py").write_text("x")
    (notes_folder / "setup.py").write_text("x")
    for more in ((), ("--json",)):
        refused = run(*adapt, *more)
        assert refused.exit_code == 2
        assert "is a folder of code, not of notes; give the folder of your notes, or pass --yes" in refused.stderr
    said = run(*adapt, "--yes", "--memory", "much")
    assert "The memory budget is 'much'" in said.stderr and "a folder of code" not in said.stderr


def test_inspect_counts_whose_words_are_trained_on_and_names_people_on_the_screen_only(adapt_export):
    command = ["inspect", *adapt_export[1:], "--me", "anna"]
    said = run(*command)
    assert f"{FOUND}: 864 words of yours are trained on, 576 words of others are context\n" in said.stdout
    assert "people: 2\n  Bob, WhatsApp: 72 messages\n  Anna (you), WhatsApp: 72 messages\n" in said.stdout
    found = records(run(*command, "--json").stdout)[-1]
    assert (found["exports"], found["own_words"], found["others_words"]) == ([FOUND], 864, 576)
    assert "Bob" not in str(found)
    pieces = [piece for example in found["rendered"] for piece in example["pieces"]]
    assert {piece["text"] for piece in pieces if not piece["trained"]} == {"[what others wrote]"}
    assert any(piece["trained"] for piece in pieces)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="there are no pseudo-terminals")
def test_on_a_terminal_it_asks_who_the_owner_is(adapt_export):
    exit_code, output, said = run_on_terminal("inspect", *adapt_export[1:], typed="2\n")
    assert exit_code == 0, said
    assert f"Found {FOUND}." in said
    assert "1  Bob, WhatsApp: 72 messages" in said
    assert "Anna (you), WhatsApp: 72 messages" in output
