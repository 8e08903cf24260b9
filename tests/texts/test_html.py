"""Web pages are read as a browser shows them."""

import time

import pytest
from reading import contents, left_out, write_file

PAGE = """<!doctype html>
<html><head><title>Soup</title><style>p > a { color: red }</style>
<script>if (a < b && c > d) document.write("<script>x<\\/p>");</script></head>
<body><nav><a href="/">Home</a></nav>
<!-- a comment <p>with a tag</p> -->
<h1>Lentil&nbsp;soup</h1>
<p title="5 > 4">Cook the <b>lentils</b>,
then&hellip; <i>wait</i>.<br>Serve &amp; eat.</p>
<ul><li>salt</li><li>pepper<ul><li>black</li></ul></li></ul>
<table><tr><th>What</th><th>How much</th></tr><tr><td>Lentils</td><td>200 g</td></tr></table>
<pre>
  1 &lt; 2
    kept
</pre>
</body></html>"""


def test_a_page_becomes_its_text(tmp_path):
    assert contents(write_file(tmp_path, "a.html", PAGE)) == [
        "Lentil soup\n\nCook the lentils, then… wait.\nServe & eat.\n\n- salt\n- pepper\n\n- black\n\n"
        "What | How much\nLentils | 200 g\n\n1 < 2\nkept"
    ]


def test_a_page_without_end_tags_is_read(tmp_path):
    assert contents(write_file(tmp_path, "a.HTM", "<head><title>x<body><p>One<p>Two 1 < 2 <b>and")) == [
        "One\n\nTwo 1 < 2 and"
    ]


@pytest.mark.parametrize(
    ("meta", "encoding"),
    [
        ('<meta charset="utf-8">', "utf-8"),
        ("<meta charset=windows-1251>", "cp1251"),
        ('<meta http-equiv="Content-Type" content="text/html; charset=iso-8859-1">', "cp1252"),
        ("<meta charset='shift_jis'>", "shift_jis"),
        ("<meta charset=utf-8>", "cp1252"),  # a lie
        ("<meta charset=utf-16>", "utf-8"),
        ("<meta charset=cp037>", "utf-8"),
        ("<meta charset=rot13>", "utf-8"),
        ("<meta charset=nonsense>", "utf-8"),
    ],
)
def test_the_encoding_that_a_page_names_is_used_unless_it_lies(tmp_path, meta, encoding):
    text = {"cp1251": "Хорошая погода", "shift_jis": "今日は天気"}.get(encoding, "Smörgås – på “bordet”")
    page = f"<head>{meta}</head><p>{text}"
    assert contents(write_file(tmp_path, "a.html", page.encode(encoding))) == [text]


@pytest.mark.parametrize("page", ["<html></html>", "<script>alert('x')", "<head><title>Only</title></head>", "<!-- x"])
def test_a_page_without_text_is_left_out(folder, page):
    write_file(folder, "a.html", page)
    assert left_out(folder) == {"a.html": "no text"}


@pytest.mark.parametrize(
    "piece", ["<", "<!", "<!--", "<a ", "</", "<a b='", '<a b="', "&", "&#", "<?", "<pre>", "<li>", "<svg>", '<a "<a" ']
)
def test_no_page_takes_long(folder, piece):
    write_file(folder, "a.html", piece * (1_000_000 // len(piece)))
    started = time.monotonic()
    left_out(folder)
    assert time.monotonic() - started < 10
