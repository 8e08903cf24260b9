"""Web pages are read as a browser shows them."""

import subprocess
import sys
from textwrap import dedent

import pytest
from reading import contents, left_out, write_file

PAGE = """<!doctype html>
<html><head><title>Soup</title><style>p > a { color: red }</style>
<script>if (a < b && c > d) document.write("<script>x<\\/p>");</script></head>
<body><nav><a href="/">Home</a> | <a href="/soups">Soups</a></nav>
<!-- a comment <p>with a tag</p> -->
<h1>Lentil&nbsp;soup</h1>
<p title="5 > 4">Cook the <b>len&shy;tils</b>,
then&hellip; <i>wait</i>.<br>Serve &amp; eat.</p>
<ul><li>salt</li><li>pepper<ul><li>black</li></ul></li></ul>
<table><tr><th>What</th><th>How much</th></tr><tr><td>Lentils</td><td>200 g</td></tr></table>
<pre>
  1 &lt; 2
    kept
</pre>
</body></html>"""


@pytest.fixture
def text_of(tmp_path):
    """A function that reads a page."""

    def read(page: str) -> str:
        [text] = contents(write_file(tmp_path, "a.html", page.encode("utf-16")))  # a page in UTF-8 has no NUL
        return text

    return read


def test_a_page_becomes_its_text(tmp_path):
    assert contents(write_file(tmp_path, "a.html", PAGE)) == [
        "Lentil soup\n\nCook the lentils, then… wait.\nServe & eat.\n\n- salt\n- pepper\n  - black\n\n"
        "What | How much\nLentils | 200 g\n\n  1 < 2\n    kept"
    ]


def test_a_page_without_end_tags_is_read(tmp_path):
    assert contents(write_file(tmp_path, "a.HTM", "<head><title>x</title><p>One<p>Two 1 < 2 <b>and")) == [
        "One\n\nTwo 1 < 2 and"
    ]


@pytest.mark.parametrize(
    "between",
    [
        "<!-- a --!><!--><!---><!-- a -- b --><!-- > --><!><!-- <!-- --></ a comment><?php echo 1 ?><![CDATA[x]]>",
        "<![if !mso]><![endif]><!--[if !mso]><!--><!--<![endif]--><!--[if mso]><p>For Word</p><![endif]-->",
        "<script>const u = '<!--';</script><script><!-- <script> --></script><style>a { content: '<!--' }</style>",
        "<svg/>",
        '<svg class="icon"><g/><title>Save</title></svg\n>',
        "<svg><g><path></svg x>",
        "<math/>",
        "<nav/>",
        "<nav><a href=1>Home</a></nav>",
        "<div hidden>x<p>y</div>",
        "<p hidden>x",
        "<b hidden>x</b>",
        "<p style='color: red; DISPLAY : none !important'>x",
        "<p style='visibility:hidden'>x",
        "<p style='/* a; */ display/**/: none'>x",
        "<p style='content-visibility: hidden'>x",
        "<ul><li style='visibility: hidden'>x</ul>",
        "<ul><li></ul>",
        "<template><p>x</template>",
        "<noscript><p>Turn scripts on</noscript>",
        "<iframe>x</iframe>",
        "<select><option>x<option>y</select>",
        "<dialog>x</dialog>",
        "<div popover>x</div>",
        "<object data=x></object>",
        "<img alt='x' src='data:image/png;base64,AAAA'>",
        "<video controls>x</video>",
        "<input value=x>",
        "\0",
    ],
)
def test_what_a_browser_does_not_show_ends_where_it_ends_there(text_of, between):
    assert text_of(f"<body><h1>One</h1>{between}<p>Two <i>three</p><p>Four").split() == ["One", "Two", "three", "Four"]


