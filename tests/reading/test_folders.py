"""Ignore files and patterns decide which files of a folder are read; everything else is listed with its reason."""

import os

import pytest
from pace import at_most
from reading import contents, left_out, read_texts, write_file

from sebp_edge import Folder
from sebp_edge.errors import OptionError


def sources(texts) -> list[str]:
    return [document.source for document in read_texts(texts).documents]


@pytest.fixture
def notes(tmp_path):
    for name in ("a.md", "b.txt", "drafts/c.md", "drafts/old/d.md", "2024/e.md"):
        write_file(tmp_path, name, f"Text of {name}.")
    return tmp_path


@pytest.mark.parametrize("name", [".gitignore", ".sebpignore"])
def test_ignored_files_and_folders_are_left_out_and_listed(notes, name):
    write_file(notes, name, "# mine\n*.txt\ndrafts/\n")
    assert sources(notes) == ["a.md", "2024/e.md"]
    assert left_out(notes) == {"b.txt": f"ignored by {name}", "drafts/": f"ignored by {name}"}


def test_the_sebpignore_has_the_last_word_and_so_has_the_inner_folder(notes):
    write_file(notes, ".gitignore", "*.md\n")
    write_file(notes, ".sebpignore", "!a.md\n")
    write_file(notes, "drafts/.gitignore", "!c.md\n")
    assert sources(notes) == ["a.md", "b.txt", "drafts/c.md"]


def test_an_ignore_file_holds_for_its_own_folder_only(notes):
    write_file(notes, "drafts/.gitignore", "/e.md\n/c.md\na.md\n")
    assert sources(notes) == ["a.md", "b.txt", "2024/e.md", "drafts/old/d.md"]


def test_a_file_given_by_itself_is_read_although_it_is_ignored(notes):
    write_file(notes, ".gitignore", "*\n")
    assert contents(notes / "a.md") == ["Text of a.md."]


def test_include_and_exclude_choose_files(notes):
    assert sources(Folder(notes, include=["*.md"])) == ["a.md", "2024/e.md", "drafts/c.md", "drafts/old/d.md"]
    assert sources(Folder(notes, include=["drafts/"], exclude=["old/"])) == ["drafts/c.md"]
    assert sources([Folder(str(notes), exclude=["*.md", "!/a.md"])]) == ["a.md", "b.txt"]
    assert left_out(Folder(notes, include=["*.md"], exclude=["drafts"])) == {
        "b.txt": "matches no pattern to include",
        "drafts/": "excluded",
    }
    assert contents(Folder(notes / "b.txt", include=["*.md"])) == ["Text of b.txt."]


@pytest.mark.parametrize("pattern", ["!", "a\\", "[z-a]", "a*b*c*d*e*f", "a\0b"])
def test_a_pattern_that_is_not_valid_is_refused(notes, pattern):
    with pytest.raises(OptionError, match=r"include has .* not a valid pattern"):
        Folder(notes, include=[pattern])
    write_file(notes, ".gitignore", f"*.txt\n{pattern.replace(chr(0), '!')}\n".replace("a!b", "!"))
    assert left_out(notes) == {
        "b.txt": "ignored by .gitignore",
        ".gitignore": "line 2 is not a valid pattern, and is not applied",
    }


def test_one_string_is_no_list_of_patterns(notes):
    with pytest.raises(OptionError, match="is a list of patterns"):
        Folder(notes, exclude="*.md")


@pytest.mark.parametrize("data", [b"\0binary", b"a\n" * 600_000])
def test_nothing_is_read_where_nobody_knows_what_is_ignored(notes, data):
    write_file(notes, "drafts/.sebpignore", data)
    assert sources(notes) == ["a.md", "b.txt", "2024/e.md"]
    assert left_out(notes) == {"drafts/": "its .sebpignore is not a list of patterns"}


@pytest.mark.slow
def test_an_ignore_file_of_nonsense_takes_no_time(notes):
    write_file(notes, ".gitignore", bytes(byte for byte in range(1, 256)) * 20 + b"\n" + b"a*a*a*a*b\n" * 2)
    write_file(notes, "a" * 240 + ".md", "Kept.")
    with at_most(3):
        assert "Kept." in contents(notes)


def test_ignore_files_that_are_links_pipes_or_folders_are_not_followed(notes):
    outside = write_file(notes, "patterns", "*.md\n")
    (notes / ".gitignore").symlink_to(outside)
    os.mkfifo(notes / ".sebpignore")
    (notes / "drafts/.gitignore").mkdir()
    assert "a.md" in sources(notes)
    assert "drafts/c.md" in sources(notes)
