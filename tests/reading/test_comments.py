"""Comments in Markdown, which no reader sees, are not read; code and everything else stay byte for byte."""

import json
import random

import pytest
from reading import contents, is_count_of_words, left_out, read_texts, write_file


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("A <!-- x --> B\n<!-- y\n\nz -->\nC", "A B\n\nC"),
        ("A <!-- one\n\ntwo --> B", "A B"),
        ("```html\n<!-- kept -->\n```\n`<!-- kept -->`<!-- x -->", "```html\n<!-- kept -->\n```\n`<!-- kept -->`"),
        (
            "1. ```sh\n   <!-- kept\n   ```\n2. <!-- x -->\n\n```\n<!-- kept -->\n```",
            "1. ```sh\n   <!-- kept\n   ```\n2. \n\n```\n<!-- kept -->\n```",
        ),
        ("```make``` is a tool. <!-- x -->\n\n```\ny\n```\nEnd.", "```make``` is a tool. \n\n```\ny\n```\nEnd."),
        ("<!-- ```\nx\n-->\nA\n```\n<!-- kept -->\n```", "A\n```\n<!-- kept -->\n```"),
        ("<div>\n<!-- one\n\ntwo -->\nA\n</div>\n\nB", "<div>\n\nA\n</div>\n\nB"),
        ("[//]: # (one\ntwo)\n[//]: <> (a (b) c)\n[comment]: # 'x'\nA", "A"),
        ("A\n[//]: # (x)\nB", "A\n\nB"),
        ('[a]: https://a.org "kept"\n[//]: https://b.org\nA', '[a]: https://a.org "kept"\n[//]: https://b.org\nA'),
        ("A <!--> B <!---> C <!-- x --!> D", "A B C D"),
        ("A <!-- never closed\n\nB", "A <!-- never closed\n\nB"),
        ("%%kept%% `` ` <!-- kept --> ``", "%%kept%% `` ` <!-- kept --> ``"),
        ("A\n\n<!-- never closed\n\nB", "A"),
    ],
)
def test_comments_are_left_out_of_markdown(tmp_path, written, read):
    assert contents(write_file(tmp_path, "a.md", written)) == [read]


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("A\n\n.. x\n   y\n\n   z\n\nB", "A\n\n\n\nB"),
        (".. _target: https://a.org\n.. x\n.. y\n\nB", ".. _target: https://a.org\n\n\n\nB"),
        ("..\n   x\n\nB", "B"),
        (".. Note: x\n\nB", "B"),
        (".. note:: kept\n   kept\n\nB", ".. note:: kept\n   kept\n\nB"),
        (".. [1] kept\n\n.. |s| image:: kept.png", ".. [1] kept\n\n.. |s| image:: kept.png"),
        ("Code::\n\n    .. kept\n\nB\n.. kept", "Code::\n\n    .. kept\n\nB\n.. kept"),
        ("..\n\n    A quotation.", "..\n\n    A quotation."),
    ],
)
def test_comments_are_left_out_of_restructured_text(tmp_path, written, read):
    assert contents(write_file(tmp_path, "a.rst", written)) == [read]


def test_comments_are_counted_and_a_text_that_is_cut_is_said_to_be(tmp_path):
    write_file(tmp_path, "a.md", "A <!-- x --> B <!-- y -->")
    write_file(tmp_path, "b.md", "A.\n\n<!-- never closed")
    write_file(tmp_path, "c.md", "<!-- nothing else -->")
    found = [(item.source, item.reason) for item in read_texts(tmp_path).left_out if not is_count_of_words(item)]
    assert found == [
        ("a.md", "comments: 2"),
        ("b.md", "comments: 1"),
        ("b.md", "all after a comment that is never closed"),
        ("c.md", "comments: 1"),
        ("c.md", "only properties, embeds, queries, templates or comments"),
    ]
    assert {item.kind for item in read_texts(tmp_path).left_out} >= {"comments", found[-1][1]}


