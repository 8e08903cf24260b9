"""The gate, as an app meets it: what is kept, what is compared with what, and who has seen which document."""

import random
import re
import shutil
from dataclasses import asdict
from pathlib import Path
from statistics import mean

import pytest
import torch
from builders import make_sentences
from command import run
from learnt import FEW, NEW, OLD, RECIPE, of_kind, roles
from peft import PeftModel
from quick import skip_assessment
from random_texts import edit
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from sebp_edge import AdapterStore, Personalizer
from sebp_edge.events import Notice, StepDone, TrainingStarted, silent

pytestmark = pytest.mark.usefixtures("unassessed")
WEAK = RECIPE.replace(learning_rate=5e-3)
NO_EFFECT = 1e-6
OTHERS = make_sentences(7, seed=1, words=60)
SAVED_BY_0_1_0 = Path(__file__).parent / "store" / "saved_by_0_1_0"


def with_role(role, *arguments) -> set[int]:
    return {number for number, found in enumerate(roles(*arguments)) if found == role}


def active_loss(store, version):
    """The loss of the version that was active before, as the gate got it."""
    return store.adapter("default").report(version).training.tested.active


def plain(model, adapter=None):
    """The model as transformers and PEFT load it."""
    loaded = AutoModelForCausalLM.from_pretrained(model)
    return (PeftModel.from_pretrained(loaded, adapter) if adapter else loaded).eval()


def token_losses(model, text, tokenizer) -> list[float]:
    """The loss of each token of a text, and of EOS, in nats."""
    ids = torch.tensor([*tokenizer(text)["input_ids"], tokenizer.eos_token_id])
    with torch.no_grad():
        return cross_entropy(model(ids[None]).logits[0, :-1], ids[1:], reduction="none").tolist()


def loss_on(model, texts, tokenizer) -> float:
    return mean(loss for text in texts for loss in token_losses(model, text, tokenizer))


def assert_uses(personalizer, adapter):
    """Asserts that the model generates with these weights, or with the base model's alone."""
    ids = torch.arange(7, 27)[None]
    with torch.no_grad():
        used = personalizer.in_use.load(silent).model(ids).logits
        assert torch.equal(used, plain(personalizer.reference.location, adapter)(ids).logits)


# ------------------------------------------------------------------------------------------------- the base model


@pytest.mark.slow
@pytest.mark.parametrize("texts", [OLD, FEW], ids=["split", "folds"])
def test_an_adapter_that_does_nothing_is_not_kept(make_quick, texts):
    personalizer = make_quick(recipe=RECIPE.replace(learning_rate=NO_EFFECT))
    result = personalizer.adapt(texts)
    assert (result.verdict, result.passed, result.active) == ("no gain", False, False)
    assert abs(result.gain) < 1e-3
    assert result.trained_on_all == (texts == FEW)
    assert "and the gate asks for 1.0 %" in result.summary
    assert result.summary.startswith("Not better: version 1 of 'default' is saved, but not active.")
    assert result.summary.endswith("Activate it anyway: store.adapter('default').activate(1)")
    store = personalizer.store
    assert (store.adapter("default").versions(), store.adapter("default").active()) == ([1], None)
    assert store.adapter("default").open(1).record.verdict == "no gain"
    assert_uses(personalizer, None)


@pytest.mark.slow
def test_a_gain_is_reported_as_transformers_and_peft_compute_it(make_quick, model, tokenizer):
    personalizer = make_quick(after=OLD)
    saved = personalizer.store.adapter("default").open()
    tested = [OLD[number] for number in with_role("test", personalizer.store)]
    assert len(tested) == 5
    assert loss_on(plain(model), tested, tokenizer) == pytest.approx(saved.record.heldout_loss_before, rel=1e-5)
    judged = plain(model, saved.path / "judged" / "1")
    assert loss_on(judged, tested, tokenizer) == pytest.approx(saved.record.heldout_loss_after, rel=1e-5)
    assert saved.record.heldout_loss_after < 0.9 * saved.record.heldout_loss_before


