"""Learning on: what `adapt` does with a name that exists, what it trains on, and what it starts over for."""

import dataclasses
import json
import shutil
import subprocess
import sys
from dataclasses import fields

import pytest
from builders import make_llama, make_sentences
from command import records, run
from failing_memory import RECIPE as SMALL
from random_texts import edit
from safetensors.torch import load_file

from sebp_edge import AdapterStore, Personalizer, Recipe
from sebp_edge.engine.training.run import TrainingRun
from sebp_edge.errors import Interrupted
from sebp_edge.events import (
    Evaluated,
    JobProgress,
    JobStarted,
    LearningOn,
    ModelLoaded,
    NameInUse,
    Notice,
    PreparationProgress,
    TrainingStarted,
)
from sebp_edge.lessons.split_history import take_fingerprints
from sebp_edge.reading import readers
from sebp_edge.store.history import read_history
from sebp_edge.store.known_texts import KNOWN_TEXTS

pytestmark = pytest.mark.usefixtures("unassessed")
RECIPE = SMALL.replace(learning_rate=2e-2, epochs=1, batch_tokens=200)
NOTES = make_sentences(40)
OLD, NEW = NOTES[:30], NOTES[30:]
FEW = NOTES[:13]
WEIGHTS = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def store_of_old(tmp_path_factory, model):
    """A store that has learnt OLD."""
    store = tmp_path_factory.mktemp("stores") / "store"
    Personalizer(model, recipe=RECIPE, device="cpu", store=store).adapt(OLD)
    return store


@pytest.fixture
def make(model, tmp_path, request):
    """A function that makes a Personalizer whose events are in `events`; after=True: whose store has learnt OLD."""

    def personalizer(store="store", *, after=False, model=model, **options):
        events = []
        if after:
            shutil.copytree(request.getfixturevalue("store_of_old"), tmp_path / store)
        options = {"recipe": RECIPE, "device": "cpu", "on_event": events.append} | options
        made = Personalizer(model, store=tmp_path / store, **options)
        made.events = events
        return made

    return personalizer


def of_kind(personalizer, kind):
    return [event for event in personalizer.events if isinstance(event, kind)]


class Stop(Exception):
    """An app does not go on."""


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


@pytest.fixture
def trained(monkeypatch):
    """The documents that each training has trained on, by phase, as numbers of the given texts."""
    found, prepare = {}, TrainingRun._prepare_trainer

    def prepare_trainer(self, learner, number):
        trainer = prepare(self, learner, number)
        steps = [step for epoch in self.task.schedules[number].epochs for step in epoch]
        found[trainer.phase] = {example.document for step in steps for example in step.examples}
        return trainer

    monkeypatch.setattr(TrainingRun, "_prepare_trainer", prepare_trainer)
    return found


def role_of(saved_path, texts):
    history = read_history(saved_path)
    roles = {document.key: document.role for document in history.documents if not document.absent}
    fingerprints = take_fingerprints(dict(enumerate(texts)), history.salt)
    return {number: roles[fingerprint.key] for number, fingerprint in fingerprints.items()}


# ------------------------------------------------------------------------------------------------------ nothing is new


@pytest.mark.slow
def test_nothing_is_trained_or_saved_if_nothing_is_new(make):
    personalizer = make(after=True)
    path = personalizer.store.adapter("default").open(1).path
    again = personalizer.adapt([*reversed(OLD)])
    assert again.unchanged
    assert (again.version, again.adapter_path, again.active, again.passed) == (1, path, True, True)
    assert (again.documents, again.gone) == (30, 0)
    assert again.to_dict()["event"] == "result" and json.dumps(again.to_dict())
    assert personalizer.store.adapter("default").versions() == [1]
    assert all(isinstance(event, JobStarted | PreparationProgress | JobProgress) for event in personalizer.events)


def test_documents_that_are_gone_are_reported_and_still_known(make):
    personalizer = make(after=True)
    result = personalizer.adapt(OLD[2:])
    assert result.unchanged and result.gone == 2
    assert "knows 2 documents that are not among these texts; --sync" in result.summary
    assert personalizer.adapt(OLD).gone == 0


def test_another_seed_starts_over(make):
    found = make(after=True, seed=1).inspect(OLD)
    assert found.beginning == (
        "All documents are learnt again, since version 1 was trained with the seed 0, and this seed is 1."
    )
    assert found.beginning in found.summary


