"""The data of pictures within a text is left out of every format; what describes a picture is read."""

import json

import pytest
from pace import at_most
from reading import contents, write_file

from sebp_edge.texts.documents import Completion, Conversation
from sebp_edge.texts.pictures import without_data
from sebp_edge.texts.readers import read_texts

BASE64 = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
DATA = f"data:image/png;base64,{BASE64}"
SVG = "data:image/svg+xml,%3Csvg%20xmlns=%22http://www.w3.org/2000/svg%22%20width=%2216%22/%3E"


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (f"A ![Anna at sea]({DATA}) B", "A ![Anna at sea]() B"),
        (f'A ![Anna]({DATA} "Title") B', 'A ![Anna]( "Title") B'),
        (f"A ![]({DATA}) B", "A  B"),
        ("A ![Anna](data:image/gif;base64,R0lGODlhAQ==) B", "A ![Anna]() B"),
        (f"A ![Anna][1] B\n\n[1]: <{DATA}>\n[2]: https://a.org", "A ![Anna][1] B\n\n[2]: https://a.org"),
        (f'A <img src="{DATA}" alt="Anna"> B <img src=\'{DATA}\'> C', 'A <img src="" alt="Anna"> B  C'),
        ('A <img alt="Anna" src=\'data:image/svg+xml;utf8,<svg x="1"/>\'> B', 'A <img alt="Anna" src=""> B'),
        (f'A <img src="a.png"> {DATA}', 'A <img src="a.png">'),
        (f"A ![x]({SVG}) {SVG} B", "A ![x]()  B"),
        (f"A [[{DATA}]] [[{DATA}][Anna]] B", "A  Anna B"),
        (f"A {DATA[:60]}\n{BASE64 * 2}\n{BASE64 * 2}\nB", "A \nB"),
        (f"url({DATA})", "url()"),
        (f"A {DATA.upper()} B", "A  B"),
        (f"A {DATA.replace('image/png', '')} B", "A  B"),
        (f"A data:image\\/png;name=my%20a.png;base64,{BASE64} B", "A  B"),
        (f"A {DATA[:-2]} {BASE64} {BASE64[:20]}= B", "A  B"),
        (f"A\n\n{BASE64[:76]}\n{BASE64}\n\nB", "A\n\n\n\nB"),
        (
            "Write data:image/png;base64,iVBO or data:text/plain,hello.",
            "Write data:image/png;base64,iVBO or data:text/plain,hello.",
        ),
        ("`![x](data:image/png;base64,iVBO...)`", "`![x](data:image/png;base64,iVBO...)`"),
        ("The data: a/b; base64, " + "a" * 100, "The data: a/b; base64, " + "a" * 100),
    ],
)
@pytest.mark.parametrize("ending", [".md", ".txt"])
def test_data_is_left_out_and_the_description_is_read(tmp_path, written, read, ending):
    if "[[" in written:
        ending = ".org"
    found = contents(write_file(tmp_path, f"a{ending}", written))
    assert [text.replace("[[", "").replace("]]", "") for text in found] == [read]


def test_data_is_left_out_of_every_format_and_counted(tmp_path):
    picture = f"A ![Anna]({DATA}) ![b]({DATA})"
    messages = [{"role": "user", "content": picture}, {"role": "assistant", "content": picture}]
    records = [picture, {"prompt": picture, "completion": picture}, {"messages": messages}]
    write_file(tmp_path, "a.json", json.dumps(records))
    write_file(tmp_path, "b.ipynb", json.dumps({"cells": [{"cell_type": "markdown", "source": f"B {picture}"}]}))
    write_file(tmp_path, "c.html", f'<p>C <img src="{DATA}"></p><pre>{DATA}</pre>')
    write_file(tmp_path, "d.md", f"![]({DATA})")
    reading = read_texts(tmp_path)
    clean = "A ![Anna]() ![b]()"
    first, second, third, fourth, fifth = [document.content for document in reading.documents]
    assert (first, second) == (clean, Completion(clean, clean))
    assert third == Conversation(tuple({**message, "content": clean} for message in messages))
    assert (fourth, fifth) == (f"B {clean}", "C")
    reason = "data of pictures and files within the text: "
    counts = {item.source: int(item.reason.removeprefix(reason)) for item in reading.left_out if reason in item.reason}
    assert counts == {
        **{"a.json, record 1": 2, "a.json, record 2": 4, "a.json, record 3": 4},
        **{"b.ipynb": 2, "c.html": 1, "d.md": 1},
    }
    assert (reading.left_out[-1].source, reading.left_out[-1].reason) == ("d.md", "empty")


@pytest.mark.parametrize(
    "piece",
    [
        "data:",
        "data:a/b;base64,",
        "![](data:a/b,",
        "<img ",
        '<img "',
        "[a]: ",
        "data:a/b;a=b;",
        "data:a/b;base64,A\n",
        f"{BASE64}\n",
    ],
)
def test_no_data_takes_long(piece):
    with at_most(3):
        without_data("data:image/png;base64," + piece * (300_000 // len(piece)))
