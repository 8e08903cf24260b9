"""A file of which a tenth of the words or more were not read is used, and left_out says how many."""

import json
import zipfile

import pytest
from pace import at_most
from reading import NotRead, contents, is_count_of_words, left_out, read_texts, write_file
from word_files import paragraph, run, write_word

from sebp_edge.reading.formats import PACKED
from sebp_edge.reading.formats.coverage import COUNTED, with_coverage

# Files with twenty words that are read, and with what their readers leave out by design.
WHOLE = {
    "a.html": "<head><title>Unread</title><style>p { color: red }</style></head><body data-x='<p>un read'>"
    "<nav>Un read</nav><!-- un read --><script>un('read')</script><p>"
    + "M&uuml;<b>n</b>chen so&shy;f&shy;ar " * 10
    + "</p></body>",
    "a.md": "---\ntitle: unread\ntags:\n  - unread\n---\n<!-- un read -->" + "one [two](https://un.read/) " * 10,
    "a.org": ":PROPERTIES:\n:ID: unread\n:END:\n#+TITLE: Unread\n# un read\n" + "one [[unread][two]]\n" * 10,
    "a.ipynb": json.dumps(
        {
            "cells": [
                {"cell_type": "markdown", "source": ["one\n", "tw\u00f6 "] * 5},
                {"cell_type": "code", "source": 'one "two"\n' * 5, "outputs": [{"text": "un read"}]},
            ],
            "metadata": {"language_info": {"name": "python"}},
        }
    ),
    "a.mdx": "import un from 'read'\n\n" + "<Un read={un.read}>one</Un> {un.read} two\n" * 10,
    "a.rtf": r"{\rtf1{\fonttbl{\f0 Unread;}}{\*\un{\read read}}{\f0 " + r"M\'fcnchen\par {tw}o " * 10 + "}}",
    "a.fodt": "<a xmlns:office='o' xmlns:text='t'><un>read</un><office:body><office:text><office:annotation>un</"
    "office:annotation>" + "<text:p>o<text:span>n</text:span>e two</text:p>" * 10 + "</office:text></office:body></a>",
}


@pytest.mark.parametrize("name", WHOLE)
def test_no_words_are_missing_from_a_file_that_is_read(folder, name):
    write_file(folder, name, WHOLE[name])
    assert not any(is_count_of_words(item) for item in read_texts(folder).left_out)


@pytest.mark.parametrize(
    "aside",
    [
        "---\ntitle: 'How to read a\nlong title, in two lines.'\n---\n",  # a value that goes on without an indent
        "- DONE Sweep\n  :LOGBOOK:\n  CLOCK: [2024-01-01 Mon 10:00:00]--[2024-01-01 Mon 11:00:00]\n  :END:\n",
    ],
)
def test_no_words_are_missing_beside_what_the_readers_of_notes_leave_out(aside, tmp_path):
    write_file(tmp_path, "logseq/config.edn", "{}")
    write_file(tmp_path, "pages/a.md", f"{aside}- Swept the yard.\n")
    assert not any(is_count_of_words(item) for item in read_texts(tmp_path).left_out)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "cp1251"])
def test_no_words_are_missing_from_markdown_in_another_encoding(tmp_path, encoding):
    text = f"---\ntitle: {'Суп ' * 20}\n---\nСегодня мы варили суп из чечевицы.\n"
    assert left_out(write_file(tmp_path, "a.md", text.encode(encoding))) == {}


@pytest.mark.parametrize("name", WHOLE)
def test_a_reader_that_loses_a_tenth_says_so_without_the_text(tmp_path, name):
    path = write_file(tmp_path, name, WHOLE[name])
    assert with_coverage(path, ["word " * 18]) == ["word " * 18]
    (text, notice) = with_coverage(path, ["word " * 17])
    assert (text, notice) == ("word " * 17, NotRead("words that were not read: 3 of 20"))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.html", "<!--><p>one</p><!---><p>two</p><!-- un --!><p>three</p>"),  # short comments, as browsers read them
        ("a.html", "<p>one<nav>two<p>three"),  # a menu without an end
        ("a.html", "<nav>un<select>un</select>un</nav>one two<nav>three"),
        ("a.md", "---\none two three\n\n---\n"),  # no front matter
        ("a.md", "%% un %%\none two three %%"),
        ("a.org", ":LOG:\none two three"),  # a drawer without an end
    ],
)
def test_what_may_be_lost_by_mistake_is_counted(tmp_path, name, text):
    assert with_coverage(write_file(tmp_path, name, text), []) == [NotRead("words that were not read: 3 of 3")]


def test_a_file_that_hides_most_of_its_text_is_used_and_named(tmp_path):
    write_word(tmp_path, paragraph(run("Seen text. ") + run("not seen", "<w:vanish/>")))
    assert contents(tmp_path) == ["Seen text."]
    assert left_out(tmp_path) == {"a.docx": "words that were not read: 2 of 4"}


@pytest.mark.slow
def test_a_bomb_beside_the_text_of_a_word_file_is_not_unpacked(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.docx", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("word/document.xml", "<w:document xmlns:w='w'><w:body><w:t>a</w:t></w:body></w:document>")
        for number in range(2):
            archive.writestr(f"word/document{number}.xml", b"<w:t>a" + bytes(33_000_000))
    with at_most(2):
        assert (contents(tmp_path), left_out(tmp_path)) == (["a"], {})


PIECES = [
    *("<", "<a ", '="', "='", "<nav>", "<nav><select>", "<!--", "<script>", "%%", "---\n", "a: b\n", "[[", "![[", "{{"),
    *("](", "data:,", "\n- a:: b", '"source": [', '"source": ["', '"\\', "```query\n", ":a:\n", "[[a]"),
    "\n\nid: " + "0" * 32 + "\n",
    *("{", "{\\a", "{\\*", "}", "\nimport ", "\nexport a", "<a b={", "<text:p>", "<office:annotation>"),
]


@pytest.mark.parametrize("line", ["  a: b\n", 'a: "b"\n', "- a: b\n", "a: '\n", "\n", 'a: "b\n'])
def test_counting_in_front_matter_without_an_end_takes_linear_time(tmp_path, line):
    path = write_file(tmp_path, "a.md", "---\n" + line * (60_000 // len(line)) + "!\n")
    with at_most(0.7):
        with_coverage(path, [])


@pytest.mark.slow
@pytest.mark.parametrize("ending", sorted(COUNTED.keys() - {*PACKED, ".htm", ".markdown"}))
def test_counting_takes_linear_time(tmp_path, ending):
    for piece in PIECES:
        path = write_file(tmp_path, f"a{ending}", piece * (60_000 // len(piece)))
        with at_most(0.7):
            with_coverage(path, [])


def test_what_a_word_file_shows_and_no_run_holds_is_counted(tmp_path):
    field = "<w:r><w:fldChar w:fldCharType='{}'>{}</w:fldChar></w:r>"
    entries = "<w:listEntry w:val='one two'/><w:listEntry w:val='three'/>"
    path = write_word(
        tmp_path,
        "<w:p><w:instrText>MACROBUTTON a one two</w:instrText></w:p><w:p>"
        + field.format("begin", f"<w:ffData><w:ddList><w:result w:val='1'/>{entries}</w:ddList></w:ffData>")
        + "<w:r><w:instrText>FORMDROPDOWN</w:instrText></w:r></w:p><w:p><w:r><w:sym w:font='Symbol' w:char='F061'/>"
        "<w:sym w:font='Symbol' w:char='F0DE'/></w:r></w:p>",
    )
    assert with_coverage(path, []) == [NotRead("words that were not read: 5 of 5")]