@pytest.mark.parametrize(
    ("page", "text"),
    [
        # What is shown.
        ("<nav><p>No menu, but text that has a <a>link</a>.", "No menu, but text that has a link."),
        ("<nav/><p>The rest of the page.", "The rest of the page."),
        ("<button>Which day?</button><p>Monday", "Which day?\n\nMonday"),
        ("<details><summary>More</summary>Closed</details>", "More\nClosed"),
        ("<div hidden style='display: block'>a</div><div hidden=until-found>b</div>", "a\nb"),
        ("<dialog open>a</dialog><p aria-hidden=true>b", "a\n\nb"),
        ("<body style='display: none'>Until a script runs", "Until a script runs"),
        ("<p style='visibility: hidden'>x<b style='visibility: visible'>a</b>x</p>b", "a\n\nb"),
        ("<svg><text>One</text><text>Two</text></svg>", "One\nTwo"),
        ("E <math><mi>m</mi><annotation>\\m</annotation></math>", "E m"),
        ("<object data=x>Instead</object>", "Instead"),
        ("<x-card><template shadowrootmode=open><p>In it</template></x-card>After", "In it\n\nAfter"),
        ("<ruby>漢<rp>(<rt>kan<rp>)</ruby>", "漢(kan)"),
        ("&lt;b&gt; &notit; &#x80; &amp;amp; &copy2", "<b> ¬it; € &amp; ©2"),
        # Spaces, lines and paragraphs.
        ("<div>a</div><div><br></div><div>b</div>c", "a\n\nb\nc"),
        ("a<br>b<br><br>c <br/> d", "a\nb\n\nc\nd"),
        ("<p>a</p>\n<p>&nbsp;</p>\n<p>b&nbsp;&nbsp;c", "a\n\nb  c"),
        ("a<b>b</b> <i> c</i>\n<u>\td</u>", "ab c d"),
        ("<i style='display: block'>a</i><i style='display: flex'>b</i>c", "a\nb\nc"),
        ("<p>x<pre>\n\n  a\n\n\n  b <b>c\n</b></pre>y", "x\n\n\n  a\n\n\n  b c\n\ny"),
        ("<pre>a<br>  b</pre>", "a\n  b"),
        ("<div style='white-space: pre-wrap'>a\n  b</div>", "a\n  b"),
        ("<xmp><b>x</b></xmp><textarea> <b>y</b></textarea>", "<b>x</b>\n\n <b>y</b>"),
        # Lists.
        ("<ol start=3><li>a<li value=7><p>b</p><li>c</ol>", "3. a\n\n7. b\n\n8. c"),
        ("<ul><li>a<pre> b\n  c</pre></ul><li>d", "- a\n\n b\n  c\n\n- d"),
        ("<ol><li><ul><li>a</ul><li>b</ol>", "  - a\n2. b"),
        ("<dl><dt>a<dd>b</dl>", "a\nb"),
        # Tables.
        ("<table><caption>t<tr><td>a<td>b<tr><td><p>c</p><td>d<br>e</table>", "t\na | b\nc | d e"),
        ("<table><tr><td><td>b<td><tr><td>c<td><td>d</table>", "| b\nc | | d"),
        ("<table><tr><td>a<td><p>b<p>c</table>", "a\n\nb\n\nc"),
        ("<table><tr><td>a<td><table><tr><td>b<td>c<tr><td>d</table></table>", "a\n\nb | c\nd"),
        ("<table><tr><td>1\n<td><pre>a\n  b</pre></table>", "1\n\na\n  b"),
        ("<table><tr><td></table>a<table><tr>b<td>c</table>", "ab\n\nc"),
        ("<p><b>a<p>b</b>c<i>d</p>e</i>", "a\n\nbcd\n\ne"),
    ],
)
def test_text_is_laid_out_as_in_a_browser(text_of, page, text):
    assert text_of(page) == text


def test_cells_with_much_text_in_several_lines_are_paragraphs(text_of):
    lines = ["word " * 150 + "end"] * 2
    assert text_of(f"<table><tr><td>a<td>{'<br>'.join(lines)}</table>") == "a\n\n" + "\n".join(lines)


@pytest.mark.parametrize(
    "start", ['<?xml version="1.0"?>\n<html>', '<!DOCTYPE html>\n<html xmlns="http://www.w3.org/1999/xhtml">']
)
def test_xhtml_closes_elements_in_their_start_tags(text_of, start):
    body = '<body><div hidden="hidden" title="a>b"/><p>a<br/>b<textarea /></p>c<style/></body>'
    assert text_of(f'{start}<head><title/><script src="a.js"/></head>{body}') == "a\nb\n\nc"


