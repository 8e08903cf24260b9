"""Starting over: which changes make an adaptation learn all documents again, and what is said then."""

import dataclasses
import json
import shutil

import pytest
from builders import make_llama
from learnt import NEW, NOTES, OLD, RECIPE, WEIGHTS, Stop, of_kind, roles
from safetensors.torch import load_file

from sebp_edge.events import ModelLoaded, NameInUse, Notice, TrainingStarted

pytestmark = pytest.mark.usefixtures("unassessed")


def stopped_by_the_first_event(personalizer, texts, **options):
    """Returns the NameInUse event of an adaptation whose sink raises an error then."""
    found = []

    def sink(event):
        if isinstance(event, NameInUse):
            found.append(event)
            raise Stop

    personalizer.on_event = sink
    before = personalizer.store.adapter("default").versions()
    with pytest.raises(Stop):
        personalizer.adapt(texts, **options)
    assert personalizer.store.adapter("default").versions() == before
    personalizer.on_event = personalizer.events.append
    return found


def test_another_seed_starts_over(make_quick):
    found = make_quick(after=OLD, seed=1).inspect(OLD)
    assert found.beginning == (
        "All documents are learnt again, since version 1 was trained with the seed 0, and this seed is 1."
    )
    assert found.beginning in found.summary


@pytest.mark.slow
def test_values_of_a_recipe_that_the_weights_depend_on_start_over(make_quick):
    make_quick(after=OLD)
    for changes, said in (
        ({"r": 8}, "r = 4, and this recipe has r = 8"),
        ({"lora_alpha": 7}, "lora_alpha = 32, and this recipe has lora_alpha = 7"),
        ({"chat_template": True}, "chat_template = false, and this recipe has chat_template = true"),
    ):
        begun = make_quick(recipe=dataclasses.replace(RECIPE, **changes)).inspect([*OLD, NEW[0]]).beginning
        assert begun.endswith(f"All documents are learnt again, since version 1 was trained with {said}.")
        assert begun.startswith(f"Version 1 of the adapter 'default' was trained with {said}. To keep the two apart, ")


def make_model(folder, tokenizer):
    make_llama(initializer_range=0.11).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_a_base_model_whose_files_have_changed_starts_over(make_quick, model, tokenizer, tmp_path):
    personalizer = make_quick(after=OLD, model=make_model(tmp_path / "others" / model.name, tokenizer))
    said = "was made for other files of the model large-weights, which have changed since"
    (event,) = stopped_by_the_first_event(personalizer, OLD)
    assert event.message.startswith(f"Version 1 of the adapter 'default' {said}. To")
    begun = personalizer.inspect(OLD).beginning
    assert begun == f"{event.message} All documents are learnt again, since version 1 {said}."


def test_another_base_model_is_said_by_its_name(make_quick, tokenizer, tmp_path):
    personalizer = make_quick(after=OLD, model=make_model(tmp_path / "second", tokenizer))
    (event,) = stopped_by_the_first_event(personalizer, OLD)
    said = "was made for the model large-weights, and this one is second"
    assert event.message.startswith(f"Version 1 of the adapter 'default' {said}. To keep the two apart, give ")
    assert "such as --name default-second (name='default-second')" in event.message
    assert "is activated only with --activate-anyway" in event.message
    assert (event.name, event.version, event.differs) == ("default", 1, ("model",))
    found = personalizer.inspect(OLD).beginning
    assert found == f"{event.message} All documents are learnt again, since version 1 {said}."


@pytest.mark.slow
def test_sync_makes_what_fresh_makes_of_the_remaining_documents(make_quick, tmp_path):
    syncing, found = make_quick("sync", after=OLD), {}
    syncing.adapt([*OLD, NEW[0]], activate_anyway=True)
    shutil.copytree(tmp_path / "sync", tmp_path / "fresh")
    for store, personalizer in {"sync": syncing, "fresh": make_quick("fresh", recipe=RECIPE)}.items():
        result = personalizer.adapt(OLD[3:], activate_anyway=True, **{store: True})
        assert (result.version, result.learnt_on_from) == (3, None)
        found[store] = load_file(result.adapter_path / WEIGHTS)
        listed = json.loads((result.adapter_path / "documents.json").read_text())["documents"]
        assert sum(document["split"] is not None for document in listed) == 27
        assert len(listed) == (27 if store == "sync" else 31)
    assert all(tensor.equal(found["fresh"][name]) for name, tensor in found["sync"].items())