def test_marks_for_a_blogs_program_are_left_out_and_are_no_comments(tmp_path):
    path = write_file(tmp_path, "a.md", "One.\n\n<!--more-->\n\nTwo.\n\n<!-- TOC -->\n\nThree.\n")
    assert (contents(path), left_out(path)) == (["One.\n\n\n\nTwo.\n\n\n\nThree."], {})
    path = write_file(tmp_path, "b.md", "One.\n\n<!-- more on this later -->\n\nTwo.\n")
    assert left_out(path) == {"b.md": "comments: 1"}


def test_notebooks_hide_comments_in_their_prose_only(tmp_path):
    cells = [("markdown", "A <!-- x --> B"), ("code", "<!-- kept -->"), ("markdown", "<!-- never closed")]
    notebook = {"cells": [{"cell_type": kind, "source": source} for kind, source in cells]}
    path = write_file(tmp_path, "a.ipynb", json.dumps(notebook))
    assert contents(path) == ["A B\n\n```\n<!-- kept -->\n```"]
    assert [item.reason for item in read_texts(path).left_out if not is_count_of_words(item)] == [
        "comments: 2",
        "all after a comment that is never closed",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("settings", [None, ".obsidian/app.json", "logseq/config.edn"])
def test_text_without_comments_stays_byte_for_byte_and_no_secret_is_read(tmp_path, settings):
    is_of_obsidian = settings == ".obsidian/app.json"
    if settings:
        write_file(tmp_path, settings, "{}")
    for seed in range(150):
        text, words = _note(random.Random(seed), is_of_obsidian=is_of_obsidian)
        text = f"Begin.\n\n{text}\n\nEnd."
        [seen] = contents(write_file(tmp_path, "a.md", text))
        assert "SECRET" not in seen, text
        assert [word for word in words if word not in seen] == [], text
        if not is_of_obsidian:
            without_comments = text.replace("<!--", "<--")
            assert contents(write_file(tmp_path, "a.md", without_comments)) == [without_comments]


def _note(draw: random.Random, *, is_of_obsidian: bool) -> tuple[str, list[str]]:
    """Returns a note of blocks with comments that contain "SECRET", and its visible words."""
    words: list[str] = []

    def word() -> str:
        words.append(f"w{len(words)}x")
        return words[-1]

    def comment(*secrets: str) -> str:
        begin, end = draw.choice([("<!-- ", " -->"), *([("%%", "%%"), ("%% ", " %%")] if is_of_obsidian else [])])
        return begin + draw.choice(secrets) + end

    def line() -> str:
        kinds = [
            *[word] * 3,
            lambda: f"`{word()}`",
            lambda: f"`` {word()} ` %% <!-- ``",
            lambda: f"```make``` {word()}",
            lambda: comment("SECRET", "`SECRET", "SECRET`"),
        ]
        return " ".join(draw.choice(kinds)() for _ in range(draw.randint(1, 5)))

    def fence() -> str:
        mark = draw.choice(["```", "~~~", "````"])
        return f"{mark}{draw.choice(['', 'py'])}\n{word()} %% <!-- %%\n{mark}"

    kinds = [
        line,
        lambda: f"{line()}\n{line()}",
        lambda: "\n".join(f"- {line()}" for _ in range(3)),
        fence,
        lambda: f"1. {fence()}".replace("\n", "\n   ") + f"\n2. {line()}",
        lambda: f"> {fence()}".replace("\n", "\n> ") + f"\n>\n> {line()}",
        lambda: comment("SECRET\n\nSECRET", "\nSECRET\n", "SECRET ```", "\n```\nSECRET\n", "\n- SECRET\n- SECRET\n"),
        lambda: f"# {line()}",
        lambda: f"| {line()} | {line()} |\n|---|---|\n| {word()} | `{word()}` |",
    ]
    return "\n\n".join(draw.choice(kinds)() for _ in range(draw.randint(1, 7))), words
