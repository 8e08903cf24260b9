"""Vaults of Obsidian and Logseq are read as their owner reads them: links as text, no plugins' blocks, no templates."""

import json

import pytest
from pace import at_most
from reading import contents, left_out, write_file

from sebp_edge.texts.readers import read_texts


@pytest.fixture
def obsidian(tmp_path):
    write_file(tmp_path, ".obsidian/app.json", "{}")
    return tmp_path


@pytest.fixture
def logseq(tmp_path):
    write_file(tmp_path, "logseq/config.edn", "{}")
    write_file(tmp_path, "logseq/bak/pages/old.md", "- an old copy")
    return tmp_path


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("See [[Soup]] today.", "See Soup today."),
        ("See [[Recipes/Soup|the soup]].", "See the soup."),
        ("See [[Recipes/Soup]] and [[Soup#Lentils]].", "See Soup and Soup > Lentils."),
        ("See [[#Below]], [[Soup#^abc123]], [[Soup.md]].", "See Below, Soup, Soup."),
        ("| [[Soup\\|soup]] | x |", "| soup | x |"),
        ("Before.\n![[photo.png]]\n![[Note]] ![[b]]\nAfter ![[c|100]] it.", "Before.\nAfter  it."),
        ("> [!note]- A title\n> Text.", "> A title\n> Text."),
        ("> [!warning]\n> Text.", "> Text."),
        ("> > [!tip|wide] Inner\n> > Text.", "> > Inner\n> > Text."),
        ("Before.\n```dataview\nLIST FROM #a\n```\nAfter.", "Before.\nAfter."),
        ("```dataviewjs\ndv.list([[1]])\n```\nAfter.", "After."),
        ("Today is `= this.day` or `$= dv.x`.", "Today is  or ."),
        ("A %%hidden%% comment.\n%%\nmany\nlines\n%%\nEnd.", "A comment.\n\nEnd."),
        ("A line. ^4f2a-1", "A line."),
        ("$$\na ^b\n[[x]]\n$$\nAnd $c ^d$\nEnd. ^1", "$$\na ^b\n[[x]]\n$$\nAnd $c ^d$\nEnd."),
        ("Costs $5 and [[Soup]] costs $6.", "Costs $5 and Soup costs $6."),
        ("Write `=`, `==`, `=>` or `=SUM(A1:B2)`.", "Write `=`, `==`, `=>` or `=SUM(A1:B2)`."),
        (
            "1. ```sh\n   run it\n   ```\n2. [[A]]. %%x%%\n\n```py\n1\n```\n[[B]]",
            "1. ```sh\n   run it\n   ```\n2. A. \n\n```py\n1\n```\nB",
        ),
        ("```make``` is [[A]]. %%x%%\n\n```py\n1\n```\n[[B]]", "```make``` is A. \n\n```py\n1\n```\nB"),
        ("1. ```sh\n   not closed\n2. [[A]] %%x%%\n", "1. ```sh\n   not closed\n2. A"),
        ("> ```sh\n> %% [[a]] %%\n> ```\n> [[A]] %%x%%", "> ```sh\n> %% [[a]] %%\n> ```\n> A"),
        ("Text.\n\n    %% cell [[a]]\n    %% cell", "Text.\n\n    %% cell [[a]]\n    %% cell"),
        ("``[[a]] ` %%``, [[b]] ` %%x%%", "``[[a]] ` %%``, b `"),
        ("A %%one\n\ntwo%% B", "A B"),
        ("%% kanban:settings\n```\n%%\n```js\n%% 1 %%\n```", "```js\n%% 1 %%\n```"),
        ("| `a | %%x%% |\n|---|---|\n| b` | [[c\\|d]] |", "| `a | |\n|---|---|\n| b` | d |"),
        ("https://a.org/5%%20b and [c](http://d/%%20e).", "https://a.org/5%%20b and [c](http://d/%%20e)."),
        ("Up 5 %% on Monday.\n\nUp 7 %% on Friday.", "Up 5 %% on Monday.\n\nUp 7 %% on Friday."),
        ("Seen.\n\n%% never closed\n\nHidden.", "Seen."),
        ("100 %% and a [[", "100 %% and a [["),
        ("```sh\nif [[ -f x ]]; then %% ![[a]]\n```", "```sh\nif [[ -f x ]]; then %% ![[a]]\n```"),
        ("Write `[[Link]]` for [[Link]].", "Write `[[Link]]` for Link."),
        ("````\n```dataview\nx\n```\n````", "````\n```dataview\nx\n```\n````"),
        ("```dataview\nnever closed [[a]]", "```dataview\nnever closed a"),
    ],
)
def test_obsidian_notes_are_read_without_its_marks(obsidian, written, read):
    assert contents(write_file(obsidian, "deep/a.md", written)) == [read]


def test_only_vaults_have_marks(tmp_path):
    text = "See [[Soup|it]].\n> [!note] x\n- key:: value"
    assert contents(write_file(tmp_path, "a.md", text)) == [text]


def test_templates_and_drawings_of_obsidian_are_left_out(obsidian):
    write_file(obsidian, ".obsidian/templates.json", json.dumps({"folder": "extra/Mine/"}))
    write_file(obsidian, ".obsidian/plugins/templater-obsidian/data.json", '{"templates_folder": "Scripts"}')
    for name in ("Templates/a.md", "extra/Mine/b.md", "Scripts/c.md", "deep/Templates/kept.md"):
        write_file(obsidian, name, f"Text of {name}.")
    write_file(obsidian, "Drawing.excalidraw.md", "---\nexcalidraw-plugin: parsed\n---\n# Text Elements\n")
    write_file(obsidian, "renamed.md", "---\nexcalidraw-plugin: parsed\n---\n# Text Elements\n")
    assert contents(obsidian) == ["Text of deep/Templates/kept.md."]
    assert left_out(obsidian) == {
        ".obsidian/": "hidden folder",
        "Templates/": "Obsidian's templates",
        "extra/Mine/": "Obsidian's templates",
        "Scripts/": "Obsidian's templates",
        "Drawing.excalidraw.md": "an Excalidraw drawing",
        "renamed.md": "an Excalidraw drawing",
    }


