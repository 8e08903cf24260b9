"""Vaults of Obsidian and Logseq are read as their owner reads them: links as text, no plugins' blocks, no templates."""

import json
import zipfile

import pytest
from reading import contents, left_out, read_all, read_texts, write_file


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
        ("title:: Soup\ntags:: a, b\n\n- Lentils [[ns/Carrots]] #[[two words]].", "- Lentils ns/Carrots #two words."),
        ("- Compare [[Git/CLI/clone]] with [[Hg/CLI/clone]].", "- Compare Git/CLI/clone with Hg/CLI/clone."),
        ("- #[[Home/Shed]], #Home/Roof, [ask]([[Home/Anna]]).", "- #Home/Shed, #Home/Roof, ask."),
        ("- On [[Jan 1st, 2024]], [[Ada [[Example]] Lane]].", "- On Jan 1st, 2024, Ada Example Lane."),
        ("- `[[A/B]]` is [[A/B]].", "- `[[A/B]]` is A/B."),
        ("- [[Ada ]][[Lane]], [[ Ben ]] and[[ Cleo]].", "- Ada Lane, Ben and Cleo."),
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
    assert left_out(logseq) == {
        "logseq/": "Logseq's settings and backups",
        "pages/templates.md": "only properties, embeds, queries, templates or comments",
    }


@pytest.mark.parametrize(
    ("written", "properties", "read"),
    [
        ("alias:: Gear\ntags:: [[Home]]\n\n- Saw.", "alias:: Gear\ntags:: [[Home]]\n", "- Saw."),
        ("- alias:: Gear\n  tags:: home\n- Saw.\n  id:: 7", "- alias:: Gear\n  tags:: home\n", "- Saw."),
        ("---\ntitle: Tools\n---\nalias:: Gear\n- Saw.", "---\ntitle: Tools\n---\nalias:: Gear\n", "- Saw."),
        ("- template:: day\n\t- Mood:\n- Saw.", "", "- Saw."),
        ("- Saw.\n  alias:: Gear", "", "- Saw."),
        ("- std::vector\n- Saw.", "", "- std::vector\n- Saw."),
    ],
)
def test_properties_of_a_page_of_logseq_are_searched_and_not_learnt(logseq, written, properties, read):
    [document] = read_texts(write_file(logseq, "pages/a.md", written)).documents
    assert (document.front_matter, document.content) == (properties, read)


def test_a_graph_without_settings_is_known_by_its_journals(tmp_path):
    write_file(tmp_path, "pages/a.md", "id:: 1\n- See [[A/B]].")
    assert contents(tmp_path) == ["id:: 1\n- See [[A/B]]."]
    write_file(tmp_path, "journals/2024_01_31.md", "- Snow.")
    assert contents(tmp_path) == ["- Snow.", "- See A/B."]
    assert read_texts(tmp_path).styles == ("Read as Logseq's: 2 notes.",)


MARKED = "See [[Soup]], ![[photo.png]] and %%not%% this."


@pytest.mark.parametrize(
    "notes",
    [
        [MARKED],
        ["See [[Soup]]. ![[Pasted image 2024.png|300]]", *["Plain [[Soup]]."] * 14, "![[a.pdf#page=2]]"],
        ["---\n\nkanban-plugin: basic\n\n---\n## Now", "See ![[plan.canvas]]."],
        ["```dataview\nLIST\n```\n> [!note]- A\n> B", "%%x%% and\n> [!tip]+ [[Soup]]"],
    ],
)
def test_a_folder_without_settings_is_obsidians_by_marks_that_nothing_else_writes(tmp_path, notes):
    write_file(tmp_path, "Templates/day.md", "# {{date}}")
    write_file(tmp_path, "a.md", "See [[Recipes/Soup]]. ^id")
    for number, text in enumerate(notes):
        write_file(tmp_path, f"deep/{number}.md", text)
    reading = read_texts(tmp_path)
    assert reading.documents[0].content == "See Soup."
    assert left_out(tmp_path)["Templates/"] == "Obsidian's templates"
    [style] = reading.styles
    assert style.startswith(f"Read as Obsidian's: {len(notes) + 1} notes, by the marks in ")


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (30, "See [[Soup]], [[a|b]] and ![[Soup#Lentils]]."),  # Dendron, Foam
        (3, "> [!NOTE]\n> As on GitHub. [[link]] ^id"),
        (3, "Write `![[a.png]]`, `%%x%%` and\n\n```dataview\nLIST\n```\n\n~~~md\n![[a.png]]\n> [!note]- x\n~~~"),
        (1, "Pictures are shown as ![[a.png]]."),
        (2, "![a](a.png) 5%% and 6%%\n> [!note] A title"),
    ],
)
def test_other_folders_are_not_taken_for_obsidians(tmp_path, names, text):
    for number in range(names):
        write_file(tmp_path, f"{number}.md", f"{number}. {text}")
    reading = read_texts(tmp_path)
    assert [document.content for document in reading.documents] == [
        f"{number}. {text}" for number in sorted(range(names), key=str)
    ]
    assert reading.styles == ()