@pytest.mark.slow
def test_fresh_learns_all_again(make_quick):
    personalizer = make_quick(after=OLD, recipe=RECIPE)
    again = personalizer.adapt(OLD, fresh=True)
    assert (again.version, again.learnt_on_from) == (2, None)
    assert of_kind(personalizer, Notice) == []
    first = personalizer.store.adapter("default").open(1).path
    before, after = (load_file(path / WEIGHTS) for path in (first, again.adapter_path))
    assert all(tensor.equal(after[name]) for name, tensor in before.items())


def damage(version):
    (version / "judged" / "1" / WEIGHTS).write_bytes(b"no weights")


def forget_the_texts(version):
    (version / "known_texts.json").unlink()


def lose_the_judged_state(version):
    for file in (version / "judged" / "1").iterdir():
        file.unlink()
    (version / "judged" / "1").rmdir()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "why"),
    [
        (damage, "has damaged files"),
        (forget_the_texts, "does not say which texts it has learnt"),
        (lose_the_judged_state, "has lost its judged state"),
    ],
)
def test_it_starts_over_and_says_why(make_quick, change, why):
    """Its training is stopped when it begins."""
    personalizer, found = make_quick(after=OLD), []
    change(personalizer.store.adapter("default").open(1).path)

    def sink(event):
        found.append(event)
        if isinstance(event, TrainingStarted):
            raise Stop

    personalizer.on_event = sink
    with pytest.raises(Stop):
        personalizer.adapt([*OLD, NEW[0]])
    (said,) = (event.message for event in found if isinstance(event, Notice))
    assert said == f"All documents are learnt again, since version 1 {why}."
    assert found[-1].train_documents > 20


def test_full_fine_tuning_starts_over(make_quick):
    personalizer = make_quick(recipe=RECIPE.replace(method="full", learning_rate=1e-3, epochs=1))
    personalizer.adapt(OLD, activate_anyway=True)
    begun = personalizer.inspect([*OLD, NEW[0]]).beginning
    assert "All documents are learnt again, since version 1 trained all weights, and keeps no judged state" in begun


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ('"merge_for": "q4_0"', "was trained for a quantisation, and adapters are not any more"),
        ('"load_in_fp8": true', "was trained on weights in FP8, and adapters are not any more"),
    ],
)
def test_a_version_of_an_earlier_sebp_edge_starts_over(make_quick, value, why):
    personalizer = make_quick(after=OLD)
    record = personalizer.store.adapter("default").open().path / "sebp_edge.json"
    record.write_text(record.read_text().replace('"recipe": {', f'"recipe": {{{value},'))
    begun = personalizer.inspect([*OLD, NEW[0]]).beginning
    assert f"All documents are learnt again, since version 1 {why}" in begun


def test_it_starts_over_if_a_document_that_it_was_trained_on_is_needed_for_tests(make_quick):
    """Most test documents are gone, so that others take their places."""
    personalizer = make_quick(after=OLD)
    remaining = [text for text, role in zip(OLD, roles(personalizer.store), strict=True) if role == "train"]
    begun = personalizer.inspect([*remaining, NEW[0]]).beginning
    assert "version 1 was trained on documents that are needed for tests now" in begun


def test_outside_the_store_nothing_is_learnt_on_from(make_quick, tmp_path):
    personalizer = make_quick(after=OLD)
    result = personalizer.adapt(OLD, out=tmp_path / "out")
    assert not result.unchanged and result.learnt_on_from is None
    assert not (tmp_path / "out" / "known_texts.json").exists()


@pytest.mark.slow
def test_more_documents_than_folds_are_for_are_all_learnt_again_and_that_is_said_before_the_model_is_loaded(make_quick):
    make_quick().adapt(NOTES[:19], activate_anyway=True)
    personalizer = make_quick()
    later = personalizer.inspect(NOTES[:22])
    said = "All documents are learnt again, since version 1 was trained on documents that are needed for tests now"
    assert later.beginning.startswith(said)
    personalizer.adapt(NOTES[:22], activate_anyway=True)
    events = personalizer.events
    (notice,) = (n for n, event in enumerate(events) if isinstance(event, Notice) and event.message.startswith(said))
    (loaded,) = (n for n, event in enumerate(events) if isinstance(event, ModelLoaded))
    assert notice < loaded
    assert personalizer.adapt(NOTES[:24], activate_anyway=True).learnt_on_from == 2