@pytest.mark.slow
def test_texts_without_any_order_are_not_judged(make_quick):
    keys = ["".join(random.Random(number).choices("0123456789abcdef", k=100)) for number in range(24)]
    personalizer = make_quick()
    result = personalizer.adapt(keys)
    assert (result.verdict, result.active, result.version) == ("not judged", False, 1)
    assert result.heldout_loss_before is result.heldout_loss_after is result.gain is result.gain_at_least is None
    assert "nothing to learn" in result.concerns[0]
    assert result.summary.startswith(
        f"Not judged: version 1 of 'default' is saved, but not active. {result.concerns[0]}"
    )
    events = [event for event in personalizer.events if isinstance(event, Notice | StepDone)]
    assert result.concerns[0] in events[0].message
    assert personalizer.store.adapter("default").open(1).record.heldout_loss_after is None


@pytest.mark.slow
def test_boilerplate_is_shown_apart_and_left_out_of_the_gain(make_quick, model, tokenizer):
    header = "the old map home\nwind from the west\n"
    notes = [header + text for text in make_sentences(24, words=30)]
    personalizer = make_quick()
    result = personalizer.adapt(notes)
    tested = [notes[number] for number in with_role("test", personalizer.store)]
    in_header = sum(
        start < len(header) for start, _ in tokenizer(header, return_offsets_mapping=True)["offset_mapping"]
    )
    in_header -= 1  # BOS
    for adapter, loss, in_boilerplate in (
        (None, result.heldout_loss_before, result.boilerplate.loss_before),
        (result.adapter_path / "judged" / "1", result.heldout_loss_after, result.boilerplate.loss_after),
    ):
        losses = [token_losses(plain(model, adapter), text, tokenizer) for text in tested]
        assert mean(loss for each in losses for loss in each[in_header:]) == pytest.approx(loss, rel=1e-5)
        assert mean(loss for each in losses for loss in each[:in_header]) == pytest.approx(in_boilerplate, rel=1e-5)
    assert result.boilerplate.share_of_tokens == pytest.approx(in_header * len(tested) / sum(map(len, losses)))
    assert result.gain == pytest.approx(1 - result.heldout_loss_after / result.heldout_loss_before)


# -------------------------------------------------------------------------------------------- the active version


@pytest.mark.slow
def test_a_weak_second_version_does_not_replace_the_first(make_quick):
    personalizer = make_quick(after=OLD, recipe=WEAK)
    first = personalizer.store.adapter("default").open().path
    personalizer.load_adapter("default")
    result = personalizer.adapt(OLD, fresh=True)
    assert (result.verdict, result.active, result.version, result.compared_with) == ("worse than active", False, 2, 1)
    assert result.gain_at_least > result.margin
    assert result.gain_over_active_at_least < result.gain_over_active < -result.tolerance
    assert re.search(r"on documents that neither was trained on, it is \d+\.\d % worse than version 1", result.summary)
    assert "Version 1 stays active." in result.summary
    assert personalizer.store.adapter("default").active() == 1
    assert personalizer.store.adapter("default").open(2).record.verdict == "worse than active"
    assert_uses(personalizer, first)


@pytest.mark.slow
def test_a_better_second_version_replaces_the_first(make_quick):
    personalizer = make_quick(after=OLD, recipe=RECIPE.replace(epochs=2))
    result = personalizer.adapt(OLD, fresh=True)
    assert (result.verdict, result.active, result.version, result.compared_with) == ("better", True, 2, 1)
    assert abs(result.gain_over_active) < result.tolerance
    assert -result.tolerance <= result.gain_over_active_at_least < result.gain_over_active
    assert personalizer.store.adapter("default").active() == 2
    assert_uses(personalizer, result.adapter_path)


