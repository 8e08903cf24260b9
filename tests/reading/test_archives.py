"""A .zip archive is looked into without unpacking it, and what could do harm in it is left out."""

import stat
import zipfile

import pytest
from reading import contents, read_all, read_texts, refusal, write_file
from word_files import paragraph, write_word

CHAT = "13/03/2024, 22:01 - Bob: Bread?\n13/03/2024, 22:02 - Anna: Yes.\n"


def archive(path, files: dict[str, str | bytes], **options):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, **options) as made:
        for name, data in files.items():
            made.writestr(name, data)
    return path


def unread(path) -> dict[str, str]:
    return {item.source: item.reason for item in read_all(path).left_out}


def test_an_archive_is_read_and_says_what_it_is(tmp_path):
    word = write_word(tmp_path, paragraph("Word.")).read_bytes()
    files = {"_chat.txt": CHAT, "b/note.md": "A note.", "letter.docx": word, "a.jpg": b"\xff\xd8"}
    path = archive(tmp_path / "export.zip", files)
    reading = read_all(path)
    assert reading.exports == ("a WhatsApp chat with 2 people, 2 messages",)
    assert unread(path) == {"a.jpg": "a picture (.jpg); only texts are read"}
    documents = {document.source: document.content for document in read_texts(reading, me="Anna").documents}
    assert documents.pop("_chat.txt, 2024-03-13").messages[1]["content"] == "Yes."
    assert documents == {"b/note.md": "A note.", "letter.docx": "Word."}
    assert [folder.path for folder in reading.folders] == [path]


def test_slacks_folders_and_mailboxes_are_found_in_archives(tmp_path):
    day = '[{"type": "message", "ts": "1710000000.1", "user": "U1", "text": "Hi."}]'
    files = {
        "users.json": '[{"id": "U1", "profile": {"real_name": "Anna"}}]',
        "garden/2024-03-09.json": day,
        "Takeout/Sent.mbox": "From x\nFrom: anna@example.org\n\nPlums.\n",
    }
    reading = read_all(archive(tmp_path / "export.zip", files))
    assert reading.exports == ("1 mail by 1 person", "a Slack chat with 1 person, 1 message")
    assert [document.source for document in read_texts(reading, me=["Anna", "anna@example.org"]).documents][1] == (
        "garden/2024-03-09.json"
    )


def test_of_archives_that_hold_files_of_one_name_each_is_named(tmp_path):
    first = archive(tmp_path / "Bob.zip", {"_chat.txt": CHAT})
    second = archive(tmp_path / "Cem.zip", {"_chat.txt": CHAT.replace("Bob", "Cem")})
    assert [document.source for document in read_texts([first, second], me="Anna").documents] == [
        "Bob.zip/_chat.txt, 2024-03-13",
        "Cem.zip/_chat.txt, 2024-03-13",
    ]


def test_what_could_do_harm_is_left_out(tmp_path):
    path = archive(tmp_path / "a.zip", {"note.md": "A note.", "inner.zip": b"PK", ".hidden.md": "a", "../out.md": "b"})
    with zipfile.ZipFile(path, "a") as made:
        link = zipfile.ZipInfo("link.md")
        link.external_attr = (stat.S_IFLNK | 0o777) << 16
        made.writestr(link, "/etc/passwd")
        made.writestr("/absolute.md", "c")
        made.writestr("bzip.md", "d", zipfile.ZIP_BZIP2)
    assert contents(path) == ["A note."]
    assert unread(path) == {
        "inner.zip": "an archive (.zip); give it by itself to look into it",
        ".hidden.md": "hidden file",
        "../out.md": "a path that leads out of the archive",
        "/absolute.md": "a path that leads out of the archive",
        "link.md": "link",
        "bzip.md": "packed by a method that is not read; unpack the archive, and give the folder",
    }


def test_damaged_encrypted_and_huge_archives_are_refused(tmp_path):
    assert "no .zip archive, a damaged one, or" in refusal(write_file(tmp_path, "a.zip", b"PK\x03\x04 cut"))
    path = archive(tmp_path / "b.zip", {"a.md": "A note that is long enough. " * 9, "b.md": "Whole."})
    data = bytearray(path.read_bytes())
    data[40] ^= 0xFF
    path.write_bytes(data)
    assert contents(path) == ["Whole."]
    assert unread(path) == {"a.md": "damaged in the archive"}
    with zipfile.ZipFile(path) as made:
        place = data.index(b"PK\x01\x02") + 8
        assert made.infolist()[0].flag_bits == 0
    data[place] |= 1
    path.write_bytes(data)
    assert "encrypted" in unread(path)["a.md"]
    path = archive(tmp_path / "c.zip", {"a.md": "Small."})
    data, begin = path.read_bytes(), path.read_bytes().index(b"PK\x01\x02")
    entry, end = data[begin:-22], bytearray(data[-22:])
    huge = entry[:24] + (4_000_000_001).to_bytes(4, "little") + entry[28:]
    path.write_bytes(data[:begin] + huge + end)
    assert "more than 4 GB once unpacked; unpack it, and give the folder" in refusal(path)
    end[12:16] = (100_001 * len(entry)).to_bytes(4, "little")
    path.write_bytes(data[:begin] + entry * 100_001 + end)
    assert "more than 100,000 files; unpack it, and give the folder" in refusal(path)


def test_an_archive_in_which_a_file_begins_before_it_is_refused(tmp_path):
    path = archive(tmp_path / "a.zip", {"a.mbox": "From x\nFrom: anna@example.org\n\nPlums.\n"})
    data = bytearray(path.read_bytes())
    data[data.index(b"PK\x05\x06") + 16] += 9
    path.write_bytes(data)
    assert "Nothing readable was found" in refusal(path)


@pytest.mark.slow
@pytest.mark.parametrize("size", [100_000_000])
def test_a_small_archive_of_a_huge_file_takes_no_memory(tmp_path, size):
    path = archive(tmp_path / "a.zip", {"a.txt": b"a" * size, "b.md": "A note."})
    assert contents(path) == ["A note."]
    assert unread(path) == {"a.txt": "larger than 64 MB; split it to use it"}