@pytest.mark.parametrize(
    "settings", [b"[1]", b"{", b"\xff", b'{"folder": 3}', b'{"folder": "a\\u0000b"}', b"[" * 100_000]
)
def test_damaged_settings_of_a_vault_do_no_harm(obsidian, settings):
    write_file(obsidian, ".obsidian/templates.json", settings)
    write_file(obsidian, "a.md", "[[Kept]].")
    assert contents(obsidian) == ["Kept."]


def test_a_folder_or_file_inside_a_vault_has_its_marks_and_a_vault_inside_a_folder_has_its_own(obsidian, monkeypatch):
    write_file(obsidian, "deep/notes/a.md", "See [[Soup]].")
    assert contents(obsidian / "deep" / "notes") == contents(obsidian / "deep" / "notes" / "a.md") == ["See Soup."]
    monkeypatch.chdir(obsidian / "deep")
    assert contents(type(obsidian)("notes")) == ["See Soup."]
    write_file(obsidian, "graph/logseq/config.edn", "{}")
    write_file(obsidian, "graph/pages/b.md", "- id:: 1\n- See [[Stew]].")
    assert contents(obsidian) == ["See Soup.", "- See Stew."]


UUID = "6499f1b5-7d0c-4b4a-9a51-2f3e4b5c6d7e"


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("title:: Soup\ntags:: a, b\n\n- Lentils [[ns/Carrots]] #[[two words]].", "- Lentils Carrots #two words."),
        (f"- A block\n  id:: {UUID}\n  collapsed:: true\n\t- Inner.", "- A block\n\t- Inner."),
        (f"- See (({UUID})) and [that]((({UUID}))) or [this]([[Page]]).", "- See  and that or this."),
        ("- A.\n- {{embed [[Page]]}}\n- {{query (todo TODO)}}\n- B.", "- A.\n- B."),
        ('- A.\n- {{query (property x "{y}")}}\n- B.', "- A.\n- B."),
        ("- A.\n- #+BEGIN_COMMENT\n  x\n  #+END_COMMENT\n- B.", "- A.\n- B."),
        ("- A.\n- #+BEGIN_QUERY\n  {:query x}\n  #+END_QUERY\n- B.", "- A.\n- B."),
        (
            "- TODO Wash up\n  SCHEDULED: <2024-01-01 Mon>\n  :LOGBOOK:\n  CLOCK: [x]\n  :END:\n- B.",
            "- TODO Wash up\n- B.",
        ),
        ("- Meeting\n  template:: meeting\n\t- Who?\n\t\t- When?\n- B.", "- B."),
        ("- A.\n\t- x\n\t  template:: y\n\t\t- z\n\t- C.", "- A.\n\t- C."),
        ("- ```\n  key:: [[value]]\n  ```\n- B.", "- ```\n  key:: [[value]]\n  ```\n- B."),
        ("- std::vector is C++.", "- std::vector is C++."),
        ("- {{cloze Paris}} and {{cloze [[the]] $\\frac{a}{b}$}}.", "- Paris and the $\\frac{a}{b}$."),
        ("- $\\frac{{a}}{b}$, $$x_{{1}}$$, {{ site.title }}", "- $\\frac{{a}}{b}$, $$x_{{1}}$$, {{ site.title }}"),
        ("- A\n  :LOGBOOK:\n  not closed\n- B\n\n:END:", "- A\n  :LOGBOOK:\n  not closed\n- B\n\n:END:"),
        ("- #+BEGIN_QUERY\n  {:x}\n- B", "- #+BEGIN_QUERY\n  {:x}\n- B"),
        (
            "- a\n\t- b\n\t\t- ```\n\t\t  k:: v\n\t\t  - [[c]]\n\t\t  ```\n\t\t  k:: v\n\t\t- [[d]]",
            "- a\n\t- b\n\t\t- ```\n\t\t  k:: v\n\t\t  - [[c]]\n\t\t  ```\n\t\t- d",
        ),
        ("- ```make``` is\n- k:: v\n- [[A]]", "- ```make``` is\n- A"),
    ],
)
def test_logseq_notes_are_read_without_its_marks(logseq, written, read):
    assert contents(write_file(logseq, "pages/a.md", written)) == [read]


def test_what_logseq_keeps_for_itself_is_left_out(logseq):
    write_file(logseq, "journals/2024_01_01.md", "- Snow.")
    write_file(logseq, "pages/templates.md", "- Day\n  template:: day\n\t- Mood:")
    assert contents(logseq) == ["- Snow."]
    assert left_out(logseq) == {"logseq/": "Logseq's settings and backups", "pages/templates.md": "empty"}


@pytest.mark.parametrize(
    "piece",
    [
        "[[",
        "![[",
        "%%",
        "`",
        "``",
        "```\n",
        "> [!",
        "> ",
        "{{",
        "((",
        "]](",
        "- \n",
        "\t- a\n",
        "a::",
        " ^a",
        "|",
        "<!--",
        "$",
    ],
)
@pytest.mark.parametrize("app", ["obsidian", "logseq"])
def test_no_note_takes_long(request, app, piece):
    vault = request.getfixturevalue(app)
    with at_most(0.9):
        read_texts([write_file(vault, "a.md", piece * (30_000 // len(piece))), "A text."])
