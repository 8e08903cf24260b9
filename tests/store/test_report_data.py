"""Reports that were made otherwise: of figures that lack, of earlier and newer versions, damaged, and hostile."""

import dataclasses
import json
import re
from pathlib import Path
from typing import get_args

import pytest
from pages import Page
from stored_adapter import RECORD, save

from sebp_edge import AdapterRecord
from sebp_edge.errors import AdapterError
from sebp_edge.store.training_report import REPORT, KeptSamples, TrainingReport
from sebp_edge.store.version_report import VersionReport
from sebp_edge.values import training_facts
from sebp_edge.values.probe_figures import ProbeFigures
from sebp_edge.values.training_facts import Curve
from sebp_edge.values.word_figures import WordFigures


def test_words_that_were_not_counted_are_not_known():
    record = AdapterRecord(**RECORD)
    words = WordFigures(123_456, 3_827, 5_679, 0.01, 0.02, 23_456, 6_333, 6_802, None, None)
    as_typed = "Keystrokes saved 3.1 % → 4.6 % base model → version 1, if it completes words while you type"
    for known, shown in (
        (None, ["Keystrokes saved – not known"]),
        (dataclasses.replace(words, is_typed=True), [as_typed]),
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
    saved = save(store)
    (saved.path / REPORT).write_text(json.dumps(values))
    return store.adapter("mine").report()


def test_a_report_without_what_was_added_later_is_read(store):
    values = minimal_report()
    del values["learnt_on"]
    assert report_of(store, values).training.learnt_on is None
    del values["rows"]
    with pytest.raises(AdapterError, match="cannot be read"):
        report_of(store, values)


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


def test_the_readme_names_the_base_model_and_the_losses(store):
    def readme(**values):
        return (save(store, **values).path / "README.md").read_text()

    text = readme()
    assert text.startswith("---\nbase_model: sebp-edge/tiny\nlibrary_name: peft\n---\n# A LoRA adapter for")
    assert "\nTest loss in nats per token: 3.500 before, 3.100 after.\n" in text
    text = readme(trained_on_all=True, general_loss_before=4.0, general_loss_after=4.125)
    assert (
        "3.100 after, in the judged state; then it was trained on all documents, which was not judged by itself" in text
    )
    assert "Loss on general text in nats per token: 4.000 before, 4.125 after.\n" in text
    assert "could before" not in text
    language = ProbeFigures(40, 39, 38, 2)
    assert "What the model could before: language 38 of 40, 39 before.\n" in readme(language=language)
    record = store.adapter("mine").open().record
    assert record.language == language and record.facts is None
    text = readme(recipe={"name": "full", "method": "full"}, heldout_loss_after=None)
    assert "library_name: transformers" in text
    assert "loss" not in text