@pytest.mark.slow
def test_values_of_a_recipe_that_the_weights_depend_on_start_over(make):
    make(after=True)
    for changes, said in (
        ({"r": 8}, "r = 4, and this recipe has r = 8"),
        ({"lora_alpha": 7}, "lora_alpha = 32, and this recipe has lora_alpha = 7"),
        ({"chat_template": True}, "chat_template = false, and this recipe has chat_template = true"),
    ):
        begun = make(recipe=dataclasses.replace(RECIPE, **changes)).inspect([*OLD, NEW[0]]).beginning
        assert begun.endswith(f"All documents are learnt again, since version 1 was trained with {said}.")
        assert begun.startswith(f"Version 1 of the adapter 'default' was trained with {said}. To keep the two apart, ")


@pytest.mark.slow
def test_all_other_values_of_a_recipe_learn_on(make):
    changes = {
        **{"learning_rate": 1e-2, "warmup_ratio": 0.2, "epochs": 2, "patience": 2, "batch_tokens": 100},
        **{"batch_rows": 400, "min_steps": 2, "weight_decay": 0.1, "max_grad_norm": 2.0, "context_length": 40},
        **{"margin": 0.02, "refit": False, "general": 0.5, "learning_on_share": 0.3},
    }
    of_the_weights = {
        "method",
        "load_in_4bit",
        "load_in_fp8",
        "r",
        "lora_alpha",
        "chat_template",
        "questions",
    }
    assert changes.keys() | of_the_weights | {"name", "description"} == {each.name for each in fields(Recipe)}
    other = make(after=True, recipe=RECIPE.replace(**changes))
    result = other.adapt([*OLD, NEW[0]], activate_anyway=True)
    assert (result.learnt_on_from, result.new) == (1, 1)
    assert of_kind(other, NameInUse) == of_kind(other, Notice) == []
    assert other.store.adapter("default").open().record.recipe["epochs"] == 2


def test_other_epochs_are_said_if_nothing_is_new(make):
    result = make(after=True, recipe=RECIPE.replace(epochs=7, patience=2)).adapt(OLD)
    assert result.unchanged
    assert result.changes == (("epochs = 1", "epochs = 7"), ("patience = 1", "patience = 2"))
    assert result.summary.endswith(
        "It was trained with epochs = 1 and patience = 1, and this recipe has epochs = 7 and patience = 2; --fresh "
        "(fresh=True) learns all documents again with that."
    )


def test_a_recipe_of_another_name_and_margin_learns_the_same(make):
    assert make(after=True, recipe=dataclasses.replace(RECIPE, name="other", margin=0.005)).adapt(OLD).unchanged


def make_model(folder, tokenizer):
    make_llama(initializer_range=0.11).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_a_base_model_whose_files_have_changed_starts_over(make, model, tokenizer, tmp_path):
    personalizer = make(after=True, model=make_model(tmp_path / "others" / model.name, tokenizer))
    said = "was made for other files of the model large-weights, which have changed since"
    (event,) = stopped_by_the_first_event(personalizer, OLD)
    assert event.message.startswith(f"Version 1 of the adapter 'default' {said}. To")
    begun = personalizer.inspect(OLD).beginning
    assert begun == f"{event.message} All documents are learnt again, since version 1 {said}."


def test_another_base_model_is_said_by_its_name(make, tokenizer, tmp_path):
    personalizer = make(after=True, model=make_model(tmp_path / "second", tokenizer))
    (event,) = stopped_by_the_first_event(personalizer, OLD)
    said = "was made for the model large-weights, and this one is second"
    assert event.message.startswith(f"Version 1 of the adapter 'default' {said}. To keep the two apart, give ")
    assert "such as --name default-second (name='default-second')" in event.message
    assert "is activated only with --activate-anyway" in event.message
    assert (event.name, event.version, event.differs) == ("default", 1, ("model",))
    found = personalizer.inspect(OLD).beginning
    assert found == f"{event.message} All documents are learnt again, since version 1 {said}."


