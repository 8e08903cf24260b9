"""Folders that nobody would call notes are recognised, and folders of notes are not."""

import pytest
from reading import write_file

from sebp_edge.reading.find_files import reason_against_notes


@pytest.fixture
def home(tmp_path, monkeypatch):
    for name in ("HOME", "USERPROFILE"):
        monkeypatch.setenv(name, str(tmp_path / "people/anna"))
    for name in ("XDG_CONFIG_HOME", "XDG_DOWNLOAD_DIR"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "people/anna/Downloads").mkdir(parents=True)
    return tmp_path / "people/anna"


def test_the_home_folder_those_around_it_and_the_downloads_are_no_notes(home, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(home)
    assert reason_against_notes(home) == f"{str(home)!r} is your home folder, not of notes"
    assert reason_against_notes(link) == f"{str(link)!r} is your home folder, not of notes"
    assert "is the folder around your home folder" in reason_against_notes(home.parent)
    assert "is the folder of your downloads" in reason_against_notes(home / "Downloads")


@pytest.mark.parametrize("sign", ["pyproject.toml", "package.json", "Makefile", ".git/HEAD"])
def test_code_is_no_notes_but_notes_may_be_in_git_or_have_a_makefile(tmp_path, sign):
    write_file(tmp_path, sign, "x")
    for number in range(4):
        write_file(tmp_path, f"{number}.md", "x")
    write_file(tmp_path, "build.py", "x")
    assert reason_against_notes(tmp_path) is None
    for number in range(9):
        write_file(tmp_path, f"src/{number}.py", "x")
    assert reason_against_notes(tmp_path) == f"{str(tmp_path)!r} is a folder of code, not of notes"


def test_texts_among_many_other_files_are_no_notes_but_an_export_a_vault_and_pictures_of_notes_may_be(tmp_path):
    write_file(tmp_path, "a.txt", "x")
    for number in range(4):
        write_file(tmp_path, f"{number}.png", "x")
        write_file(tmp_path, f"{number}.json", "x")
        write_file(tmp_path, f".hidden/{number}.bin", "x")
    assert reason_against_notes(tmp_path) is None
    write_file(tmp_path, "4.png", "x")
    assert "is a folder with 1 text among 10 files, not" in reason_against_notes(tmp_path)
    assert reason_against_notes(tmp_path / "a.txt") is None
    write_file(tmp_path, ".obsidian/app.json", "{}")
    assert reason_against_notes(tmp_path) is None


def test_a_folder_without_texts_is_left_to_its_reader(tmp_path):
    write_file(tmp_path, "1.png", "x")
    assert reason_against_notes(tmp_path) is None
    assert reason_against_notes(tmp_path / "missing") is None
