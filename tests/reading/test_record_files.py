"""Files of records are read whatever their form: lists, lines, indented objects, tables; faults are left out."""

import csv
import json
import tracemalloc

import pytest
from pace import at_most
from reading import MEMORY_PER_BYTE, PromptCompletion, contents, left_out, read_all, read_texts, refusal, write_file

from sebp_edge.errors import MachineError


@pytest.mark.parametrize("name", ["a.json", "a.jsonl"])
@pytest.mark.parametrize(
    "text",
    [
        '["One.", {"text": "Two."}]',
        '\n [\n  "One.",\n  {"text": "Two."}\n ]\n',
        '"One."\n{"text": "Two."}\n',
        '{"text": "One."}\r\n\r\n{"text": "Two."}',
        '{\n "text": "One."\n}\n{\n "text": "Two."\n}\n',
        '{\n"text": "One."\n}\n{\n"text":\n"Two."\n}\n',
        '{"text": "One."}{"text": "Two."}',
        '{"text": "One."} {"text": "Two."}\n',
    ],
)
def test_json_is_read_as_what_it_is_whatever_the_ending(tmp_path, name, text):
    assert contents(write_file(tmp_path, name, text)) == ["One.", "Two."]


BACKUP = {"version": "004", "items": [{"uuid": "x", "content_type": "Note", "content": {"text": "Lentils"}}]}


