"""The page of a version: what it shows, what it must not contain, and versions that lack data."""

import dataclasses
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import get_args

import pytest
from builders import make_sentences
from command import RECIPE, run
from stored_adapter import RECORD, FakeAdaptation

from sebp_edge import AdapterRecord, AdapterStore, Recipe
from sebp_edge.basics.pages import chart
from sebp_edge.errors import AdapterError, Interrupted, OptionError
from sebp_edge.events import StepDone
from sebp_edge.store.training_report import REPORT, SAMPLES, KeptSamples, TrainingReport
from sebp_edge.store.version_report import VersionReport
from sebp_edge.values import training_facts
from sebp_edge.values.training_facts import Curve
from sebp_edge.values.word_figures import WordFigures

SECRET = "xylophonquark"


class Page(HTMLParser):
    """The words of a page, its tags with their attributes, and what it would load."""

    def __init__(self, html):
        super().__init__()
        self.words, self.tags, self.open = [], [], []
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self):
        return re.sub(r"\s+", " ", " ".join(self.words))


@pytest.fixture
def secret_notes(tmp_path):
    """Notes with a word in their texts, names and folder that no page may contain, one of them twice."""
    folder = tmp_path / f"{SECRET}-folder"
    folder.mkdir()
    texts = make_sentences(24)
    for number, text in enumerate([*texts, texts[0]]):
        (folder / f"{SECRET}-{number}.md").write_text(f"The {SECRET} {text} {SECRET}", encoding="utf-8")
    (folder / f"{SECRET}.png").write_bytes(b"\0")
    return folder


@pytest.fixture
def personalizer(make, tmp_path):
    path = tmp_path / "quick.toml"
    path.write_text(RECIPE)
    return make(recipe=str(path))


@pytest.fixture
def store(tmp_path):
    return AdapterStore(tmp_path / "own")


@pytest.mark.slow
def test_the_page_has_the_figures_of_the_result(personalizer, notes_folder, after_learning):
    after_learning(personalizer.store)
    result = personalizer.adapt(notes_folder, activate_anyway=True, fresh=True)
    report = personalizer.store.adapter("default").report(2)
    values, page = report.to_dict(), Page(report.to_html())
    assert values["name"] == "default"
    assert values["version"] == 2
    training = values["training"]
    assert training["tested"]["base"]["loss"] == result.heldout_loss_before
    assert training["tested"]["adapted"]["loss"] == result.heldout_loss_after
    assert training["tested"]["gains"]["over_base_at_least"] == result.gain_at_least
    assert training["tested"]["gains"]["over_active"] == result.gain_over_active
    assert training["tested"]["active"]["documents"] > 1
    assert training["texts"]["documents"] == result.documents == sum(training["texts"]["splits"].values())
    assert 1 - training["rows"]["tokens"] / training["rows"]["padded"] == pytest.approx(result.padding_share)
    assert training["cost"]["predicted"] == result.predicted_peak_bytes
    assert training["expectation"] == result.expectation
    for loss in (result.heldout_loss_before, result.heldout_loss_after, result.general_loss_after):
        assert f"{loss:.3f}" in page.text
    assert values["record"]["words"] == dataclasses.asdict(result.words)
    assert values["record"]["facts"] == dataclasses.asdict(result.facts)
    assert f"What the model could before: language {result.language}; facts {result.facts}." in page.text
    assert f"{' → '.join(result.words.saved)} at least, base model → version 2" in page.text
    assert f"{result.words.words:,} words of test documents" in page.text
    assert result.explanation in page.text
    assert "version 1, active before" in page.text


def test_words_that_were_not_counted_are_not_known():
    record = AdapterRecord(**RECORD)
    words = WordFigures(123_456, 3_827, 5_679, 0.01, 0.02, 23_456, 6_333, 6_802, None, None)
    for known, shown in (
        (None, ["Keystrokes saved – not known"]),
        (
            words,
            [
                "Keystrokes saved 3.1 % → 4.6 % at least, base model → version 1, if it completes words while you type"
                "; with 95 % confidence, between 1.0 % and 2.0 % more, of all keystrokes",
                "Next words guessed, of 100 27 → 29 23,456 words of test documents",
            ],
        ),
    ):
        report = VersionReport("mine", 1, True, dataclasses.replace(record, words=known), None, None)
        text = Page(report.to_html()).text
        assert all(each in text for each in shown), text
        assert ("Keystrokes saved" in text) and ("Next words" in text) == (known is not None)


