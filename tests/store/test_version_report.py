"""The page of a version: what it shows of an adaptation, and what it must not contain."""

import dataclasses
import json
import re

import pytest
from builders import make_sentences
from command import run
from pages import Page
from stored_adapter import save

from sebp_edge import AdapterStore
from sebp_edge.errors import Interrupted, OptionError
from sebp_edge.events import StepDone

SECRET = "xylophonquark"


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
def personalizer(make, recipe):
    return make(recipe=str(recipe))


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
    assert f"{' → '.join(result.words.saved)} base model → version 2" in page.text
    assert f"{result.words.words:,} words of test documents" in page.text
    assert result.explanation in page.text
    assert "version 1, active before" in page.text


@pytest.mark.slow
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
    for written in (report.to_html(), json.dumps(report.to_dict()), (result.adapter_path / "report.json").read_text()):
        assert SECRET not in written
        assert str(tmp_path) not in written
    assert not (result.adapter_path / "samples.json").exists()
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


@pytest.mark.slow
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


def test_versions_saved_before_say_what_is_not_known(store):
    save(store, "old")
    report = store.adapter("old").report()
    assert report.to_dict()["training"] is None
    text = Page(report.to_html()).text
    assert "are not known" in text
    assert "11.4 % better" in text and "went from 3.500 to 3.100 nats per token" in text


def test_the_command_writes_a_page_and_the_same_as_json(own_data_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = AdapterStore()
    save(store, "my notes")
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