@pytest.mark.parametrize(
    ("meta", "encoding"),
    [
        ('<meta charset="utf-8">', "utf-8"),
        ("<meta charset=windows-1251>", "cp1251"),
        ('<?xml version="1.0" encoding="windows-1251"?>', "cp1251"),
        ('<meta http-equiv="Content-Type" content="text/html; charset=iso-8859-1">', "cp1252"),
        ("<meta charset='shift_jis'>", "cp932"),
        ("<meta charset=iso-2022-jp>", "iso2022_jp"),
        ("<meta charset=utf-8>", "cp1252"),  # a lie
        ("<meta charset=windows-1252>", "utf-8"),  # another
        ("<meta charset=windows-1252>", "utf-8-sig"),
        ("<meta charset=windows-1252>", "utf-16"),
        ("<meta charset=utf-16>", "utf-8"),
        ("<meta charset=cp037>", "utf-8"),
        ("<meta charset=rot13>", "utf-8"),
        ("<meta charset=nonsense>", "utf-8"),
    ],
)
def test_the_encoding_that_a_page_names_is_used_unless_it_lies(tmp_path, meta, encoding):
    texts = {"cp1251": "Хорошая погода", "cp932": "今日は天気①", "iso2022_jp": "今日は天気"}
    text = texts.get(encoding, "Smörgås – på “bordet”")
    page = f"{meta}<p>{text}"
    assert contents(write_file(tmp_path, "a.html", page.encode(encoding))) == [text]


@pytest.mark.parametrize(("encoding", "shown"), [("utf-8", "\ufffd"), ("windows-1251", "\x98")])
def test_single_damaged_and_null_characters_lose_no_page(tmp_path, encoding, shown):
    text = "Хорошая погода " * 80
    page = f"<meta charset={encoding}><p>{text}".encode(encoding) + b"A\0B" + b"\x98"
    assert contents(write_file(tmp_path, "a.html", page)) == [f"{text}AB{shown}"]


@pytest.mark.parametrize(
    "page",
    [
        "<html></html>",
        "<script>alert('x')",
        "<head><title>Only</title></head>",
        "<!-- x",
        "<frameset><frame src=a.html><noframes>No frames</noframes></frameset>",
        "<p>&nbsp;",
    ],
)
def test_a_page_without_text_is_left_out(folder, page):
    write_file(folder, "a.html", page)
    assert left_out(folder) == {"a.html": "no text"}


@pytest.mark.parametrize(
    "data", [b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", b"\x1f\x8b\x08\0" + bytes(range(256)) * 9, b"\xff\xfe<\0p\0>"]
)
def test_what_is_no_page_is_left_out_with_a_reason(folder, data):
    write_file(folder, "a.html", data)
    assert set(left_out(folder)) == {"a.html"}


def test_a_page_with_too_many_tags_is_left_out(folder):
    for piece in ("<b>", "<"):
        write_file(folder, "a.html", piece * 5_000_001)
        assert left_out(folder) == {"a.html": "more than 5 million tags; split it to use it"}


@pytest.mark.slow
def test_small_pages_take_little_memory():
    """The standard opens what was left open again in each paragraph, and copies attributes."""
    script = """
        import resource
        from sebp_edge.reading.formats.html import html_text

        many = range(15_000)
        attributes = " ".join(f"a{i}" for i in many)
        resource.setrlimit(resource.RLIMIT_AS, (600_000_000, 600_000_000))
        for page in (
            "".join(f"<p><font x={i}>x" for i in many),
            "".join(f"<b {i}>" for i in many) + "".join(f"<i {i}>" for i in many) + "x</b>" * len(many),
            f"<a {attributes}>" + "<p>x" * len(many),
            "".join(f"<html a{i}>x" for i in many),
            f"<body {attributes}>" + "<body b>x" * len(many),
        ):
            assert html_text(page).count("x") == len(many)
    """
    subprocess.run([sys.executable, "-c", dedent(script)], check=True, timeout=60)