def test_each_loss_is_within_its_interval(store_of_notes):
    tested = store_of_notes.adapter("default").report(1).training.tested
    for loss in (tested.base, tested.adapted):
        assert loss.lowest < loss.loss < loss.highest


def test_the_curves_are_those_of_the_events(make, personalizer, notes_folder):
    events = []
    personalizer.on_event = events.append
    personalizer.adapt(notes_folder)
    report = personalizer.store.adapter("default").report(1).training
    for curve in report.curves:
        steps = [event for event in events if isinstance(event, StepDone) and event.phase == curve.phase]
        assert curve.losses == tuple(round(event.loss, 4) for event in steps)
        assert curve.steps == tuple(event.step for event in steps)
    assert report.curves[0].phase == "train"
    assert len(report.curves[0].validation) > 1


@pytest.mark.slow
def test_a_page_and_its_data_contain_no_text_and_no_name(personalizer, secret_notes, tmp_path):
    result = personalizer.adapt(secret_notes, activate_anyway=True)
    assert any(SECRET in item.reason for item in result.left_out)
    report = personalizer.store.adapter("default").report(with_samples=True)
    for written in (report.to_html(), json.dumps(report.to_dict()), (result.adapter_path / REPORT).read_text()):
        assert SECRET not in written
        assert str(tmp_path) not in written
    assert not (result.adapter_path / SAMPLES).exists()
    assert report.training.texts.left_out == {"the same as another one": 1, "a picture (.png); only texts are read": 1}
    assert "--keep-samples" in report.to_html()


@pytest.mark.slow
def test_samples_are_kept_and_shown_and_archived_only_if_asked_for(personalizer, secret_notes, tmp_path):
    result = personalizer.adapt(secret_notes, activate_anyway=True, keep_samples=True)
    assert SECRET not in personalizer.store.adapter("default").report().to_html()
    report = personalizer.store.adapter("default").report(with_samples=True)
    page = Page(report.to_html())
    assert [sample.beginning for sample in report.samples.samples] == [sample.beginning for sample in result.samples]
    for sample in result.samples:
        assert re.sub(r"\s+", " ", sample.beginning.strip()) in page.text
        assert sample.document in page.text
    for item in result.left_out:
        assert item.reason in page.text
    assert "keep it as private as they are" in page.text
    personalizer.store.adapter("default").export_archive(tmp_path / "archive")
    assert SECRET.encode() not in (tmp_path / "archive").read_bytes()
    personalizer.store.adapter("default").export_archive(tmp_path / "whole", with_names=True)
    assert SECRET.encode() in (tmp_path / "whole").read_bytes()


@pytest.mark.slow
def test_a_page_loads_nothing_and_has_no_script(store_of_notes):
    html = store_of_notes.adapter("default").report(1).to_html()
    page = Page(html)
    assert not page.open
    assert {"script", "link", "img", "iframe"}.isdisjoint(tag for tag, _ in page.tags)
    for _, attributes in page.tags:
        assert {"src", "href", "onload", "onclick"}.isdisjoint(attributes)
    assert "url(" not in html
    assert "default-src 'none'" in html
    assert "prefers-color-scheme: dark" in html
    assert "@media print" in html


@pytest.mark.slow
def test_a_page_can_be_read_without_seeing_it(store_of_notes):
    page = Page(store_of_notes.adapter("default").report(1).to_html())
    for tag, attributes in page.tags:
        if tag == "svg":
            assert attributes["role"] == "img"
            assert "aria-label" in attributes or "aria-labelledby" in attributes
        if tag == "th":
            assert "scope" in attributes
        if attributes.get("class") == "scroll":
            assert attributes["tabindex"] == "0"
            assert attributes["aria-label"]
    identifiers = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(identifiers) == len(set(identifiers))