def test_few_marks_suffice_if_git_ignores_the_settings(tmp_path):
    write_file(tmp_path, "a.md", "![[a.png]] [[A]]")
    write_file(tmp_path, "b.md", "![[b.png]] [[B]]")
    for number in range(60):
        write_file(tmp_path, f"{number}.md", f"{number} [[C]]")
    assert "0 [[C]]" in contents(tmp_path)
    write_file(tmp_path, ".gitignore", "*.tmp\n/.obsidian/workspace.json\n")
    assert "0 C" in contents(tmp_path)


def test_marks_in_a_vault_do_not_make_one_of_the_folder_around_it(tmp_path):
    write_file(tmp_path, "blog.md", "As [[it]] is.")
    write_file(tmp_path, "vault/.obsidian/app.json", "{}")
    write_file(tmp_path, "vault/a.md", MARKED)
    assert contents(tmp_path) == ["As [[it]] is.", "See Soup,  and this."]
    assert read_texts(tmp_path).styles == ("Read as Obsidian's: 1 note.",)


def test_a_file_that_is_kept_is_read_again_if_its_folder_becomes_a_vault(tmp_path):
    write_file(tmp_path, "a.md", "See [[Soup]].")
    kept = {}
    assert read_all(tmp_path, kept=kept).documents[0].content == "See [[Soup]]."
    (tmp_path / ".obsidian").mkdir()
    assert read_all(tmp_path, kept=kept).documents[0].content == "See Soup."


def test_drawings_and_boards_are_known_in_any_folder_and_archive(tmp_path):
    write_file(
        tmp_path, "notes/renamed.md", "---\n\nexcalidraw-plugin: parsed\ntags: [a]\n\n---\n# Text Elements\nPump"
    )
    write_file(tmp_path, "notes/old.excalidraw.md", "# Text Elements\nPump")
    write_file(tmp_path, "notes/board.md", "---\nkanban-plugin: basic\n---\n## Now\n- [ ] Sow\n%% kanban:settings\n%%")
    write_file(tmp_path, "notes/about.md", "---\ntitle: x\n---\nWrite excalidraw-plugin: parsed.")
    with zipfile.ZipFile(tmp_path / "notes.zip", "w") as archive:
        for path in (tmp_path / "notes").iterdir():
            archive.write(path, path.name)
    for given in (tmp_path / "notes", tmp_path / "notes.zip", [tmp_path / "notes" / "renamed.md", tmp_path / "notes"]):
        assert set(contents(given)) == {"## Now\n- [ ] Sow", "Write excalidraw-plugin: parsed."}
        drawings = [item for item in read_texts(given).left_out if item.reason == "an Excalidraw drawing"]
        assert {item.source.split("/")[-1] for item in drawings} == {"renamed.md", "old.excalidraw.md"}


def test_notes_without_text_are_said_to_have_none(obsidian):
    write_file(obsidian, "a.md", "---\nrating: 7\nauthor: Ada\n---")
    write_file(obsidian, "b.md", "---\nrating: 7\nauthor: Ada\n---\n![[Books.base]]")
    write_file(obsidian, "c.md", "\n")
    write_file(obsidian, "d.md", "A text.")
    found = left_out(obsidian)
    assert found["a.md"] == "only properties"
    assert found["b.md"] == "only properties, embeds, queries, templates or comments"
    assert found["c.md"] == "empty"
