"""Org files are read as text: links as their text, no settings, drawers, comments or planning."""

import pytest
from reading import contents, is_count_of_words, left_out, read_texts, write_file


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("#+TITLE: Soup\n#+filetags: :a:\n* TODO Lentils\nCook.", "* TODO Lentils\nCook."),
        (
            ":PROPERTIES:\n:ID: 1\n:END:\n* A\nSCHEDULED: <2024-01-01 Mon>\n:LOGBOOK:\nCLOCK: [x]\n:END:\nText.",
            "* A\nText.",
        ),
        ("See [[id:4f-2a][the soup]] and [[https://example.org]].", "See the soup and https://example.org."),
        ("# A comment\n#\n#hashtag\n#+BEGIN_COMMENT\nNo.\n#+END_COMMENT\nYes.", "#hashtag\nYes."),
        ("#+BEGIN_QUOTE\nTo [[a][be]].\n#+END_QUOTE", "To be."),
        ("#+begin_src sh\n# kept [[ -f x ]]\n#+end_src", "#+begin_src sh\n# kept [[ -f x ]]\n#+end_src"),
        (":NOT-CLOSED:\nText.", ":NOT-CLOSED:\nText."),
        ("* A\n:LOGBOOK:\nText.\n* B\n:LOGBOOK:\nCLOCK\n:END:\nMore.", "* A\n:LOGBOOK:\nText.\n* B\nMore."),
        (
            "#+BEGIN_COMMENT\nText.\n* B\n# No.\n#+BEGIN_SRC\n* C\n# No.",
            "#+BEGIN_COMMENT\nText.\n* B\n#+BEGIN_SRC\n* C",
        ),
        ("* A\n** TODO COMMENT No\nNo.\n*** No\n** B @@comment:no@@\nYes.", "* A\n** B \nYes."),
    ],
)
def test_org_files_are_read_as_text(tmp_path, written, read):
    assert contents(write_file(tmp_path, "a.org", written)) == [read]


def test_comments_and_drawers_of_an_org_file_are_counted(folder):
    write_file(folder, "a.org", "# One,\n# in two lines.\nA @@comment:two@@.\n:HINT:\nx\n:END:\n:PROPERTIES:\n:END:\n")
    reasons = [item.reason for item in read_texts(folder).left_out if not is_count_of_words(item)]
    assert reasons == ["comments: 2", "drawers: 1"]


def test_an_org_file_without_text_is_left_out(folder):
    write_file(folder, "a.org", "#+TITLE: Soup\n")
    assert left_out(folder) == {"a.org": "empty"}