@pytest.mark.slow
def test_a_version_on_other_texts_is_not_comparable(make_quick):
    personalizer = make_quick(after=OLD)
    personalizer.load_adapter("default")
    result = personalizer.adapt(OTHERS)
    assert (result.verdict, result.active, result.version, result.compared_with) == ("not comparable", False, 2, 1)
    assert result.not_comparable == "none of its 5 test documents are among these texts"
    assert result.gain_at_least > result.margin
    assert result.gain_over_active is result.gain_over_active_at_least is None
    assert result.not_comparable in result.summary
    store = personalizer.store
    assert store.adapter("default").active() == 1
    assert_uses(personalizer, store.adapter("default").open(1).path)
    result = personalizer.adapt(OTHERS, activate_anyway=True)
    assert (result.verdict, result.passed, result.active, result.version) == ("not comparable", False, True, 3)
    assert store.adapter("default").active() == 3
    assert_uses(personalizer, store.adapter("default").open(3).path)


def test_a_version_of_0_1_0_is_not_comparable(tmp_path):
    shutil.copytree(SAVED_BY_0_1_0, tmp_path / "old")
    personalizer = Personalizer(
        tmp_path / "old" / "model", recipe=RECIPE.replace(margin=1e-3), device="cpu", store=tmp_path / "old"
    )
    result = personalizer.adapt(OLD, name="letters")
    assert (result.verdict, result.active, result.version, result.compared_with) == ("not comparable", False, 3, 2)
    assert "before sebp-edge recorded which documents are for test" in result.summary
    assert personalizer.store.adapter("letters").active() == 2


@pytest.mark.slow
def test_few_notes_are_compared_by_the_state_that_has_not_seen_them(make_quick, model, tokenizer):
    """Every other one has been edited meanwhile."""
    personalizer = make_quick(after=FEW, seed=1)
    texts = [edit(text, 0.05, seed=number) if number % 2 else text for number, text in enumerate(FEW)]
    assert {text == before for text, before in zip(texts, FEW, strict=True)} == {True, False}
    result = personalizer.adapt(texts)
    store = personalizer.store
    folds = [int(role.removeprefix("fold ")) for role in roles(store)]
    assert sorted(map(folds.count, {*folds})) == [4, 4, 5]
    assert roles(store, 2) == roles(store)
    judged = store.adapter("default").open(1).path / "judged"
    assert sorted(path.name for path in judged.iterdir()) == ["1", "2", "3"]
    states = [plain(model, judged / str(fold)) for fold in (1, 2, 3)]
    by_state = [[sum(token_losses(state, text, tokenizer)) for text in texts] for state in states]
    expected = [by_state[fold - 1][number] for number, fold in enumerate(folds)]
    compared = active_loss(store, 2)
    assert (compared.documents, compared.loss * compared.tokens) == (13, pytest.approx(sum(expected), rel=1e-5))
    for wrong in by_state:
        assert sum(wrong) != pytest.approx(sum(expected), rel=1e-4)
    assert result.gain_over_active == pytest.approx(1 - result.heldout_loss_after / compared.loss, abs=1e-5)


# ---------------------------------------------------------------------------------------- the best version so far


@pytest.fixture(scope="module")
def lived(learnt, tmp_path_factory, model):
    """The store of OLD, in which a second, weak version was activated anyway."""
    folder = tmp_path_factory.mktemp("lived") / "store"
    shutil.copytree(learnt(OLD), folder)
    with pytest.MonkeyPatch.context() as patch:
        skip_assessment(patch)
        weak = Personalizer(model, recipe=WEAK, device="cpu", store=folder)
        assert weak.adapt(OLD, fresh=True, activate_anyway=True).verdict == "worse than active"
    return folder


