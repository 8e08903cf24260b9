"""The time that a file takes grows with its size, whatever is repeated in it."""

import pytest
from pace import at_most
from reading import read_all, write_file

MAIL = "From: anna@example.org\nContent-Type: text/{}\n\n"
IN_MAILS = [" ", "\n", ">", "On @ ", "on a@b\n", "From: a\n", "_", "--", "<blockquote>", "12:00:\n"]
IN_MAILS += ["<div gmail_signature "]
IN_NOTES = [
    *("[[", "![[", "%%", "`", "``", "```\n", "> [!", "> ", "{{", "((", "]](", "- \n", "\t- a\n", "a::", " ^a", "|"),
    *("<!--", "<!-- x -->\n", "[", "[a\n", "- ", "```a\n", "` ", "[//]: # (\n", "<div>\n", "$", "$$\n", "a\n", " "),
    *("`" * 70, "- a\n\n    b\n", "\n    &amp;", "1. `a\n", "~~~\n````\n", "5 %% ", "a <!--", "\\"),
]
MESSAGE = "13/03/2024, 22:01 - {}: "
IN_CHATS = [" ", "\u200e", "<", "< a", "1/1/24, ", "a ", "<a a>", ".abc (", "\n"]
AMONG_COMPONENTS = [
    *("{", "}", "<a ", "<a {", '<a b="', "<a b='>", "import ", "\nimport {a", "\nexport {", "<", "\n\nexport a", "`<"),
]
IN_PAGES = [
    *("<", "<!", "<!--", "<a ", "</", "<a b='", '<a b="', "&", "&#", "<?", "<pre>", "<li>", "<svg>", '<a "<a" ', " "),
    *("<div>", "<b><p>", "<table><td>x", "<ol><li>x", "<select><option>", "<svg><tr><td>x", "<?xml <a /", "<nav><a>x"),
]
IN_DATA = [
    *("-----BEGIN A B-----\n", "-----BEGIN A-----\nB: c\n", "-----BEGIN A-----\n" + "A" * 40 + "\n", "aB1" * 22 + "\n"),
    *("aB1" * 22 + "\n" + "a" * 20 + "\n", "eyJ", "data:", "data:a/b;base64,", "![](data:a/b,", "<img ", '<img "'),
    *("[a]: ", "data:a/b;a=b;", "data:a/b;base64,A\n", "iVBORw0KGgo" + "AAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJ" * 3 + "\n"),
]
# Files, what stands before and after what is repeated, its characters, the seconds that it may take, and what that is.
HOSTILE = [
    ("a.html", "", "", 100_000, 1.25, IN_PAGES),
    ("a.eml", MAIL.format("plain"), "x", 200_000, 1.6, IN_MAILS),
    ("a.eml", MAIL.format("html"), "x", 200_000, 1.6, IN_MAILS),
    ("a.txt", MESSAGE.format("Anna") + "a", f">\n{MESSAGE.format('Bob')}b\n", 500_000, 5, IN_CHATS),
    ("a.mdx", "", "", 200_000, 6, AMONG_COMPONENTS),
    ("a.org", "", "", 500_000, 2.5, ["[[", "[[a][", ":a:\n", "#+a[", "#+BEGIN_SRC\n"]),
    ("a.md", "data:image/png;base64,", "", 300_000, 3, IN_DATA),
    ("obsidian.md", "<!-- x -->", "", 300_000, 4, IN_NOTES),
    ("logseq.md", "<!-- x -->", "", 300_000, 4, IN_NOTES),
]
SETTINGS = {"obsidian.md": ".obsidian/app.json", "logseq.md": "logseq/config.edn"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "text", "seconds"),
    [
        pytest.param(name, before + piece * (size // len(piece)) + after, seconds, id=f"{name}-{piece!r:.20}")
        for name, before, after, size, seconds, pieces in HOSTILE
        for piece in pieces
    ],
)
def test_no_file_takes_long(tmp_path, name, text, seconds):
    if name in SETTINGS:
        write_file(tmp_path, SETTINGS[name], "{}")
    path = write_file(tmp_path, name, text)
    with at_most(seconds):
        read_all(path)
