"""Exports of programs for notes are read without ids, properties and attachments, and with their titles."""

import io
import tarfile

import pytest
from pace import at_most
from reading import assert_survives, contents, left_out, read_all, refusal, write_file

# ------------------------------------------------------------------------------------------------------------ Evernote


def enex(*notes: str) -> str:
    doctype = '<!DOCTYPE en-export SYSTEM "http://xml.evernote.com/pub/evernote-export4.dtd">'
    return f'<?xml version="1.0" encoding="UTF-8"?>{doctype}<en-export version="10.1">{"".join(notes)}</en-export>'


def note(body: str, title: str = "Soup", more: str = "", content: str = "<content>") -> str:
    page = f'<?xml version="1.0"?><!DOCTYPE en-note SYSTEM "enml2.dtd"><en-note>{body}</en-note>'
    return (
        f"<note><title>{title}</title>{content}<![CDATA[{page}]]></content><created>20240101T0</created>{more}</note>"
    )


RESOURCE = '<resource><data encoding="base64">\nQUJD\n</data><mime>image/png</mime><title>unread</title></resource>'


def test_evernotes_notes_are_read_below_their_titles(tmp_path):
    first = note('<div>Lentils &amp; salt</div><div><br/></div><div>größer<en-media type="a" hash="b"/></div>')
    second = note("<div>今日は&nbsp;there</div>", "A &lt; B", f"<tag>unread</tag>{RESOURCE}")
    path = write_file(tmp_path, "a.enex", enex(first, second))
    assert contents(path) == ["Soup\n\nLentils & salt\n\ngrößer", "A < B\n\n今日は there"]
    assert left_out(path) == {"a.enex": "attachments: 1"}


def test_evernotes_boxes_lists_and_code_are_kept(tmp_path):
    body = (
        '<div><en-todo checked="true"/>Salt</div><div><en-todo/>Oil</div>'
        '<ul style="--en-todo:true;"><li style="--en-checked:true;"><div>Pot</div></li>'
        '<li style="--en-checked:false;"><div>Lid</div></li></ul>'
        '<div style="-en-codeblock:true;"><div>a = 1</div><div>b</div></div>'
        "<table><tr><td>x</td><td>y</td></tr></table>"
    )
    path = write_file(tmp_path, "a.enex", enex(note(body)))
    assert contents(path) == ["Soup\n\n[x] Salt\n[ ] Oil\n\n- [x] Pot\n- [ ] Lid\n\na = 1\nb\n\nx | y"]


def test_what_of_evernotes_is_not_the_owners_text_is_counted(tmp_path):
    clipping = "<note-attributes><source>web.clip7</source></note-attributes>"
    tasks = '<div style="--en-task-group:true; --en-id:1"><div>Content not supported</div><div>Unread</div></div>'
    notes = [
        note('<div>Open<en-crypt cipher="AES" hint="unread">Q3J5cHQ=</en-crypt></div>'),
        note("<div>Of somebody</div>", more=clipping),
        note("U2VjcmV0", content='<content encoding="base64:aes">'),
        note(f"<div>Shop</div>{tasks}", more="<task><title>unread</title></task>"),
        note("<div><br/></div>", more=RESOURCE),
    ]
    reading = read_all(write_file(tmp_path, "a.enex", enex(*notes)))
    assert [document.content for document in reading.documents] == ["Soup\n\nOpen", "Soup\n\nShop"]
    assert [item.reason for item in reading.left_out] == [
        *("attachments: 1", "clippings of web pages, which others wrote: 1", "encrypted notes: 1"),
        *("encrypted passages: 1", "notes without text: 1", "tasks: 1"),
    ]


def test_a_cut_evernote_export_is_read_up_to_the_cut(tmp_path):
    text = enex(note("<div>One</div>"), note("<div>Two</div>"))
    path = write_file(tmp_path, "a.enex", text[: text.index("Two")])
    assert contents(path) == ["Soup\n\nOne"]
    assert left_out(path) == {"a.enex, record 2": "damaged after 1 notes"}


@pytest.mark.parametrize("text", ["<a/>", "<en-export>", "en-export", '<!DOCTYPE a [<!ENTITY b "c">]><en-export/>'])
def test_what_is_no_evernote_export_is_refused(tmp_path, text):
    assert "damaged, or not an Evernote export" in refusal(write_file(tmp_path, "a.enex", text))


def test_entities_do_not_grow(tmp_path):
    bomb = "".join(f'<!ENTITY a{n} "{f"&a{n - 1};" * 10 if n else "x" * 10}">' for n in range(10))
    text = f"<!DOCTYPE en-export [{bomb}]><en-export><note><title>&a9;</title></note></en-export>"
    with at_most(5):
        assert "damaged" in refusal(write_file(tmp_path, "a.enex", text))


# -------------------------------------------------------------------------------------------------------------- Joplin

ID = "0123456789abcdef0123456789abcdef"
METADATA = "id: {}\nparent_id: \ncreated_time: 2024-01-01T00:00:00.000Z\n{}type_: {}"


def joplin(text: str, kind: int = 1, more: str = "") -> str:
    return f"{text}\n\n{METADATA.format(ID, more, kind)}"


def jex(path, files: dict[str, str | bytes], *links: str):
    with tarfile.open(path, "w") as archive:
        for name in links:
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
            archive.addfile(link)
        for name, text in files.items():
            data = text.encode() if isinstance(text, str) else text
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