def test_the_same_base_model_elsewhere_and_under_another_name_is_the_same(make, model, tmp_path):
    for name in (model.name, "renamed"):
        moved = tmp_path / "moved" / name
        moved.mkdir(parents=True)
        for file in model.iterdir():
            (moved / file.name).write_bytes(file.read_bytes())
        personalizer = make(f"store of {name}", after=True, model=moved)
        assert personalizer.adapt(OLD).unchanged
        assert of_kind(personalizer, NameInUse) == []


@pytest.mark.slow
def test_conversations_learn_on_and_a_changed_system_message_is_a_change(make):
    def chats(system):
        return [
            {"messages": [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]}
            for roles in [("system", "user", "assistant")]
            for contents in ((system, *texts) for texts in zip(OLD[:18], reversed(OLD[:18]), strict=True))
        ]

    personalizer = make(recipe=RECIPE.replace(context_length=128))
    personalizer.adapt(chats("the wind"), activate_anyway=True)
    assert personalizer.adapt(chats("the wind")).unchanged
    changed = personalizer.adapt([*chats("the wind")[:17], chats("the ferry")[17]], activate_anyway=True)
    assert (changed.learnt_on_from, changed.new, changed.changed) == (1, 0, 1)
    assert personalizer.store.adapter("default").open().record.chat


@pytest.fixture
def adapted(adapt, after_learning):
    """The command that adapts a model to a folder of notes, which are learnt already."""
    after_learning(AdapterStore())
    return adapt


@pytest.mark.slow
def test_the_command_says_that_nothing_is_new_without_torch(adapted):
    code = (
        "import sys; from sebp_edge.cli import main\n"
        "try: main()\n"
        "finally: print(sorted({'torch', 'numpy', 'transformers'} & sys.modules.keys()), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code, *adapted], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Nothing is new in 24 documents: version 1 of the adapter 'default' has learnt all")
    assert done.stderr == "[]\n"


def test_the_command_prints_that_nothing_is_new_as_json(adapted):
    _, result = records(run(*adapted, "--json").stdout)
    assert (result["event"], result["unchanged"], result["version"]) == ("result", True, 1)


@pytest.mark.slow
def test_the_command_learns_on_reads_the_texts_once_and_starts_over_if_asked(adapted, notes_folder, monkeypatch):
    (notes_folder / "new.md").write_text(NEW[0])
    calls, read_file = [], readers.read_file
    with monkeypatch.context() as patch:
        patch.setattr(readers, "read_file", lambda path, *more: calls.append(path) or read_file(path, *more))
        learnt = run(*adapted, "--activate-anyway")
    assert len(calls) == len({*calls}) == 25
    assert learnt.exit_code == 0, learnt.output
    assert "Learning on from version 1: 1 new and 0 changed documents, and " in learnt.stdout
    (notes_folder / "new.md").unlink()
    assert "It also knows 1 document that is not among these texts; --sync" in run(*adapted).stdout
    synced = run(*adapted, "--sync", "--activate-anyway")
    assert "since version 2 knows 1 document that --sync (sync=True) forgets." in synced.stderr
    assert AdapterStore().adapter("default").active() == 3


# --------------------------------------------------------------------------------------------------------- learning on


@pytest.mark.slow
def test_it_learns_on_and_improves(make, trained):
    """The new notes' vocabulary and order of words are those of the old ones."""
    personalizer = make(recipe=RECIPE.replace(learning_rate=5e-3))
    first = personalizer.adapt(OLD[:24])
    result = personalizer.adapt([*OLD, *NEW])
    assert (first.verdict, result.verdict, result.learnt_on_from, result.new) == ("better", "better", 1, 16)
    assert result.gain_over_active > 0
    assert trained["all documents"] >= {*range(24, 40)}
    assert result.trained_on_all and result.active
    record = personalizer.store.adapter("default").open().record
    assert (record.learnt_on_from, record.compared_with) == (1, 1)
    assert personalizer.adapt(NOTES).unchanged


