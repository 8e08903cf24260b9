"""The data of pictures within a text is left out of every format; what describes a picture is read."""

import base64
import json
import random

import pytest
from reading import Conversation, PromptCompletion, contents, read_texts, write_file

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
    assert (first, second) == (clean, PromptCompletion(clean, clean))
    assert third == Conversation(tuple({**message, "content": clean} for message in messages))
    assert (fourth, fifth) == (f"B {clean}", "C")
    reason = "data of pictures and files within the text: "
    counts = {item.source: int(item.reason.removeprefix(reason)) for item in reading.left_out if reason in item.reason}
    assert counts == {
        **{"a.json, record 1": 2, "a.json, record 2": 4, "a.json, record 3": 4},
        **{"b.ipynb": 2, "c.html": 1, "d.md": 1},
    }
    assert (reading.left_out[-1].source, reading.left_out[-1].reason) == ("d.md", "empty")


LINES = "\n".join(base64.b64encode(random.Random(1).randbytes(240)).decode()[at : at + 64] for at in range(0, 320, 64))
PGP = f"-----BEGIN PGP MESSAGE-----\nVersion: GnuPG v2\n\n{LINES}\n=aB3d\n-----END PGP MESSAGE-----"
KEY = f"-----BEGIN OPENSSH PRIVATE KEY-----\n{LINES}\nAAAE=\n-----END OPENSSH PRIVATE KEY-----"
NUL = "\n".join("abcdef0123456789" * 4 for _ in range(3))


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (f"A\n{PGP}\nB", "A\n\nB"),
        (f"A\n```\n{KEY}\n```\nB", "A\n```\n\n```\nB"),
        (f"A {PGP.replace('MESSAGE', 'PUBLIC KEY BLOCK')} B", "A  B"),
        (f"A\n{KEY.replace('OPENSSH PRIVATE KEY', 'CERTIFICATE')}\nB", "A\n\nB"),
        (
            f"A\n{KEY[:30]}\nProc-Type: 4,ENCRYPTED\nDEK-Info: AES,01\n\n{LINES}",
            f"A\n{KEY[:30]}\nProc-Type: 4,ENCRYPTED\nDEK-Info: AES,01",
        ),
        (f"A\n{PGP[:200]}\nB is here.", "A\n\nB is here."),
        ("A\n> " + PGP.replace("\n", "\n> ") + "\nB", "A\n> \nB"),
        ('A {"k": "' + KEY.replace("\n", "\\n") + '"} B', 'A {"k": ""} B'),
        (f"A\n---- BEGIN SSH2 PUBLIC KEY ----\nComment: me\n{LINES}\n---- END SSH2 PUBLIC KEY ----\nB", "A\n\nB"),
        (
            "-----BEGIN PGP SIGNED MESSAGE-----\nHash: SHA512\n\nMy words.\n" + PGP.replace("MESSAGE", "SIGNATURE"),
            "My words.",
        ),
        ("A ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAI" + "J0Yk0kPQ8f" * 4 + "Abc me@home B", "A ssh-ed25519  me@home B"),
        (f"A ssh-rsa AAAAB3NzaC1yc2EAAAADAQAB{LINES[:64]} me B", "A ssh-rsa  me B"),
        (f"A\n{LINES}\n\nB", "A\n\n\nB"),
        (f"A\n{LINES}\nAfter", "A\n\nAfter"),
        ("A `" + LINES.replace("\n", "") + "` B", "A `` B"),
        *[
            (text, text)
            for text in (
                "Write `-----BEGIN PGP MESSAGE-----` and `-----END PGP MESSAGE-----`.",
                "-----BEGIN CERTIFICATE-----\nMIIB... in base64\n-----END CERTIFICATE-----",
                "-----BEGIN NOTES-----\nThe words of a note that is somewhat long\n-----END NOTES-----",
                f"Sums:\n{NUL}\n{'ACGT' * 40}",
                "https://a.org/" + LINES.replace("\n", ""),
                "src/Main1/java/" * 12 + "Main.java",
            )
        ],
    ],
)
@pytest.mark.parametrize("ending", [".md", ".txt"])
def test_keys_and_other_data_in_base64_are_left_out_and_counted(tmp_path, written, read, ending):
    reading = read_texts(write_file(tmp_path, f"a{ending}", written))
    assert [document.content for document in reading.documents] == [read]
    reasons = ["keys, certificates and other data in base64 within the text: 1"] * (written != read)
    assert [item.reason for item in reading.left_out] == reasons
