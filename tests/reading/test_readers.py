"""Files, folders, strings and records become documents; what cannot be used is listed with its reason."""

import json
import os
import tempfile
import tracemalloc
from pathlib import Path

import pytest
from builders import make_sentences
from command import python
from reading import MEMORY_PER_BYTE, contents, left_out, read_texts, refusal, write_file

from sebp_edge.errors import MachineError

HELLO = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Good morning"}]


@pytest.fixture
def without_rights():
    """Runs the test as a user who is not root, since root ignores file modes."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    yield
    os.seteuid(0)


def test_hidden_files_and_folders_are_left_out_and_listed(folder):
    write_file(folder, ".secret.md", "no")
    write_file(folder, ".git/config.md", "no")
    write_file(folder, "deep/.obsidian/a.md", "no")
    assert left_out(folder) == {
        ".secret.md": "hidden file",
        ".git/": "hidden folder",
        "deep/.obsidian/": "hidden folder",
    }


def test_a_hidden_folder_or_file_given_by_its_path_is_read(tmp_path):
    write_file(tmp_path, ".notes/a.md", "Given.")
    assert contents(tmp_path / ".notes") == contents(tmp_path / ".notes" / "a.md") == ["Given."]


def test_unsupported_and_irregular_files_are_left_out_without_hanging(folder):
    write_file(folder, "a.one", b"PK\x00")
    write_file(folder, "a.bin", b"PK\x00")
    write_file(folder, "b.docx.bak", "text")
    write_file(folder, "README", "text")
    write_file(folder, "dir.md/inside.txt", "A folder may have such a name.")
    os.mkfifo(folder / "pipe.md")
    (folder / "dangling.md").symlink_to("nowhere")
    (folder / "self.md").symlink_to("self.md")
    (folder / "circle").symlink_to(folder)
    assert "pipe.md: not a regular file" in refusal(folder / "pipe.md")
    reading = read_texts(folder)
    assert [document.source for document in reading.documents] == ["kept.md", "dir.md/inside.txt"]
    assert {item.source: item.reason for item in reading.left_out} == {
        "a.one": "a OneNote file (.one); export its pages as Word files (.docx)",
        "a.bin": "binary file",
        "b.docx.bak": "unsupported file type .bak",
        "README": "unsupported file type (no ending)",
        "pipe.md": "not a regular file",
        "dangling.md": "not a regular file",
        "self.md": "not a regular file",
        "circle/": "link to a folder; give the folder itself",
    }


def test_links_are_followed_unless_they_lead_out_of_the_given_folder(folder, tmp_path):
    outside = write_file(tmp_path, "elsewhere.txt", "Elsewhere.")
    write_file(folder, "deep/inside.txt", "Inside.")
    (folder / "in.txt").symlink_to("deep/inside.txt")
    (folder / "out.txt").symlink_to(outside)
    (folder / "deep" / "up.txt").symlink_to("../../elsewhere.txt")
    (tmp_path / "shortcut").symlink_to(folder)
    (tmp_path / "beside.txt").symlink_to(outside)
    for given in (folder, tmp_path / "shortcut"):
        assert contents(given) == ["Inside.", "This one is kept."]
        reason = "link to outside the folder; give the file itself"
        assert left_out(given) == {"out.txt": reason, "deep/up.txt": reason, "deep/inside.txt": "the same as in.txt"}
    assert contents(folder / "out.txt") == contents(tmp_path / "beside.txt") == ["Elsewhere."]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs the /proc of Linux")
def test_files_that_the_system_generates_are_not_opened():
    assert "status: empty" in refusal(Path("/proc/self/status"))
    assert "zero: not a regular file" in refusal(Path("/dev/zero"))


def test_a_file_too_large_is_left_out_before_it_is_read(folder):
    with (folder / "large.txt").open("wb") as file:
        file.truncate(64_000_000 + 1)
    tracemalloc.start()
    try:
        assert contents(folder) == ["This one is kept."]
        assert left_out(folder) == {"large.txt": "larger than 64 MB; split it to use it"}
        assert tracemalloc.get_traced_memory()[1] < 64_000_000 / 10
    finally:
        tracemalloc.stop()
    # It does not count towards the memory of the texts either.
    assert len(read_texts(folder, memory=10_000).documents) == 1


@pytest.mark.parametrize("form", ["file", "files", "string", "strings", "record", "messages"])
def test_texts_that_need_more_than_the_given_memory_are_refused_unread(form, tmp_path):
    text = "日記 " * 1000  # 7,000 bytes
    for number in range(2):
        write_file(tmp_path, f"{number}.md", text)
    write_file(tmp_path, "0.one", text * 100)
    texts, size = {
        "file": (tmp_path / "1.md", 7000),
        "files": (tmp_path, 14000),
        "string": (text, 7000),
        "strings": ([text, text], 14000),
        "record": ({"prompt": text, "completion": "yes"}, 7003),
        "messages": ({"messages": [{"role": "user", "content": text}, HELLO[1]]}, 7012),
    }[form]
    assert read_texts(texts, memory=MEMORY_PER_BYTE * size).documents
    for path in tmp_path.iterdir():  # read, they would be refused as no text
        path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(MachineError) as caught:
        read_texts(texts, memory=MEMORY_PER_BYTE * size - 1)
    assert str(caught.value).startswith("Reading these texts would take more than the ")
    assert str(caught.value).endswith("left for them; give fewer texts or raise the memory budget.")


# The first text fills the caches, and has the windows that a long one has.
READ_ONCE = """
import sys, warnings
warnings.simplefilter("ignore")
from pathlib import Path
from sebp_edge.engine.models.catalog import resolve
from sebp_edge.engine.models.loading import local_tokenizer
from sebp_edge.machine.process import peak_resident, resident
from sebp_edge.recipe import Recipe
from sebp_edge.lessons.make_dataset import Drawing, make_dataset
from sebp_edge.reading.readers import read_texts
recipe, tokenizer = Recipe.load("notes"), local_tokenizer(resolve("tiny"))
make_dataset(read_texts("in windows " * 10_000), tokenizer, recipe, None, Drawing(seed=0))
before = resident()
make_dataset(read_texts(Path(sys.argv[1])), tokenizer, recipe, None, Drawing(seed=0))
print(peak_resident() - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize("form", ["records of a sentence", "a legacy encoding", "a page"])
def test_reading_takes_no_more_memory_than_estimated(form, tmp_path):
    sentences = make_sentences(12_000, words=14)
    if form == "a legacy encoding":
        path = write_file(tmp_path, "a.txt", "é\n".join(sentences).encode("cp1252"))
    elif form == "a page":
        path = write_file(tmp_path, "a.html", "<p>".join(sentences))
    else:
        path = write_file(tmp_path, "a.jsonl", "\n".join(map(json.dumps, sentences)))
    assert path.stat().st_size > 600_000
    assert int(python(READ_ONCE, path)) < MEMORY_PER_BYTE * path.stat().st_size


def test_files_and_folders_without_permission_are_left_out(request):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        write_file(folder, "kept.md", "Kept.")
        write_file(folder, "locked.md", "no").chmod(0)
        write_file(folder, "deep/locked/a.md", "no").parent.chmod(0)
        request.getfixturevalue("without_rights")
        assert left_out(folder) == {
            "locked.md": "cannot be read: Permission denied",
            "deep/locked/": "cannot be opened: Permission denied",
        }
        inside = folder / "deep" / "locked" / "a.md"
        assert refusal(inside) == f"{str(inside)!r} cannot be opened: Permission denied."
        assert contents(str(inside)) == [str(inside)]
        if os.geteuid() == 65534:
            os.seteuid(0)
        inside.parent.chmod(0o755)


def test_all_names_can_be_printed_and_none_controls_a_terminal(tmp_path):
    names = ("red\x1b[31m.md", "line\nfeed.md", "turned\u202e.md", "family 👩‍👩‍👧 日記.md", os.fsdecode(b"caf\xe9.md"))
    for number, name in enumerate(names):
        write_file(tmp_path, name, f"Text {number}.")
    write_file(tmp_path, "a.\x1b[2J", "x")
    write_file(tmp_path, "folder\x07/.hidden\x9b.md", "x")
    reading = read_texts(tmp_path)
    printable = ["caf?.md", "family 👩‍👩‍👧 日記.md", "line?feed.md", "red?[31m.md", "turned?.md"]
    assert sorted(document.source for document in reading.documents) == printable
    assert {(item.source, item.reason) for item in reading.left_out} == {
        ("a.?[2J", "unsupported file type .?[2J"),
        ("folder?/.hidden?.md", "hidden file"),
    }


def test_files_are_sorted_by_name(tmp_path):
    for name in ("b/2.md", "b/1.md", "a/z.md", "c.md", "B.md", "10.md", "9.md"):
        write_file(tmp_path, name, f"Text {name}")
    sources = [document.source for document in read_texts(tmp_path).documents]
    assert sources == ["10.md", "9.md", "B.md", "c.md", "a/z.md", "b/1.md", "b/2.md"]


# ---------------------------------------------------------------------------------------------- strings and paths


@pytest.mark.parametrize(
    "text",
    [
        "Bread",
        "A text that names nothing.",
        "~5 minutes late again",
        "~nobody-of-this-name",
        "I keep it all in notes.md",
        "/ is the root of everything",
        "./relative to what, he asked\nand nobody knew",
        "x" * 5000,
        "a/b" * 200,
        "日記。" * 400,
        "null \0 byte",
        "and/or",
        "https://example.com/a?token=secret",
        "user:password/hunter2",
        "/Users/me/My Notes",
        "./notse",
        "notse.md",
    ],
)
def test_a_string_that_names_nothing_is_a_text(text):
    assert contents(text) == contents([text]) == [text]


@pytest.mark.parametrize("text", ["folder", "folder/kept.md", ".", "~", "~/folder", "/"])
def test_a_string_in_a_list_is_always_a_text(text, folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    monkeypatch.setenv("HOME", str(folder.parent))
    assert contents([text]) == [text]


@pytest.mark.parametrize(("text", "kind"), [("folder", "folder"), ("~/folder/kept.md", "file"), (".", "folder")])
def test_a_lone_string_that_names_a_file_or_folder_is_refused(text, kind, folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    monkeypatch.setenv("HOME", str(folder.parent))
    assert refusal(text) == (
        f"The string {text!r} is the path of a {kind}; pass Path({text!r}) to train on the {kind}, or [{text!r}] "
        "to train on the string itself."
    )
    assert contents(Path(text)) == contents([Path(text)]) == ["This one is kept."]


@pytest.mark.parametrize("path", ["./notse", "~/notse", "/no/such/folder", "notse.md", "kept.md/below", "a \0 b"])
def test_the_error_for_a_path_that_does_not_exist_names_it(path, folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(folder))
    for texts in (Path(path), ["A text.", Path(path)]):
        assert refusal(texts) == f"There is no file or folder {str(Path(path).expanduser())!r}; check the path."


@pytest.mark.parametrize("text", ["", " ", "\n"])
def test_an_empty_string_is_an_empty_text_not_the_current_folder(text, folder, monkeypatch):
    monkeypatch.chdir(folder)
    assert "text 1: empty" in refusal(text)


def test_an_overlong_path_is_refused():
    assert "File name too long" in refusal(Path("x" * 400))


def test_lists_and_generators_may_mix_everything(folder):
    mixed = ["A text.", folder, folder / "kept.md", {"text": "A record."}, {"messages": HELLO}]
    reading = read_texts(item for item in mixed)
    assert [document.source for document in reading.documents] == ["text 1", "kept.md", "record 4", "record 5"]
    assert {item.source: item.reason for item in reading.left_out} == {"kept.md": "the same as kept.md"}


@pytest.mark.parametrize("texts", [None, 3, b"bytes", bytearray(b"a"), [b"bytes"], ["text", None], [["nested"]], [3.0]])
def test_an_unsupported_type_is_refused(texts):
    assert refusal(texts).startswith(("Texts must be strings", "Text 1 must be", "Text 2 must be"))


def test_files_of_several_folders_have_different_names_and_no_longer_ones_than_that_takes(tmp_path):
    for path in ("a/x/same.md", "b/x/same.md", "b/x/other.md", "c/same.md"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(f"The text of {path}.")
    documents = read_texts([tmp_path / "a/x", tmp_path / "b/x", tmp_path / "c/same.md"]).documents
    names = ["a/x/same.md", "other.md", "b/x/same.md", "c/same.md"]
    assert [document.name for document in documents] == [document.source for document in documents] == names
    # The same folder or file twice is one.
    documents = read_texts([tmp_path / "b/x", tmp_path / "b/x", tmp_path / "b/x/other.md"]).documents
    assert [document.name for document in documents] == ["other.md", "same.md"]


def test_texts_have_numbers_and_records_may_have_names(tmp_path):
    (tmp_path / "r.jsonl").write_text('{"text": "One.", "name": "n"}\n{"text": "Two."}\n')
    records = [
        {"text": "b", "name": " Diary\x1b 3 "},
        {"text": "c", "name": 5},
        {"text": "d", "name": " "},
        {"text": "e"},
    ]
    documents = read_texts(["a", *records, tmp_path / "r.jsonl"]).documents
    assert [document.name for document in documents] == [
        *(None, "Diary? 3", None, None, None, "r.jsonl, record 1", "r.jsonl, record 2")
    ]


def test_duplicates_are_dropped_and_named_across_formats(tmp_path):
    write_file(tmp_path, "1.md", "---\ndate: 1\n---\nSoup.\n")
    write_file(tmp_path, "2.txt", "\r\nSoup.\r\n")
    write_file(tmp_path, "3.jsonl", '{"text": "Soup."}\n{"text": "Tart."}\n{"prompt": "", "completion": "Soup."}\n')
    write_file(tmp_path, "4.csv", "text\nTart.\n")
    reading = read_texts(tmp_path)
    assert [document.source for document in reading.documents] == ["1.md", "3.jsonl, record 2", "3.jsonl, record 3"]
    assert {item.source: item.reason for item in reading.left_out} == {
        "2.txt": "the same as 1.md",
        "3.jsonl, record 1": "the same as 1.md",
        "4.csv": "the same as 3.jsonl, record 2",
    }


def test_the_error_if_nothing_is_readable_has_reasons_but_no_texts(tmp_path):
    assert refusal(tmp_path).startswith("Nothing to read: no files were found")
    assert refusal([]).startswith("Nothing to read")
    secret = "correct-horse-battery"
    write_file(tmp_path, "a.json", f'{{"text": "{secret}')
    write_file(tmp_path, "b.csv", f"{secret}\n{secret}\n")
    write_file(tmp_path, "c.jsonl", f'{{"{secret}": "{secret}"}}\n{secret}')
    write_file(tmp_path, "d.txt", b"\xef\xbb\xbf" + secret.encode() + b"\xff")
    message = refusal(tmp_path)
    assert secret not in message
    assert "a.json: not valid JSON (line 1); b.csv: no column" in message
    assert "and 2 more" in message
    assert secret not in refusal({"messages": [{"role": secret, "content": secret}]})
    assert secret not in refusal([{secret: secret}, {"text": [secret]}])