@pytest.mark.slow
@pytest.mark.parametrize("texts", [OLD, FEW], ids=["split", "folds"])
def test_no_judged_state_is_ever_trained_on_its_test_or_validation_documents(make, trained, texts):
    """Through a chain of versions, by the roles that each has recorded."""
    personalizer, current = make(recipe=RECIPE), list(texts)
    assert personalizer.adapt(current, activate_anyway=True).learnt_on_from is None
    learnt = {phase: {current[number] for number in numbers} for phase, numbers in trained.items()}
    for number, new in enumerate(NEW[:2]):
        trained.clear()
        current = [edit(current[0], 0.1, seed=number), *current[1:], new]
        result = personalizer.adapt(current, activate_anyway=True)
        assert (result.learnt_on_from, result.new, result.changed) == (number + 1, 1, 1)
        roles = role_of(result.adapter_path, current)
        for phase, numbers in trained.items():
            learnt[phase] |= {current[each] for each in numbers}
            if phase == "all documents":
                continue
            held_out = {"train": {"test", "validation"}}.get(phase)
            if held_out is None:
                fold = int(phase[-1])
                held_out = {f"fold {fold}", f"fold {fold % 3 + 1}"}
            assert {current[each] for each, role in roles.items() if role in held_out}.isdisjoint(learnt[phase])
        assert {0, len(current) - 1} <= trained.get("all documents", {0, len(current) - 1})


@pytest.mark.slow
def test_it_trains_on_few_documents_and_on_the_same_splits(make, trained):
    personalizer = make(after=True)
    before = role_of(personalizer.store.adapter("default").open().path, OLD)
    trained.clear()
    result = personalizer.adapt([*OLD, NEW[0]], activate_anyway=True)
    (event,) = of_kind(personalizer, LearningOn)
    assert (event.version, event.new, event.changed, event.unchanged, event.gone) == (1, 1, 0, 30, 0)
    assert event.replayed >= 1
    assert all(len(numbers) <= 2 + event.replayed for numbers in trained.values())
    after = role_of(result.adapter_path, [*OLD, NEW[0]])
    assert {number: after[number] for number in before} == before


@pytest.mark.slow
def test_the_same_seed_gives_the_same_weights_bit_for_bit(make):
    """Also in another store, whose hashes differ, and from a fresh process' state."""
    found = []
    make("one", after=True)
    make("other").adapt(OLD)
    for store in ("one", "other"):
        path = make(store).adapt([*OLD, *NEW[:2]], activate_anyway=True).adapter_path
        found.append({file.relative_to(path): load_file(file) for file in sorted(path.rglob(WEIGHTS))})
    assert found[0].keys() == found[1].keys()
    for file, weights in found[0].items():
        assert all(tensor.equal(found[1][file][name]) for name, tensor in weights.items())


@pytest.mark.slow
def test_the_next_judged_state_begins_where_the_last_one_ended(make):
    """With a learning rate of nothing, both tracks stay where they were."""
    personalizer = make(after=True, recipe=RECIPE.replace(learning_on_share=1e-30))
    second = personalizer.adapt([*OLD, NEW[0]], activate_anyway=True)
    paths = personalizer.store.adapter("default").open(1).path, second.adapter_path
    assert second.learnt_on_from == 1
    for own in ("", "judged/1"):
        before, after = (load_file(path / own / WEIGHTS) for path in paths)
        if own or second.trained_on_all:
            assert all(tensor.equal(after[name]) for name, tensor in before.items())


@pytest.mark.slow
def test_a_budget_holds_and_keeps_the_rank_of_the_version(make):
    personalizer = make(after=True, recipe=dataclasses.replace(RECIPE, r=None), memory_budget="8GB")
    result = personalizer.adapt([*OLD, NEW[0]], activate_anyway=True)
    assert result.learnt_on_from == 1
    assert 0 < result.peak_memory_bytes <= 8e9 and result.predicted_peak_bytes <= 8e9
    assert json.loads((result.adapter_path / "adapter_config.json").read_text())["r"] == 4


@pytest.mark.slow
def test_an_interruption_leaves_the_active_version_whole(make):
    personalizer = make(after=True)
    first = personalizer.store.adapter("default").open(1).path
    files = {path: path.read_bytes() for path in first.rglob("*") if path.is_file()}

    def stop_after_an_epoch(event):
        if isinstance(event, Evaluated) and event.epoch:
            personalizer.stop()

    personalizer.on_event = stop_after_an_epoch
    with pytest.raises(Interrupted) as stopped:
        personalizer.adapt(NOTES)
    assert personalizer.store.adapter("default").active() == 1
    assert {path: path.read_bytes() for path in first.rglob("*") if path.is_file()} == files
    # What was stopped has not learnt all texts, so nothing learns on from it, even if it is activated.
    saved = personalizer.store.adapter("default").open(stopped.value.version)
    assert saved.record.learnt_on_from == 1 and not (saved.path / KNOWN_TEXTS).exists()
    assert personalizer.inspect(NOTES).beginning.startswith("Learning on from version 1: 10 new and 0 changed")