@pytest.mark.parametrize("name", ["a.txt", "a.TXT", "a.md", "a.markdown", "a.mdx", "a.org", "a.rst", "a.html", "a"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_json_in_a_file_of_prose_is_read_as_json(folder, name, encoding):
    write_file(folder, name, json.dumps(BACKUP, indent=2).encode(encoding))
    assert left_out(folder) == {name: "this looks like a Standard Notes backup; export the notes as plain text"}
    for text in ('[\n{"text": "One."},\n"Two."]', '{"text": "One."}\n{"text": "Two."}\n'):
        write_file(folder, name, text.encode(encoding))
        assert contents(folder / name) == ["One.", "Two."]


def test_an_export_of_chats_in_a_file_of_prose_is_read(folder):
    messages = [{"type": "message", "ts": "1710000000.1", "user": "U1", "text": "Hi"}]
    write_file(folder, "a.txt", json.dumps(messages))
    assert next(part for _, part in read_all(folder / "a.txt").chats).service == "Slack"


@pytest.mark.parametrize(
    "text",
    [
        *("[ ] task\n[x] done", "[[link]] to", "[link](a.md)", "[1] One.\n[2] Two.", "[1]", "[]", "[x]", "[", "{"),
        *("{{ name }} asks", "{% if a %}b{% endif %}", "{a: 1}", '{"text": "a"} is how it looks.', '[["a"]]', "[1, 2]"),
        '{"a": 1}\n\nNotes on it.',
        '["a", 5]',
        '{"text": "cut o',
    ],
)
def test_prose_that_begins_like_json_stays_prose(tmp_path, text):
    assert contents(write_file(tmp_path, "a.txt", text)) == [text]


@pytest.mark.slow
def test_looking_for_json_takes_linear_time_and_little_memory(tmp_path):
    record = '{"a": [1, {}, 3.5, "b"]}, '
    path = write_file(tmp_path, "a.txt", "[" + record * 30_000 + "5] and so on")
    tracemalloc.start()
    assert len(contents(path)) == 1
    assert tracemalloc.get_traced_memory()[1] < 15 * path.stat().st_size
    tracemalloc.stop()
    pieces = ("[", '{"a":', "[{}", "{}", "[{},", '{"a": 1}\n')
    for text in ("[" + record * 40_000, *(piece * (1_000_000 // len(piece)) for piece in pieces)):
        with at_most(1):
            read_all(write_file(tmp_path, "b.txt", text + " x"))


def test_what_stands_before_a_fault_in_a_list_is_kept(tmp_path):
    path = write_file(tmp_path, "a.json", '[\n{"text": "One."},\n"Two.",\n{"text" "Three."},\n"Four."]')
    assert contents(path) == ["One.", "Two."]
    assert left_out(path) == {"a.json, record 3": "not valid JSON (line 4)"}
    for rest in ("] x", "]\n[", "", " 5]", ",]"):
        path = write_file(tmp_path, "b.json", '[\n"One."\n' + rest)
        assert contents(path) == ["One."]
        assert left_out(path) == {"b.json, record 2": f"not valid JSON (line {3 + rest.count(chr(10))})"}


def test_parts_of_a_faulty_record_are_no_texts(tmp_path):
    text = '{\n "text": "cut,\n "title": "a",\n "list": [\n  "b"\n ]\n}\n{\n "text": "Whole."\n}\n"c": "d"\n'
    path = write_file(tmp_path, "a.jsonl", text)
    assert contents(path) == ["Whole."]
    assert left_out(path) == {
        "a.jsonl, record 1": "not valid JSON (line 2)",
        "a.jsonl, record 3": "not valid JSON (line 11)",
    }


def test_lists_in_lines_are_neither_texts_nor_records(tmp_path):
    path = write_file(tmp_path, "a.jsonl", '["question", "answer"]\n["another", "answer"]\n"Text."\n')
    assert contents(path) == ["Text."]


def test_a_record_with_a_key_twice_is_left_out(tmp_path):
    path = write_file(tmp_path, "a.jsonl", '{"text": "One.", "text": "Other."}\n"Two."\n')
    assert contents(path) == ["Two."]
    assert left_out(path) == {"a.jsonl, record 1": "an object that has a key twice"}


def test_many_faults_of_one_kind_are_one_entry_with_their_number(tmp_path):
    path = write_file(tmp_path, "a.json", json.dumps(["Text.", *range(5000)]))
    assert left_out(path) == {
        "a.json": "neither a text nor a record (5,000 records, the first one is a.json, record 2)"
    }
    path = write_file(tmp_path, "a.jsonl", '"Text."\n' + "{\n" * 5000)
    assert left_out(path) == {"a.jsonl": "not valid JSON (5,000 records, the first one is a.jsonl, record 2)"}
    path = write_file(tmp_path, "b.jsonl", '"Text."\n' * 5000)
    assert read_texts(path).num_equal == 4999
    reason = "the same as other documents (4,999 records, the first one is b.jsonl, record 2)"
    assert left_out(path) == {"b.jsonl": reason}


@pytest.mark.parametrize(("name", "line"), [("a.json", "1,"), ("a.jsonl", '"a"\n'), ("a.csv", "b\n")])
def test_a_file_of_too_many_records_is_refused(tmp_path, monkeypatch, name, line):
    monkeypatch.setattr("sebp_edge.reading.formats.record_files.MAX_RECORDS", 100)
    text = {"a.json": "[" + line * 100 + "2]", "a.jsonl": line * 101, "a.csv": "text\n" + line * 101}[name]
    write_file(tmp_path, name, text)
    write_file(tmp_path, "kept.md", "Kept.")
    assert left_out(tmp_path) == {name: "more than 100 records; split it to use it"}


@pytest.mark.slow
def test_numbers_take_no_memory(tmp_path):
    path = write_file(tmp_path, "a.json", "[" + "1," * 8_000 + '"Text."]')
    tracemalloc.start()
    try:
        read_texts(path)
        assert tracemalloc.get_traced_memory()[1] < 20 * path.stat().st_size
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", ["a.csv", "a.tsv"])
@pytest.mark.parametrize("separator", [",", ";", "\t"])
@pytest.mark.parametrize("before", ["", "\ufeff", "sep=SEPARATOR\r\n"])
def test_columns_are_separated_by_commas_semicolons_or_tabs(tmp_path, name, separator, before):
    rows = [["Prompt", "completion"], ["Where, or when; how\tfar?", "Under\nthe pot"]]
    text = "".join(separator.join(f'"{cell}"' for cell in row) + "\r\n" for row in rows)
    path = write_file(tmp_path, name, before.replace("SEPARATOR", separator) + text)
    assert contents(path) == [PromptCompletion("Where, or when; how\tfar?", "Under\nthe pot")]


def test_a_long_field_of_a_table_is_read_and_the_limit_of_csv_is_left_alone(tmp_path):
    limit = csv.field_size_limit()
    path = write_file(tmp_path, "a.csv", "id,text\n1,short\n2," + "word " * 50_000 + "\n3,last\n")
    assert contents(path) == ["short", ("word " * 50_000).strip(), "last"]
    write_file(tmp_path, "b.csv", "a,b\n")
    assert csv.field_size_limit() == limit


def test_only_rows_with_wrong_quotes_are_left_out(tmp_path):
    path = write_file(tmp_path, "a.csv", 'id,text\n1,"One"\n2,"Two" or three\n3,Four\n4,"Five\n5,Six\n')
    assert contents(path) == ["One", "Four"]
    assert left_out(path) == {
        "a.csv, record 2": "a row whose quotes are not valid CSV (line 3)",
        "a.csv, record 4": "a row whose quotes are not valid CSV (line 5)",
    }


def test_utf16_needs_no_byte_order_mark(tmp_path):
    text = "A note without a mark, größer als пять."
    for encoding in ("utf-16-le", "utf-16-be", "utf-16"):
        assert contents(write_file(tmp_path, "a.txt", text.encode(encoding))) == [text]
    for data in (b"\x01\0\x02\0", b"a\0b", b"a\0\0b", b"\0\xd8a\0"):
        assert "binary file" in refusal(write_file(tmp_path, "b.txt", data))


@pytest.mark.slow
def test_a_conversation_of_very_many_messages_is_left_out():
    chat = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}] * 50_001
    long = {"prompt": "Q", "completion": "A", "history": [["1", "2"]] * 50_000}
    found = left_out(["A text.", {"messages": chat}, long])
    assert set(found.values()) == {"a conversation of more than 100,000 messages; split it"}


def test_reading_stops_when_the_messages_of_a_file_take_too_much_memory(tmp_path):
    """Short messages take more than their size in the file."""
    record = json.dumps({"prompt": "Q", "completion": "A", "history": [["1", "2"]] * 500})
    path = write_file(tmp_path, "a.jsonl", f"{record}\n" * 20)
    with pytest.raises(MachineError, match="would take more than"):
        read_texts(path, memory=MEMORY_PER_BYTE * path.stat().st_size)
