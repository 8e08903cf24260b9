"""Files of each format become documents, or are left out with a reason."""

import json

import pytest
from reading import Conversation, PromptCompletion, contents, left_out, read_texts, write_file

HELLO = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Good morning"}]


@pytest.mark.parametrize("name", ["a.txt", "a.md", "a.markdown", "a.rst", "A.TXT", "b.Md"])
def test_plain_formats_are_one_document_each(tmp_path, name):
    assert contents(write_file(tmp_path, name, "# Heading\n\nText.\n")) == ["# Heading\n\nText."]


@pytest.mark.parametrize(
    "text",
    [
        "\n---\ntitle: late\n---\nText.",  # not at the very start
        "---\ntitle: not closed\n\nText.",
        "---\ntitle: closed by another mark\n+++\nText.",
        "---\n\nBetween two rules.\n\n---\n\nText.",
        "---\n\nNote: it rains.\n\n---\nText.",
        "---\n\nremember: milk\n\n---\nText.",
        "---\n\nMilk: 2\nEggs: 6\n\n---\nText.",
        "---\n\nDate: in May\n\n---\nText.",
        "---\n\ntitle: Fern\n\nThe fern stands in the hall.\n\n---\nText.",
        "---\n\n# Fern\n\ntitle: Fern\n\n---\nText.",
        "----\ntitle: four\n----\nText.",
        "Text.\n---\nkey: value\n---\nMore.",
        "---\nSection one, the first thought.\n\n---\n\nSection two.",
        "---\n# Slide one\nHello all\n---\n# Slide two",
        "---\n# Slide one\nAgenda: lentils\n---\n# Slide two",
        "---\nDear diary: it rained.\nThen it did not.\n---\nText.",
        "---\nWe talked, and she said: no.\n---\nText.",
        "---\n- a list\n- of two\n---\nText.",
        "---\nNote: this is prose\n---\nText.",
        "---\nremember: buy lentils: red ones.\n---\nText.",
        "---\nAnna: Hello there!\nBen: Hello.\n---\nText.",
        "---\n...\nText.",
        "+++\nProse between marks.\n+++\nText.",
        '{"a": 1} and text\nText.',
        "---\n" + "[" * 10_000 + "\n---\nText.",
        "---\n" + "? " * 10_000 + "\n---\nText.",
        "Text.\n\nid: 7\ntype_: 1",  # nor what Joplin adds to the end
    ],
)
def test_text_that_only_resembles_front_matter_is_kept(tmp_path, text):
    assert contents(write_file(tmp_path, "a.md", text)) == [text.strip()]


@pytest.mark.parametrize(
    "front",
    [
        "---\ntitle: x\nid: 42\n...",
        "---\n---",
        "+++\ntitle: Soup\ntags: [a]\n+++",
        "---\ndate created: 2024-01-01\ntags: [a,\n  b]\n---",
        "---\ntitle: Soup: the second pot\ndate: 2024-01-01\n---",  # not valid YAML, as with many blogs
        "---\nup: [[Soups]]\nrelated: [[Stew]], [[Broth]]\n---",
        "---yaml\nDescription: All about soup.\n---",
        "---\nStatus: done\ndc:title: Soup\n---",
        "---\ntheme: seriph\n---",
        "---\na: &a {x: 1}\nb: &b {<<: [*a, *a]}\n"
        + "".join(f"k{n}: &k{n} {{<<: [*b, *b]}}\n" for n in range(30))
        + "---",
        '+++\ntitle = "Soup"\n[extra]\nx = 1\n+++',
        '{\n"title": "Soup"\n}',
        "---\n\ntitle: Fern\ntags: [plants]\n\n---",  # as Excalidraw writes it
        "\ufeff--- \r\n\r\n \t\r\n\r\ntitle: Fern\r\n\r\n...\r\n",
        "---\n\ntitle: Fern: the second\n\ntags:\n\n- plants\n---",
        "---\n\ncssclasses: wide\n---",
        "---\n\nup: Soups\nrelated: Stew\n---",
        "+++\n\ntitle = 'Fern'\n\n+++",
        "---\n\n---",
    ],
)
def test_a_mapping_at_the_top_is_front_matter(tmp_path, front):
    text = "# Soup\n\nText.\n---\n+++\nEnd."
    assert contents(write_file(tmp_path, "a.md", f"{front}\n\n{text}")) == [text]