# ------------------------------------------------------------------------------------------------------- starting over


@pytest.mark.slow
def test_sync_makes_what_fresh_makes_of_the_remaining_documents(make, tmp_path):
    syncing, found = make("sync", after=True), {}
    syncing.adapt([*OLD, NEW[0]], activate_anyway=True)
    shutil.copytree(tmp_path / "sync", tmp_path / "fresh")
    for store, personalizer in {"sync": syncing, "fresh": make("fresh", recipe=RECIPE)}.items():
        result = personalizer.adapt(OLD[3:], activate_anyway=True, **{store: True})
        assert (result.version, result.learnt_on_from) == (3, None)
        found[store] = load_file(result.adapter_path / WEIGHTS)
        history = read_history(result.adapter_path).documents
        assert sum(document.role is not None for document in history) == 27
        assert len(history) == (27 if store == "sync" else 31)
    assert all(tensor.equal(found["fresh"][name]) for name, tensor in found["sync"].items())


@pytest.mark.slow
def test_sync_learns_on_if_nothing_is_gone(make):
    personalizer = make(after=True)
    assert personalizer.adapt(OLD, sync=True).unchanged
    changed = personalizer.adapt([edit(OLD[0], 0.1), *OLD[1:], NEW[0]], sync=True, activate_anyway=True)
    assert (changed.learnt_on_from, changed.new, changed.changed, changed.gone) == (1, 1, 1, 0)


@pytest.mark.slow
def test_what_is_gone_is_known_if_it_comes_back_and_passed_on_until_a_sync_forgets_it(make):
    personalizer = make(after=True)
    second = personalizer.adapt([*OLD[1:], NEW[0]], activate_anyway=True)
    assert (second.learnt_on_from, second.gone) == (1, 1)
    assert personalizer.adapt([*OLD, NEW[0]]).unchanged
    texts = [*OLD[1:], NEW[0], NEW[1]]
    third = personalizer.adapt(texts, activate_anyway=True)
    assert (third.learnt_on_from, third.gone) == (2, 1)
    known = [document for document in read_history(third.adapter_path).documents if document.role is not None]
    assert len(known) == 32
    assert [document.absent for document in personalizer.store.adapter("default").documents(3)] == [False] * 31 + [True]
    forgotten = personalizer.adapt(texts, sync=True, activate_anyway=True)
    assert (forgotten.learnt_on_from, forgotten.version) == (None, 4)
    assert personalizer.adapt(texts, sync=True).unchanged


@pytest.mark.slow
def test_fresh_learns_all_again(make):
    personalizer = make(after=True, recipe=RECIPE)
    again = personalizer.adapt(OLD, fresh=True)
    assert (again.version, again.learnt_on_from) == (2, None)
    assert of_kind(personalizer, Notice) == []
    first = personalizer.store.adapter("default").open(1).path
    before, after = (load_file(path / WEIGHTS) for path in (first, again.adapter_path))
    assert all(tensor.equal(after[name]) for name, tensor in before.items())


def damage(version):
    (version / "judged" / "1" / WEIGHTS).write_bytes(b"no weights")


def forget_the_texts(version):
    (version / KNOWN_TEXTS).unlink()


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
def test_it_starts_over_and_says_why(make, change, why):
    """Its training is stopped when it begins."""
    personalizer, found = make(after=True), []
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


@pytest.mark.slow
def test_a_version_that_went_through_an_archive_is_learnt_on_from(make, tmp_path):
    make(after=True).store.adapter("default").export_archive(tmp_path / "one.tar")
    for store in ("store", "another"):
        personalizer = make(store)
        imported = personalizer.store.import_archive(tmp_path / "one.tar", "copy")
        personalizer.store.adapter("copy").activate(imported.version)
        assert personalizer.adapt(OLD, name="copy").unchanged
    assert personalizer.adapt([*OLD, NEW[0]], name="copy", activate_anyway=True).learnt_on_from == 1