def test_an_interrupted_version_has_a_page(make, personalizer, notes_folder):
    def stop(event):
        if isinstance(event, StepDone) and event.step == 3:
            personalizer.stop()

    personalizer = make(recipe=personalizer.recipe.replace(epochs=2), on_event=stop)
    with pytest.raises(Interrupted):
        personalizer.adapt(notes_folder, keep_samples=True)
    report = personalizer.store.adapter("default").report(1, with_samples=True)
    assert report.training.tested is None
    assert report.training.copies is None
    text = Page(report.to_html()).text
    assert "The training was interrupted." in text
    assert "There are no samples" in text


@pytest.mark.slow
def test_a_version_that_learnt_on_says_from_which_and_what(personalizer, notes_folder, after_learning):
    after_learning(personalizer.store)
    (notes_folder / "new.md").write_text("The lighthouse keeper has not been seen since the storm in early spring.")
    (notes_folder / "note-00.md").unlink()
    result = personalizer.adapt(notes_folder, activate_anyway=True)
    report = personalizer.store.adapter("default").report(2)
    learnt = report.training.learnt_on
    assert (learnt.version, learnt.new, learnt.changed, learnt.gone) == (1, result.new, result.changed, result.gone)
    assert (learnt.new, learnt.gone, learnt.replayed > 0) == (1, 1, True)
    page = Page(report.to_html()).text
    assert "It learnt on top of version 1: 1 new document and 0 changed ones, and " in page
    assert "It still knows 1 document from before that is gone." in page
    assert "on top of version" not in Page(personalizer.store.adapter("default").report(1).to_html()).text
    assert personalizer.store.adapter("default").report(1).training.learnt_on is None


def test_a_page_has_no_row_for_what_was_not_predicted_and_no_boilerplate_below_a_percent(store):
    gains = training_facts.Gains(0.1, 0.05, None, None, 0.01, 0.02, "")
    loss = training_facts.TestLoss(3.0, 2.9, 3.1, 5, 90)
    tested = training_facts.Tested(loss, None, loss, gains, 3.2, 4.0, None, 0.004)
    text = Page(report_of(store, minimal_report() | {"tested": dataclasses.asdict(tested)}).to_html()).text
    assert "predicted" not in text and "On lines that stand in many documents" not in text
    tested = dataclasses.asdict(dataclasses.replace(tested, boilerplate_share=0.02))
    cost = minimal_report()["cost"] | {"budget": 3 * 10**9, "predicted": 10**9}
    text = Page(report_of(store, minimal_report() | {"tested": tested, "cost": cost}).to_html()).text
    assert "predicted peak 1.0 GB" in text and "On lines that stand in many documents, 2.0 % of the tokens" in text


def test_a_report_without_what_was_added_later_is_read(store):
    values = minimal_report()
    del values["learnt_on"]
    assert report_of(store, values).training.learnt_on is None
    del values["rows"]
    with pytest.raises(AdapterError, match="cannot be read"):
        report_of(store, values)


def test_versions_saved_before_say_what_is_not_known(store):
    store.adapter("old").save(FakeAdaptation(), AdapterRecord(**RECORD), activate=True)
    report = store.adapter("old").report()
    assert report.to_dict()["training"] is None
    text = Page(report.to_html()).text
    assert "are not known" in text
    assert "11.4 % better" in text and "went from 3.500 to 3.100 nats per token" in text


def test_adapters_of_0_1_0_have_a_page(store, tmp_path):
    saved = Path(__file__).parent / "saved_by_0_1_0" / "adapters" / "letters" / "1"
    assert "are not known" in Page(store.find(saved).report().to_html()).text


@pytest.mark.slow
def test_an_imported_version_has_the_same_page(personalizer, notes_folder, store, tmp_path):
    personalizer.adapt(notes_folder, keep_samples=True)
    personalizer.store.adapter("default").export_archive(tmp_path / "archive", 1, with_names=True)
    store.import_archive(tmp_path / "archive")
    there, here = (each.adapter("default").report(1, with_samples=True) for each in (personalizer.store, store))
    assert dataclasses.replace(here, active=there.active) == there


def minimal_report() -> dict:
    report = TrainingReport(
        tested=None,
        curves=(Curve("train", 1, (1, 2), (3.0, 2.5), (0, 2), (3.1, 2.6)),),
        texts=training_facts.Texts(3, 3, 90, {"train": 3}, {"empty": 1}),
        rows=training_facts.RowCounts(64, 192, 90, 87, 87, False),
        cost=training_facts.Cost("cpu", None, None, 10**9, None, 3.0, 2.0, 45.0),
        copies=(training_facts.CopiedRun(40, 3),),
        expectation="",
        concerns=(),
    )
    return dataclasses.asdict(report)