@pytest.mark.parametrize(
    ("written", "read"), [("    a\n  b\n", "    a\n  b"), ("  a\n", "a"), (" \n  a\n b ", "  a\n b")]
)
def test_a_first_line_keeps_its_indent_if_others_follow(tmp_path, written, read):
    assert contents(write_file(tmp_path, "a.txt", written)) == [read]


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("Citro&euml;n &amp; caf&#233; &#xE9;&nbsp;&mdash; 5&nbsp;km &lt;b&gt;", "Citroën & café é — 5 km <b>"),
        ("AT&T; &unknown; &amp x; \\&amp; &copy &notit;", "AT&T; &unknown; &amp x; \\&amp; &copy &notit;"),
        ("`&amp;` &amp; ``a ` &lt;``", "`&amp;` & ``a ` &lt;``"),
        ("&amp;\n\n```html\n&euml;\n```\n\n~~~\n&euml;\n~~~", "&\n\n```html\n&euml;\n```\n\n~~~\n&euml;\n~~~"),
        ("&amp;\n\n    &euml; &amp;\n\n&amp;", "&\n\n    &euml; &amp;\n\n&"),
        ("- a\n  ```\n  &amp;\n  ```\n- &amp;", "- a\n  ```\n  &amp;\n  ```\n- &"),
        ("A <!-- &amp; --> &amp; &lt;!-- kept --&gt;", "A & <!-- kept -->"),
        ("&#0;&#xD800;&#1114112;", "\ufffd" * 3),
    ],
)
@pytest.mark.parametrize("ending", [".md", ".ipynb"])
def test_entities_of_html_are_signs_in_markdown_but_not_in_code(tmp_path, written, read, ending):
    if ending == ".ipynb":
        cells = [{"cell_type": "markdown", "source": written}]
        assert contents(write_file(tmp_path, "a.ipynb", json.dumps({"cells": cells}))) == [read]
        return
    path = write_file(tmp_path, "a.md", written)
    assert contents(path) == [read]
    assert [item.reason for item in read_texts(path).left_out if "words" in item.reason] == []


def test_entities_of_components_are_signs_and_begin_none(tmp_path):
    path = write_file(tmp_path, "a.mdx", "<B>caf&eacute;</B> &lt;A&gt; &#123;x&#125; `&amp;` {gone}")
    assert contents(path) == ["café <A> {x} `&amp;`"]


@pytest.mark.slow
def test_front_matter_that_is_not_closed_takes_no_time(tmp_path):
    text = "---\n" + "key: value\n" * 200_000
    assert contents(write_file(tmp_path, "a.md", text)) == [text.strip()]


def test_only_markdown_has_front_matter(tmp_path):
    assert contents(write_file(tmp_path, "a.txt", "---\na: b\n---\nText.")) == ["---\na: b\n---\nText."]


def test_newlines_become_unix_ones_in_every_kind_of_content(tmp_path):
    write_file(tmp_path, "a.txt", "one\r\ntwo\rthree")
    write_file(tmp_path, "b.jsonl", json.dumps({"prompt": "a\r\n", "completion": "b\r\nc"}) + "\r\n\r\n")
    write_file(tmp_path, "c.json", json.dumps({"messages": [{"role": "assistant", "content": "d\r\ne"}]}))
    text, completion, conversation = contents(tmp_path)
    assert text == "one\ntwo\nthree"
    assert completion == PromptCompletion("a\n", "b\nc")
    assert conversation.messages[0]["content"] == "d\ne"


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_utf8_and_marked_utf16_are_read(tmp_path, encoding):
    assert contents(write_file(tmp_path, "a.txt", "Smörgås 🥪 日記".encode(encoding))) == ["Smörgås 🥪 日記"]
    assert contents(write_file(tmp_path, "a.json", '["Smörgås"]'.encode(encoding))) == ["Smörgås"]
    assert contents(write_file(tmp_path, "a.csv", "text\nSmörgås\n".encode(encoding))) == ["Smörgås"]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ("日記".encode() + b"\xff", "not UTF-8 (byte 6); save it as UTF-8 to use it"),
        (b"\xef\xbb\xbfsm\xf6r", "not UTF-8 (byte 5); save it as UTF-8 to use it"),
        (b"\xff\xfea\x00\x00\xd8", "not UTF-16 (byte 4); save it as UTF-8 to use it"),
        (b"text\x00more", "binary file"),
        ("a".encode("utf-32"), "binary file"),
        (b"", "empty"),
        (b" \n\t\r\n", "empty"),
        (b"\xef\xbb\xbf", "empty"),
    ],
)
@pytest.mark.parametrize("ending", [".txt", ".md", ".json", ".jsonl", ".csv"])
def test_undecodable_binary_and_empty_files_are_left_out_with_the_reason(folder, data, reason, ending):
    write_file(folder, f"bad{ending}", data)
    assert left_out(folder) == {f"bad{ending}": reason}