@pytest.mark.slow
def test_a_document_that_is_gone_is_forgotten_by_its_name(make):
    """The text was gone before, but the second version still knows it."""
    personalizer = make(recipe=RECIPE)
    texts = [{"text": text, "name": f"note {number}"} for number, text in enumerate([*OLD, NEW[0]])]
    personalizer.adapt(texts[:-1], activate_anyway=True)
    second = personalizer.adapt(texts[2:], activate_anyway=True)
    assert (second.learnt_on_from, second.gone) == (1, 2)
    receipt = personalizer.forget("note 0", texts[2:], activate_anyway=True)
    assert receipt.versions_removed == (1, 2)
    assert [document.name for document in personalizer.store.adapter("default").documents(3)] == [
        text["name"] for text in texts[2:]
    ]
    assert personalizer.adapt(texts[2:]).unchanged


def test_full_fine_tuning_starts_over(make):
    personalizer = make(recipe=RECIPE.replace(method="full", learning_rate=1e-3, epochs=1))
    personalizer.adapt(OLD, activate_anyway=True)
    begun = personalizer.inspect([*OLD, NEW[0]]).beginning
    assert "All documents are learnt again, since version 1 trained all weights, and keeps no judged state" in begun


def test_a_version_that_was_trained_for_a_quantisation_starts_over(make):
    personalizer = make(after=True)
    record = personalizer.store.adapter("default").open().path / "sebp_edge.json"
    record.write_text(record.read_text().replace('"recipe": {', '"recipe": {"merge_for": "q4_0",'))
    begun = personalizer.inspect([*OLD, NEW[0]]).beginning
    assert "All documents are learnt again, since version 1 was trained for a quantisation, and" in begun


def test_it_starts_over_if_a_document_that_it_was_trained_on_is_needed_for_tests(make):
    """Most test documents are gone, so that others take their places."""
    personalizer = make(after=True)
    roles = role_of(personalizer.store.adapter("default").open().path, OLD)
    remaining = [OLD[number] for number, role in sorted(roles.items()) if role == "train"]
    begun = personalizer.inspect([*remaining, NEW[0]]).beginning
    assert "version 1 was trained on documents that are needed for tests now" in begun


@pytest.mark.slow
def test_an_inspection_says_what_would_be_learnt_on(make):
    assert make("empty").inspect(OLD).beginning == ""
    personalizer = make(after=True)
    nothing = personalizer.inspect(OLD)
    assert nothing.plan is None and nothing.summary.startswith("Nothing is new in 30 documents")
    found = personalizer.inspect([*OLD, NEW[0]])
    assert found.beginning.startswith("Learning on from version 1: 1 new and 0 changed documents, and ")
    assert found.beginning in found.summary and found.plan is not None


def test_outside_the_store_nothing_is_learnt_on_from(make, tmp_path):
    personalizer = make(after=True)
    result = personalizer.adapt(OLD, out=tmp_path / "out")
    assert not result.unchanged and result.learnt_on_from is None
    assert not (tmp_path / "out" / KNOWN_TEXTS).exists()


def test_known_texts_hold_no_text_and_no_path(make, model):
    path = make(after=True).store.adapter("default").open(1).path
    content = (path / KNOWN_TEXTS).read_text()
    assert "ferry" not in content and str(model) not in content
    assert (path / KNOWN_TEXTS).stat().st_mode & 0o077 == 0
    assert len(json.loads(content)["texts"]) == 30


@pytest.mark.slow
def test_more_documents_than_folds_are_for_are_all_learnt_again_and_that_is_said_before_the_model_is_loaded(make):
    make().adapt(NOTES[:19], activate_anyway=True)
    personalizer = make()
    later = personalizer.inspect(NOTES[:22])
    said = "All documents are learnt again, since version 1 has learnt from each of its documents, and from 20 on some"
    assert later.beginning.startswith(said)
    personalizer.adapt(NOTES[:22], activate_anyway=True)
    events = personalizer.events
    (notice,) = (n for n, event in enumerate(events) if isinstance(event, Notice) and event.message.startswith(said))
    (loaded,) = (n for n, event in enumerate(events) if isinstance(event, ModelLoaded))
    assert notice < loaded
    assert personalizer.adapt(NOTES[:24], activate_anyway=True).learnt_on_from == 2
