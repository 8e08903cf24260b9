"""The page of an analysis: valid HTML that loads nothing, contains no text, and overwrites only earlier pages."""

import os
import re
import stat
from dataclasses import replace
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest
import torch
from builders import dataset_of, make_examples, make_llama

from sebp_edge import Personalizer
from sebp_edge.basics.files import check_output_file
from sebp_edge.basics.pages import chart
from sebp_edge.basics.pages.render import write
from sebp_edge.basics.units import percent
from sebp_edge.errors import OptionError, StorageError
from sebp_edge.research.analysis.analysis import MARK, Analysis, analyze, analyze_examples
from sebp_edge.research.analysis.gradient_sparsity import HeatMap

VOID = {"meta", "br", "rect", "path"}  # rect and path close themselves in an SVG


class Page(HTMLParser):
    """Collects tags, attributes and text, and checks that tags are nested."""

    def __init__(self, html):
        super().__init__()
        self.open, self.tags, self.words = [], [], []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append((self.open[-1] if self.open else None, data.strip()))

    def all(self, tag):
        return [attributes for name, attributes in self.tags if name == tag]


def analysis_of(num_layers=2, prompt=0, name="micro-llama", context=40) -> Analysis:
    base = SimpleNamespace(
        model=make_llama(num_hidden_layers=num_layers).eval(),
        pad_token_id=2,
        dtype=torch.float32,
        device=torch.device("cpu"),
        reference=SimpleNamespace(public_name=name),
        has_new_head=False,
    )
    dataset = dataset_of(make_examples([33, 9, 17], prompt), context)
    return analyze_examples(base, dataset, 16, 0, lambda event: None)


@pytest.fixture(scope="module")
def analysis():
    return analysis_of(prompt=5)


@pytest.fixture(scope="module")
def html(analysis):
    return analysis.to_html()


# ---------------------------------------------------------------------------------------------------------------- page


@pytest.mark.slow
@pytest.mark.parametrize(("num_layers", "prompt"), [(1, 0), (7, 5)])
def test_it_is_valid_html_with_a_section_for_each_loss(num_layers, prompt):
    page = Page(analysis_of(num_layers, prompt).to_html())
    assert page.tags[0] == ("html", {"lang": "en"})
    headings = [text for tag, text in page.words if tag == "h2"]
    assert ("With a loss on trained tokens" in headings) == bool(prompt)
    # Each loss has a legend, nine heat maps, two histograms and the bar below the second.
    assert len(page.all("svg")) == 13 * (2 if prompt else 1)
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))


def test_it_loads_nothing_and_runs_nothing(html):
    page = Page(html)
    assert not re.search(r"https?:|url\(|@import|javascript:", html)
    for tag, attributes in page.tags:
        assert tag not in ("script", "link", "img", "iframe", "object", "embed", "use", "image", "form", "base")
        assert not {name for name in attributes if name.startswith("on") or name in ("src", "href", "xlink:href")}
    assert "default-src 'none'; style-src 'unsafe-inline'" in [meta.get("content") for meta in page.all("meta")]


def luminance(colour):
    """Relative luminance of "#rrggbb", as WCAG 2.1 defines it."""
    parts = [int(colour[index : index + 2], 16) / 255 for index in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_it_has_the_figures_of_the_analysis(analysis, html):
    words = [words for _, words in Page(html).words]
    every, trained = analysis.losses
    assert percent(analysis.analyzed.padding_share) in words
    assert percent(trained.computed_share) in words
    for sentence in (*every.summary, *trained.summary):
        assert sentence in words
    for layer in every.layers:
        assert str(layer.below_knee) in words


@pytest.mark.slow
def test_it_contains_no_word_of_the_texts_and_no_path(model_folder, tmp_path):
    secret = "xylophonquark"
    folder = tmp_path / f"{secret}-folder"
    folder.mkdir()
    for number in range(9):
        (folder / f"{secret}-{number}.md").write_text(f"The {secret} number {number} left at six, said {secret}.")
    analysis = analyze(Personalizer(model_folder, device="cpu"), folder)
    assert secret not in analysis.to_html()
    assert secret not in str(analysis.to_dict())
    assert str(tmp_path) not in analysis.to_html()


# ------------------------------------------------------------------------------------------------------------- figures


def test_a_heat_map_paints_each_bin_once_and_no_zero():
    norms = tuple(
        tuple(0.0 if (row + column) % 3 == 0 else 10.0 ** (column - 4) for column in range(5)) for row in (0, 1)
    )
    heat_map = HeatMap("down_proj", (0, 1), 8, norms)
    drawn = chart.map_figure(heat_map, chart.Scale.of([heat_map]), 40)
    painted = []
    for path in drawn["paths"].values():
        for begin, row, width in re.findall(r"M(\d+) (\d+)h(\d+)v1h-\d+z", path):
            painted += [(int(row), index) for index in range(int(begin), int(begin) + int(width))]
    # The first block is at the bottom.
    assert sorted(painted) == sorted((1 - row, column) for row in (0, 1) for column in range(5) if norms[row][column])
    assert [tick.label for tick in drawn["positions"]] == ["0", "20", "40"]
    assert drawn["positions"][-1].position == pytest.approx(chart.FRAME.plot)


# --------------------------------------------------------------------------------------------------------------- files


@pytest.mark.slow
def test_a_page_is_private_and_replaces_an_earlier_one(analysis, tmp_path):
    page = tmp_path / "page.html"
    for one in (analysis, replace(analysis, seed=7)):
        check_output_file(page, MARK.encode(), "analysis")
        html = one.to_html()
        write(html, page)
        assert page.read_text(encoding="utf-8") == html
        assert list(tmp_path.iterdir()) == [page]
    assert MARK in page.read_text()[:500]
    if os.name == "posix":
        assert stat.S_IMODE(page.stat().st_mode) == 0o600


@pytest.mark.parametrize("content", ["", "my own page", f"<p>{'x' * 600}</p>{MARK}"])
def test_any_other_file_is_refused_and_not_changed(content, tmp_path):
    page = tmp_path / "mine.html"
    page.write_text(content)
    with pytest.raises(
        OptionError, match=r"mine\.html' already exists and is not an earlier analysis; choose another file"
    ):
        check_output_file(page, MARK.encode(), "analysis")
    assert page.read_text() == content


def test_unwritable_targets_are_refused_beforehand(tmp_path):
    with pytest.raises(OptionError, match="already exists and is not an earlier analysis"):
        check_output_file(tmp_path, MARK.encode(), "analysis")
    with pytest.raises(StorageError, match=r"The folder .*nowhere' does not exist; create it"):
        check_output_file(tmp_path / "nowhere" / "page.html", MARK.encode(), "analysis")
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"The folder .* does not exist"):
        check_output_file(tmp_path / "file" / "page.html", MARK.encode(), "analysis")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_failed_write_keeps_the_earlier_page(html, tmp_path, limit_files):
    page = tmp_path / "page.html"
    write(html, page)
    before = page.read_text()

    failed = pytest.raises(StorageError, match=r"could not be written to .*page\.html': File too large")
    with limit_files(100), failed:
        write(html + html, page)
    assert page.read_text() == before
    assert list(tmp_path.iterdir()) == [page]