def test_json_is_a_text_a_record_or_a_list_of_them(tmp_path):
    assert contents(write_file(tmp_path, "a.json", '"A text."')) == ["A text."]
    assert contents(write_file(tmp_path, "b.json", '{"text": "A record.", "date": 1}')) == ["A record."]
    several = ["One.", {"text": "Two."}, {"prompt": "a", "completion": "b"}, {"messages": HELLO}]
    path = write_file(tmp_path, "c.json", json.dumps(several, indent=1))
    assert contents(path) == ["One.", "Two.", PromptCompletion("a", "b"), Conversation(tuple(HELLO))]
    assert [document.source for document in read_texts(path).documents] == [f"c.json, record {n}" for n in (1, 2, 3, 4)]


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (3, "neither a text nor a record"),
        (None, "neither a text nor a record"),
        ([["nested"]], "neither a text nor a record"),
        ({}, 'no "text", "prompt" and "completion", or "messages"'),
        ({"prompt": "alone"}, 'no "text", "prompt" and "completion", or "messages"'),
        ({"text": 3}, '"text" is not a string'),
        ({"text": ["a"]}, '"text" is not a string'),
        ({"prompt": "a", "completion": None}, 'no "text", "prompt" and "completion"'),
        ({"prompt": "a", "completion": " \n"}, "empty"),
        ({"messages": "hello"}, '"messages" is not a list of messages'),
        ({"messages": ["hello"]}, '"messages" is not a list of messages'),
        ({"messages": [{"role": "assistant"}]}, 'a message without "role" and "content" strings'),
        ({"messages": [{"role": "assistant", "content": None}]}, 'a message without "role" and "content" strings'),
        ({"messages": []}, "no message from the assistant"),
        ({"messages": HELLO[:1]}, "no message from the assistant"),
        ({"messages": [{"role": "assistant", "content": " "}]}, "empty"),
        (" ", "empty"),
        ("half \ud83d", "not valid Unicode (a lone surrogate)"),
        ({"messages": [{"role": "\udc00", "content": "a"}, *HELLO]}, "not valid Unicode"),
    ],
)
def test_only_the_invalid_record_is_left_out(tmp_path, record, reason):
    path = write_file(tmp_path, "a.json", json.dumps(["Before.", record, "After."]))
    reading = read_texts(path)
    assert [document.content for document in reading.documents] == ["Before.", "After."]
    [item] = reading.left_out
    assert item.source == "a.json, record 2"
    assert item.reason.startswith(reason)
    if isinstance(record, dict):  # the same record given in Python
        assert left_out(["Before.", record])["record 2"] == item.reason


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[\n,\n", "not valid JSON (line 2)"),
        ("[" * 100_000, "JSON that is nested too deeply or has an overlong number"),
        ("9" * 5000, "JSON that is nested too deeply or has an overlong number"),
        ("[]", "empty"),
    ],
)
def test_json_that_is_invalid_or_empty_is_left_out(folder, text, reason):
    write_file(folder, "a.json", text)
    assert left_out(folder) == {"a.json": reason}


def test_only_the_invalid_lines_of_jsonl_are_left_out(tmp_path):
    lines = ['"First."', "", '{"text": "cut', '{"text": "Last\u2028line."}', "[1", '{"text": 1}']
    reading = read_texts(write_file(tmp_path, "a.jsonl", "\n".join(lines)))
    assert [document.content for document in reading.documents] == ["First.", "Last\u2028line."]
    assert {item.source: item.reason for item in reading.left_out} == {
        "a.jsonl, record 2": "not valid JSON (line 3)",
        "a.jsonl, record 4": "not valid JSON (line 5)",
        "a.jsonl, record 5": '"text" is not a string',
    }


def test_csv_keeps_quoted_newlines_commas_and_quotes(tmp_path):
    path = write_file(tmp_path, "a.csv", 'id,text\r\n1,"Two\r\nlines, and a ""quote"""\r\n\r\n2,Plain\r\n')
    assert contents(path) == ['Two\nlines, and a "quote"', "Plain"]
    path = write_file(tmp_path, "b.csv", "completion,prompt\nyes,really?\n")
    assert contents(path) == [PromptCompletion("really?", "yes")]


def test_ragged_csv_rows_are_left_out(tmp_path):
    path = write_file(tmp_path, "a.csv", "id,text\n1,bread, and butter\n2\n3,whole\n")
    reading = read_texts(path)
    assert [document.content for document in reading.documents] == ["whole"]
    assert [(item.source, item.reason) for item in reading.left_out] == [
        ("a.csv, record 1", "more fields than columns"),
        ("a.csv, record 2", "empty"),
    ]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("title,body\na,b\n", 'no column "text", and no columns "prompt" and "completion"'),
        ("id|text\n1|a\n", 'no column "text", and no columns "prompt" and "completion"'),
        ("text, Text\na,b\n", "two columns of one name; rename one"),
        ("prompt\na\n", 'no column "text", and no columns "prompt" and "completion"'),
        ("text\n", "empty"),
        ('"text', 'no column "text", and no columns "prompt" and "completion"'),
    ],
)
def test_csv_without_the_right_columns_is_left_out(folder, text, reason):
    write_file(folder, "a.csv", text)
    assert left_out(folder) == {"a.csv": reason}