def report_of(store, values) -> VersionReport:
    saved = store.adapter("mine").save(FakeAdaptation(), AdapterRecord(**RECORD), activate=True)
    (saved.path / REPORT).write_text(json.dumps(values))
    return store.adapter("mine").report()


@pytest.mark.parametrize(
    "change",
    [
        {"curves": [{"phase": "train"}]},
        {"curves": "no"},
        {"texts": None},
        {"cost": {"device": 3}},
        {"copies": [{"run": -1, "base_run": 0}]},
        {"expectation": 7},
        {"tested": 1},
    ],
)
def test_a_damaged_report_is_refused_in_one_sentence(change, store):
    with pytest.raises(AdapterError, match="cannot be read; restore the file, or delete it"):
        report_of(store, minimal_report() | change)


def test_a_report_of_a_newer_sebp_edge_is_refused(store):
    with pytest.raises(AdapterError, match=r"newer sebp-edge.*Upgrade"):
        report_of(store, {"format": 2})


def test_whatever_a_report_says_is_escaped(store):
    values = minimal_report() | {"expectation": "<script>alert(1)</script>", "concerns": ["<img src=x>"]}
    values["texts"]["left_out"] = {"<b>": 1}
    values["curves"][0]["phase"] = '"><script>'
    page = Page(report_of(store, values).to_html())
    assert {"script", "img", "b"}.isdisjoint(tag for tag, _ in page.tags)
    assert "<script>alert(1)</script>" in page.text


@pytest.mark.parametrize(
    "curve",
    [
        Curve("train", 0, (), (), (), ()),
        Curve("train", 1, (1,), (2.0,), (), ()),
        Curve("train", 1, (1, 2), (2.0, 2.0), (0,), (2.0,)),
        Curve("train", 1, (5,), (1e29,), (0,), (0.0,)),
        Curve("train", 1, (1, 2), (2.0,), (), ()),
    ],
)
def test_any_curve_can_be_drawn(curve):
    drawn = chart.curve_figure(curve)
    if drawn is not None:
        assert "nan" not in drawn["line"]
        assert all(0 <= tick.position <= chart.CURVES.height for tick in drawn["losses"])
        assert len(drawn["losses"]) >= 2


def test_the_command_writes_a_page_and_the_same_as_json(own_data_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = AdapterStore()
    store.adapter("my notes").save(FakeAdaptation(), AdapterRecord(**RECORD), activate=True)
    result = run("adapters", "report", "my notes")
    assert result.exit_code == 0, result.output
    page = tmp_path / "my%20notes-1.html"
    assert page.read_text(encoding="utf-8") == store.adapter("my notes").report().to_html()
    assert run("adapters", "report", "my notes").exit_code == 0
    values = json.loads(run("adapters", "report", "my notes", "--json").stdout)
    # The line is a message, too.
    assert store.adapter("my notes").report().to_dict().items() <= (values | {"html": None}).items()
    page.write_text("mine")
    result = run("adapters", "report", "my notes")
    assert result.exit_code == OptionError.exit_code
    assert page.read_text() == "mine"


def test_the_page_about_adapters_documents_every_key_of_the_json():
    page = (Path(__file__).parents[2] / "sebp_edge" / "guide" / "versions.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(\w+)`", page))

    def check(kind):
        for field in dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ():
            assert field.name in named, (kind, field.name)
            check(field.type)
        for part in get_args(kind):
            check(part)

    check(TrainingReport)
    check(KeptSamples)
    assert {field.name for field in dataclasses.fields(VersionReport)} <= named | {"with_samples"}


def test_recipes_of_any_values_are_shown(store):
    recipe = dataclasses.asdict(Recipe.load("notes")) | {"name": "<i>mine</i>"}
    store.adapter("mine").save(FakeAdaptation(), AdapterRecord(**RECORD | {"recipe": recipe}), activate=True)
    assert "<i>mine</i>" in Page(store.adapter("mine").report().to_html()).text