# What happens to the best version, and why it is not compared with then.
FATES = {
    "it is there": (lambda adapter: None, None),
    "removed": (lambda adapter: adapter.remove(1), "it was removed"),
    "damaged": (
        lambda adapter: (adapter.version_folder(1) / "judged" / "1" / "adapter_model.safetensors").write_bytes(b"{"),
        "its files are damaged, or of another sebp-edge",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("fate", FATES)
def test_a_version_that_matches_the_active_one_has_to_match_the_best_if_that_can_be_compared(
    make_quick, lived, tmp_path, fate
):
    personalizer = make_quick(recipe=WEAK)
    shutil.copytree(lived, personalizer.store.folder.parent)
    adapter = personalizer.store.adapter("default")
    happens, reason = FATES[fate]
    happens(adapter)
    result = personalizer.adapt(OLD, fresh=True)
    # The same as version 2, which the gate had refused.
    assert (result.compared_with, result.gain_over_active, result.version) == (2, 0, 3)
    record = adapter.open(3).record
    if reason is None:
        assert (result.verdict, result.active, result.best_before, result.refused) == ("worse than best", False, 1, 2)
        assert result.gain_over_best < -result.tolerance
        assert "worse than version 1, the best so far," in result.summary
        assert "Version 2 stays active." in result.summary
        assert (record.is_best, record.refused, record.best_before) == (False, 2, 1)
        ratio = record.best_loss_after / record.best_loss_before
        assert 1 - ratio == pytest.approx(result.gain_over_best)
        anyway = personalizer.adapt(OLD, fresh=True, activate_anyway=True)
        assert (anyway.verdict, anyway.active, anyway.refused) == ("worse than best", True, 3)
        assert "stays active" not in anyway.summary
    else:
        assert (result.verdict, result.active, result.refused) == ("better", True, 1)
        # Nothing surely better is known, so that the active version was the best one.
        assert (result.best_before, result.gain_over_best, result.is_best) == (2, 0, True)
        assert f"It was not compared with version 1, the best so far: {reason}." in result.summary


@pytest.mark.slow
def test_the_list_of_adapters_names_the_best_version_if_another_one_is_active(lived):
    AdapterStore().folder.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(lived, AdapterStore().folder.parent, dirs_exist_ok=True)
    rows = [line.split("\t") for line in run("adapters", "list").stdout.splitlines()]
    assert [row[:3] for row in rows] == [["default", "1", "best so far"], ["default", "2", "active"]]


# ------------------------------------------------------------------------------------------------------ the splits


@pytest.mark.slow
def test_the_splits_of_the_first_version_stay(make_quick, model, tokenizer):
    personalizer = make_quick(after=OLD, seed=1)
    store = personalizer.store
    before = roles(store)
    assert [before.count(role) for role in ("train", "validation", "test")] == [21, 4, 5]
    tested = with_role("test", store)
    texts = [edit(text, 0.08, seed=n) if n in tested else text for n, text in enumerate(OLD)] + NEW
    assert all(texts[number] != OLD[number] for number in tested)
    result = personalizer.adapt(texts)
    after = roles(store, 2)
    assert after[:30] == before
    assert "test" in after[30:] or "validation" in after[30:]
    # New documents are unseen by both versions.
    assert result.compared_with == 1
    assert_compared_on(with_role("test", store, 2), texts, store, model, tokenizer)
    assert with_role("test", store, 2) >= tested


def assert_compared_on(numbers, texts, store, model, tokenizer):
    """Asserts that the gate compared version 2 with version 1 on these texts."""
    judged = plain(model, store.adapter("default").version_folder(1) / "judged" / "1")
    compared = active_loss(store, 2)
    assert compared.documents == len(numbers)
    expected = loss_on(judged, [texts[number] for number in sorted(numbers)], tokenizer)
    assert compared.loss == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_a_document_that_bridges_test_and_train_documents_is_trained_on(make_quick, model, tokenizer):
    personalizer = make_quick(after=OLD)
    store = personalizer.store
    tested, trained = with_role("test", store), with_role("train", store)
    touched = min(tested)
    texts = [*OLD, f"{OLD[touched]} {OLD[min(trained)]}"]
    personalizer.adapt(texts)
    after = roles(store, 2)
    assert (after[touched], after[min(trained)], after[30]) == ("train", "train", "train")
    # The fifth test document is one that the first version has been trained on, and is not compared.
    assert with_role("test", store, 2) > tested - {touched}
    assert_compared_on(tested - {touched}, texts, store, model, tokenizer)


@pytest.mark.slow
def test_an_edited_copy_of_each_note_is_on_its_side_and_is_no_other_note(make_quick):
    personalizer = make_quick()
    copies = [edit(text, 0.08, seed=number) for number, text in enumerate(FEW)]
    result = personalizer.adapt([*FEW, *copies])
    assert result.documents == 2 * len(FEW)
    of_each = roles(personalizer.store)
    assert of_each[: len(FEW)] == of_each[len(FEW) :]
    # The same as without copies: 13 clusters are folds, although these are 26 documents.
    assert {*of_each} == {"fold 1", "fold 2", "fold 3"}


@pytest.mark.slow
def test_with_fewer_than_six_documents_nothing_is_judged(make_quick):
    texts, personalizer = make_sentences(5, words=80), make_quick()
    result = personalizer.adapt(texts)
    assert (result.verdict, result.passed, result.active, result.version) == ("not judged", False, False, 1)
    assert result.heldout_loss_before is result.gain is None
    assert "Judging takes at least 6 documents" in result.summary
    assert (result.documents, result.trained_on_all, result.samples) == (5, True, ())
    (notice,) = of_kind(personalizer, Notice)
    assert "at least 6 documents that are not copies of each other" in notice.message
    assert "activate_anyway" in notice.message
    assert [event.phase for event in of_kind(personalizer, TrainingStarted)] == ["all documents"]
    assert personalizer.store.adapter("default").active() is None
    assert_uses(personalizer, None)
    result = personalizer.adapt(texts, activate_anyway=True)
    assert (result.verdict, result.active, result.version) == ("not judged", True, 2)
    assert_uses(personalizer, result.adapter_path)
    # A later version has nothing to be compared with.
    result = personalizer.adapt(FEW)
    assert (result.verdict, result.not_comparable) == ("not comparable", "it was not judged itself")


def test_the_command_says_how_to_activate_what_was_not_judged(model, recipe, tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text(make_sentences(1, words=400)[0])
    result = run("adapt", path, "--model", model, "--recipe", recipe)
    assert result.exit_code == 3, result.output
    assert "Activate it anyway: sebp-edge adapters activate default 1" in result.output
    assert AdapterStore().adapter("default").active() is None


@pytest.mark.slow
def test_one_seed_gives_the_same_weights_in_stores_with_other_salts(make_quick, learnt):
    first, second = AdapterStore(learnt(FEW)), make_quick().store
    make_quick().adapt(FEW)
    one, other = (store.adapter("default").open() for store in (first, second))
    assert asdict(one.record) | {"created": ""} == asdict(other.record) | {"created": ""}
    hashes = [{document.hash for document in store.adapter("default").documents(1)} for store in (first, second)]
    assert hashes[0].isdisjoint(hashes[1])
    assert roles(first) == roles(second)
    weights = [
        {str(path.relative_to(saved.path)): path.read_bytes() for path in saved.path.rglob("*.safetensors")}
        for saved in (one, other)
    ]
    assert weights[0] == weights[1]
    assert len(weights[0]) == 4


# ------------------------------------------------------------------------------------------------------- the refit


def assert_is_judged_state(result, store, model, tokenizer):
    assert not (result.adapter_path / "judged").exists()
    tested = [OLD[number] for number in with_role("test", store)]
    loss = loss_on(plain(model, result.adapter_path), tested, tokenizer)
    assert loss == pytest.approx(result.heldout_loss_after, rel=1e-5)


def damaging_the_refit(personalizer):
    """A sink that makes the training on all documents worse, as a learning rate that is too high may do."""

    def sink(event):
        if isinstance(event, StepDone) and event.phase == "all documents":
            for parameter in personalizer.in_use.base.model.parameters():
                parameter.data += 0.1 * parameter.requires_grad

    return sink


@pytest.mark.slow
def test_a_refit_that_is_worse_is_refused(make_quick, model, tokenizer):
    personalizer = make_quick()
    personalizer.on_event = damaging_the_refit(personalizer)
    result = personalizer.adapt(OLD)
    assert (result.verdict, result.active, result.trained_on_all) == ("better", True, False)
    assert result.refit_loss > result.heldout_loss_after
    assert_is_judged_state(result, personalizer.store, model, tokenizer)
    assert_uses(personalizer, result.adapter_path)