FILES = {
    "a.md": joplin("Soup\n\nLentils.\n\nid: of the pot"),
    "b.md": joplin(f"Links\n\nSee [the soup](:/{ID}) ![pot.png](:/{ID}) <img src=':/{ID}'/>\n\n`[a](:/{ID})`"),
    "c.md": joplin("Notebook", 2),
    "d.md": joplin("", 1, "encryption_cipher_text: 4f\nencryption_applied: 1\n"),
    "e.md": joplin("Page\n\n<p>Of <b>HTML</b></p>", 1, "markup_language: 2\n"),
    "resources/f.md": "Somebody's",
    "resources/g.png": b"\x89PNG",
}
READ = ["Soup\n\nLentils.\n\nid: of the pot", f"Links\n\nSee the soup  \n\n`[a](:/{ID})`", "Page\n\nOf HTML"]


def test_joplins_archive_is_read_without_ids_notebooks_and_attachments(tmp_path):
    reading = read_all(jex(tmp_path / "a.jex", FILES))
    assert [document.content for document in reading.documents] == READ
    assert [(item.source, item.reason) for item in reading.left_out] == [
        ("a.jex", "Joplin's metadata: 3"),
        ("a.jex", "attachments and other files: 2"),
        ("a.jex", "notebooks, tags and what else Joplin keeps beside notes: 1"),
        ("a.jex", "notes that Joplin has encrypted; export them again with encryption off: 1"),
    ]


def test_joplins_folder_is_read_as_its_archive(folder):
    for number, (name, text) in enumerate(FILES.items()):
        write_file(folder / "raw", name if "/" in name else f"{number:032x}.md", text)
    assert contents(folder / "raw") == READ
    reasons = {
        f"{0:032x}.md": "Joplin's metadata",
        f"{2:032x}.md": "what Joplin keeps beside its notes, such as a notebook or a tag",
        f"{3:032x}.md": "encrypted by Joplin; export it again with encryption off",
        "resources/": "Joplin's attachments",
    }
    assert left_out(folder / "raw").items() >= reasons.items()


def test_a_damaged_archive_of_joplin_is_read_up_to_the_damage(tmp_path):
    whole = jex(tmp_path / "a.jex", FILES).read_bytes()
    path = write_file(tmp_path, "b.jex", whole[:1700])
    assert contents(path) == READ[:1]
    assert "damaged after 1 notes" in left_out(path).values()
    assert "damaged, or not a Joplin export" in refusal(write_file(tmp_path, "c.jex", b"\x1f\x8b" + whole))


def test_links_and_huge_files_in_joplins_archive_are_not_read(tmp_path):
    path = jex(tmp_path / "a.jex", {"b.md": joplin("Soup")}, "a.md")
    assert contents(path) == ["Soup"]
    assert "attachments and other files: 1" in [item.reason for item in read_all(path).left_out]


# -------------------------------------------------------------------------------------------------------------- Notion


def test_notions_pages_are_read_without_properties_and_ids(folder):
    page = (
        "# Pot\n\nCreated: January 1, 2022\nStatus: Done\nWho: Anna, Bob\n\nIt holds [Soup](Pot%20a/Soup%20"
        + ID
        + ".md)."
        "\n\n![Untitled](Pot%20(new)%20" + ID + "/Untitled.png)\n\nNote: hot.\n\n[A page](https://a.org)"
    )
    write_file(folder, f"Pot {ID}.md", page)
    write_file(folder, f"Pots/Pan {ID}.md", "# Pan\n\nTags: a, b")
    write_file(folder, f"Pots {ID}.csv", "Name,Tags\nPan,a\n")
    write_file(folder, "index.html", "<ul><li><h3>Workspace details:</h3><p>Workspace identifier: 0</p></li></ul>")
    assert contents(folder)[:-1] == ["# Pot\n\nIt holds Soup.\n\n\n\nNote: hot.\n\n[A page](https://a.org)"]
    assert left_out(folder) == {
        f"Pot {ID}.md": "Notion's properties: 3",
        f"Pots/Pan {ID}.md": "a page of Notion without text",
        f"Pots {ID}.csv": "a database exported from Notion; its pages are in the .md files beside it",
        "index.html": "the list of the pages that Notion exported",
    }


@pytest.mark.parametrize("text", ["# A\n\nIdea: build a boat\n\nNow.", "# A\n\nAnna: Hi\nBob\n\nNow.", "Note: x\n\ny"])
def test_prose_with_a_colon_is_no_property(tmp_path, text):
    assert contents(write_file(tmp_path, f"A {ID}.md", text)) == [text]


# --------------------------------------------------------------------------------------------------------- Apple Notes


def test_apple_notes_that_were_exported_as_pages_are_read(tmp_path):
    page = (
        "<div><h1>Soup</h1></div>\n<div>Lentils<br></div>\n<div><br></div>\n"
        '<ul class="Apple-dash-list">\n<li>Salt</li>\n<ul class="Apple-dash-list">\n<li>5 g</li>\n</ul>\n</ul>\n'
        '<div><b><span style="font-size: 18px">Then</span></b></div>\n'
        '<div><img src="data:image/png;base64,QUJD"/></div>'
        "<div><object><table><tbody><tr><td><div>a</div></td><td><div>b</div></td></tr></tbody></table></object></div>"
    )
    [text] = contents(write_file(tmp_path, "Soup.html", page))
    assert text == "Soup\n\nLentils\n\n- Salt\n  - 5 g\n\nThen\n\na | b"


# -------------------------------------------------------------------------------------------------------- damaged files


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a.enex", "a.jex"])
def test_damaged_exports_are_read_in_part_or_refused(tmp_path, folder, name):
    whole = enex(note("<div>One</div>"), note("<ul><li>Two</li></ul>", more=RESOURCE)).encode()
    if name == "a.jex":
        whole = jex(tmp_path / "whole", FILES).read_bytes()
    assert_survives(folder, name, whole)
