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
from sebp_edge.research.analysis.analysis import Analysis, analyze, analyze_examples
from sebp_edge.research.analysis.gradient_sparsity import HeatMap
from sebp_edge.research.analysis.report import MARK

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


def test_every_figure_has_a_title_and_a_description_and_every_table_its_headings(html):
    page = Page(html)
    texts = {tag: [words for where, words in page.words if where == tag] for tag in ("title", "desc", "th")}
    for svg in page.all("svg"):
        assert svg["role"] == "img"
        for label in svg["aria-labelledby"].split():
            assert label in [attributes.get("id") for _, attributes in page.tags]
    assert len(texts["desc"]) == len(page.all("svg"))
    assert all(texts["desc"])
    assert all(texts["title"])
    assert all("scope" in heading for heading in page.all("th"))
    assert all(div["tabindex"] == "0" and div["aria-label"] for div in page.all("div") if div.get("class") == "scroll")


def test_it_adapts_to_the_window_and_the_systems_colours(html):
    assert 'name="viewport" content="width=device-width, initial-scale=1"' in html
    light, dark = (
        dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", part)) for part in html.split("@media (prefers-color-scheme: dark)")
    )
    assert light.keys() == dark.keys()
    assert {f"l{level}" for level in range(chart.LEVELS)} < light.keys()
    for colours in (light, dark):
        # WCAG 2.1 requires 4.5 for text and 3 for graphics; a heat map's levels must be monotonic.
        assert contrast(colours["page"], colours["text"]) > 7
        assert contrast(colours["page"], colours["quiet"]) > 4.5
        assert contrast(colours["page"], colours["bar"]) > 3
        assert contrast(colours["page"], colours["knee"]) > 3
        levels = [luminance(colours[f"l{level}"]) for level in range(chart.LEVELS)]
        assert levels == sorted(levels, reverse=colours is light)


def luminance(colour):
    """Relative luminance of "#rrggbb", as WCAG 2.1 defines it."""
    parts = [int(colour[index : index + 2], 16) / 255 for index in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one, other):
    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


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


def test_names_are_escaped():
    html = analysis_of(name='<b>"mine" & yours</b>').to_html()
    assert "<b>" not in html
    assert '<b>"mine" & yours</b>' in [words for _, words in Page(html).words]


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


@pytest.mark.parametrize("top", [1e-9, 0.3, 1.0, 9.99, 10.0, 12345.6])
def test_the_scale_ends_at_the_largest_norm(top):
    scale = chart.Scale.of([HeatMap("q_proj", (0,), 1, ((top, 0.0, top * 1e-30),))])
    assert (scale.level(top), scale.level(top * 1e-30), scale.level(0.0)) == (chart.LEVELS - 1, 0, None)
    levels = [scale.level(top * 10 ** (-index / 10)) for index in range(40)]
    assert levels == sorted(levels, reverse=True)
    assert set(levels) == set(range(chart.LEVELS))


def test_the_histogram_is_cut_at_the_knee():
    histogram = ((-1.0, 1), (-0.9, 0), (-0.8, 40), (-0.7, 9), (-0.6, 50))
    drawn = chart.histogram_figure(histogram, 10**-0.7)
    assert [bar["dropped"] for bar in drawn["bars"]] == [True, True, False, False]
    assert drawn["below"] == 0.41
    assert drawn["knee_x"] == pytest.approx(drawn["bars"][2]["x"])
    heights = [bar["height"] for bar in drawn["bars"]]
    assert 0 < heights[0] < heights[2] < heights[1] < heights[3] <= chart.FRAME.height


def test_powers_of_10_are_formatted():
    assert [chart.power_of_10(power) for power in (-12, 0, 2, -1.5)] == ["10⁻¹²", "10⁰", "10²", "10⁻¹·⁵"]


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
