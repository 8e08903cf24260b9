"""What an owner did not write is left out of a folder, and what is not read is named."""

import json

import pytest
from reading import contents, left_out, refusal, write_file

MIT = "MIT License\n\nCopyright (c) 2024 Somebody\n\nPermission is hereby granted, free of charge, to any person"
LICENCE = "a licence or a code of conduct; give the file itself to use it"
PACKAGES = "what a program depends on; give the folder itself to use it"


def test_licences_in_a_folder_are_left_out(folder):
    for name in ("LICENSE.md", "COPYING.txt", "LICENSE-APACHE.txt", "CODE_OF_CONDUCT.md", "deep/LICENCE.rst"):
        write_file(folder, name, f"Text of {name}.")
    write_file(folder, "license.txt", "Apache License\nVersion 2.0\n\nTERMS AND CONDITIONS FOR USE, REPRODUCTION")
    write_file(folder, "terms.md", f"# {MIT}")
    assert set(left_out(folder).values()) == {LICENCE}
    assert len(left_out(folder)) == 7
    assert contents(folder / "LICENSE.md") == ["Text of LICENSE.md."]
    assert contents(folder / "terms.md") == [f"# {MIT}"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("License.md", "My driving licence expires on 3 May."),
        ("README.md", f"# Soup\n\nMy recipes.\n\n{MIT}"),
        ("why.md", f"# MIT License\n\nI chose it since it is short.\n\n> {MIT}"),
        ("Copying.md", "How Anna copies a page."),
        ("vendor/acme.md", "Acme sells pots."),
        ("third_party/x.md", "Notes on guests."),
    ],
)
def test_what_an_owner_may_have_written_is_read(tmp_path, name, text):
    write_file(tmp_path, name, text)
    assert contents(tmp_path) == [text]


def test_what_programs_depend_on_is_left_out(folder):
    for name in ("node_modules/a/README.md", "venv/lib/README.md", "x/site-packages/a.txt", "app/vendor/b/README.md"):
        write_file(folder, name, f"Text of {name}.")
    write_file(folder, "venv/pyvenv.cfg", "home = /usr")
    write_file(folder, "app/composer.json", "{}")
    assert left_out(folder) == {
        "app/vendor/": PACKAGES,
        "node_modules/": PACKAGES,
        "venv/": PACKAGES,
        "x/site-packages/": PACKAGES,
        "app/composer.json": 'no "text", "prompt" and "completion", or "messages"',
    }
    assert contents(folder / "node_modules") == ["Text of node_modules/a/README.md."]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("a.textpack", "a Bear archive (.textpack); export the notes as Markdown"),
        ("a.ADOC", "an AsciiDoc file (.adoc); convert it to Markdown"),
        ("a.doc", "a document in an old format (.doc); save it as .docx"),
        ("a.pages", "a Pages document (.pages); export it as Word (.docx)"),
        (f"Soups {'0a' * 16}.csv", "a database exported from Notion; its pages are in the .md files beside it"),
        ("a.zip", "an archive (.zip); give it by itself to look into it"),
        ("a.EPUB", "a book, not a text of yours (.epub); save it as .txt or .docx if you wrote it"),
        ("a.fb2", "a book, not a text of yours (.fb2); save it as .txt or .docx if you wrote it"),
    ],
)
def test_formats_that_are_not_read_are_named(folder, name, reason):
    write_file(folder, name, b"PK\x00\x01")
    assert left_out(folder) == {name: reason}
    if name != "a.zip":  # whose files are read where it is given
        assert reason in refusal(folder / name)


def test_an_export_is_named_where_its_records_cannot_be_used(folder):
    write_file(folder, "a.json", json.dumps([{"title": "Soup", "children": [{"string": "Lentils"}]}]))
    write_file(folder, "b.json", json.dumps({"messages": [{"sender_name": "A", "timestamp_ms": 1, "content": "x"}]}))
    write_file(folder, "c.json", json.dumps({"text": "Read.", "mapping": {}}))
    assert left_out(folder) == {
        "a.json": "this looks like a Roam export; export it as Markdown",
        "b.json": "this looks like an export of Messenger or Instagram; save its conversations as records with "
        '"messages"',
    }
