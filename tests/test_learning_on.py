"""Learning on: what `adapt` trains on if a name exists, and what later versions know."""

import dataclasses
import json
from collections import Counter

import pytest
from command import CODE, run, start
from learnt import NEW, NOTES, OLD, RECIPE, WEIGHTS, of_kind
from random_texts import edit
from safetensors.torch import load_file

from sebp_edge import AdapterStore
from sebp_edge.errors import Interrupted
from sebp_edge.events import Evaluated, NameInUse, Notice

pytestmark = pytest.mark.usefixtures("unassessed")


@pytest.mark.slow
def test_it_learns_on_and_improves(make_quick):
    """The new notes' vocabulary and order of words are those of the old ones."""
    personalizer = make_quick(recipe=RECIPE.replace(learning_rate=5e-3))
    first = personalizer.adapt(OLD[:24])
    result = personalizer.adapt([*OLD, *NEW])
    assert (first.verdict, result.verdict, result.learnt_on_from, result.new) == ("better", "better", 1, 16)
    assert result.gain_over_active > 0
    assert result.trained_on_all and result.active
    record = personalizer.store.adapter("default").open().record
    assert (record.learnt_on_from, record.compared_with) == (1, 1)
    assert personalizer.adapt(NOTES).unchanged


@pytest.mark.slow
def test_all_other_values_of_a_recipe_learn_on(make_quick):
    changes = {
        **{"learning_rate": 1e-2, "warmup_ratio": 0.2, "epochs": 2, "patience": 2, "batch_tokens": 100},
        **{"batch_rows": 400, "min_steps": 2, "weight_decay": 0.1, "max_grad_norm": 2.0, "context_length": 40},
        **{"margin": 0.02, "refit": False, "general": 0.5, "learning_on_share": 0.3},
    }
    of_the_weights = {"method", "load_in_4bit", "r", "lora_alpha", "chat_template", "questions"}
    assert changes.keys() | of_the_weights | {"name", "description"} == vars(RECIPE).keys()
    other = make_quick(after=OLD, recipe=RECIPE.replace(**changes))
    result = other.adapt([*OLD, NEW[0]], activate_anyway=True)
    assert (result.learnt_on_from, result.new) == (1, 1)
    assert of_kind(other, NameInUse) == of_kind(other, Notice) == []
    assert other.store.adapter("default").open().record.recipe["epochs"] == 2


@pytest.mark.slow
def test_conversations_learn_on_and_a_changed_system_message_is_a_change(make_quick):
    def chats(system):
        return [
            {"messages": [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]}
            for roles in [("system", "user", "assistant")]
            for contents in ((system, *texts) for texts in zip(OLD[:18], reversed(OLD[:18]), strict=True))
        ]

    personalizer = make_quick(recipe=RECIPE.replace(context_length=128))
    personalizer.adapt(chats("the wind"), activate_anyway=True)
    assert personalizer.adapt(chats("the wind")).unchanged
    changed = personalizer.adapt([*chats("the wind")[:17], chats("the ferry")[17]], activate_anyway=True)
    assert (changed.learnt_on_from, changed.new, changed.changed) == (1, 0, 1)
    assert personalizer.store.adapter("default").open().record.chat


@pytest.mark.slow
def test_the_same_seed_gives_the_same_weights_bit_for_bit(make_quick):
    """Also in another store, whose hashes differ, and from a fresh process' state."""
    found = []
    make_quick("one", after=OLD)
    make_quick("other").adapt(OLD)
    for store in ("one", "other"):
        path = make_quick(store).adapt([*OLD, *NEW[:2]], activate_anyway=True).adapter_path
        found.append({file.relative_to(path): load_file(file) for file in sorted(path.rglob(WEIGHTS))})
    assert found[0].keys() == found[1].keys()
    for file, weights in found[0].items():
        assert all(tensor.equal(found[1][file][name]) for name, tensor in weights.items())


@pytest.mark.slow
def test_the_next_judged_state_begins_where_the_last_one_ended(make_quick):
    """With a learning rate of nothing, both tracks stay where they were."""
    personalizer = make_quick(after=OLD, recipe=RECIPE.replace(learning_on_share=1e-30))
    second = personalizer.adapt([*OLD, NEW[0]], activate_anyway=True)
    paths = personalizer.store.adapter("default").open(1).path, second.adapter_path
    assert second.learnt_on_from == 1
    for own in ("", "judged/1"):
        before, after = (load_file(path / own / WEIGHTS) for path in paths)
        if own or second.trained_on_all:
            assert all(tensor.equal(after[name]) for name, tensor in before.items())


@pytest.mark.slow
def test_a_budget_holds_and_keeps_the_rank_of_the_version(make_quick):
    personalizer = make_quick(after=OLD, recipe=dataclasses.replace(RECIPE, r=None), memory_budget="8GB")
    result = personalizer.adapt([*OLD, NEW[0]], activate_anyway=True)
    assert result.learnt_on_from == 1
    assert 0 < result.peak_memory_bytes <= 8e9 and result.predicted_peak_bytes <= 8e9
    assert json.loads((result.adapter_path / "adapter_config.json").read_text())["r"] == 4


@pytest.mark.slow
def test_an_interruption_leaves_the_active_version_whole(make_quick):
    personalizer = make_quick(after=OLD)
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
    assert saved.record.learnt_on_from == 1 and not (saved.path / "known_texts.json").exists()
    assert personalizer.inspect(NOTES).beginning.startswith("Learning on from version 1: 10 new and 0 changed")


@pytest.mark.slow
def test_sync_learns_on_if_nothing_is_gone(make_quick):
    personalizer = make_quick(after=OLD)
    assert personalizer.adapt(OLD, sync=True).unchanged
    changed = personalizer.adapt([edit(OLD[0], 0.1), *OLD[1:], NEW[0]], sync=True, activate_anyway=True)
    assert (changed.learnt_on_from, changed.new, changed.changed, changed.gone) == (1, 1, 1, 0)


@pytest.mark.slow
def test_what_is_gone_is_known_if_it_comes_back_and_passed_on_until_a_sync_forgets_it(make_quick):
    personalizer = make_quick(after=OLD)
    second = personalizer.adapt([*OLD[1:], NEW[0]], activate_anyway=True)
    assert (second.learnt_on_from, second.gone) == (1, 1)
    assert personalizer.adapt([*OLD, NEW[0]]).unchanged
    texts = [*OLD[1:], NEW[0], NEW[1]]
    third = personalizer.adapt(texts, activate_anyway=True)
    assert (third.learnt_on_from, third.gone) == (2, 1)
    assert [document.absent for document in personalizer.store.adapter("default").documents(3)] == [False] * 31 + [True]
    forgotten = personalizer.adapt(texts, sync=True, activate_anyway=True)
    assert (forgotten.learnt_on_from, forgotten.version) == (None, 4)
    assert personalizer.adapt(texts, sync=True).unchanged


@pytest.mark.slow
def test_a_version_that_went_through_an_archive_is_learnt_on_from(make_quick, tmp_path):
    make_quick(after=OLD).store.adapter("default").export_archive(tmp_path / "one.tar")
    for store in ("store", "another"):
        personalizer = make_quick(store)
        imported = personalizer.store.import_archive(tmp_path / "one.tar", "copy")
        personalizer.store.adapter("copy").activate(imported.version)
        assert personalizer.adapt(OLD, name="copy").unchanged
    assert personalizer.adapt([*OLD, NEW[0]], name="copy", activate_anyway=True).learnt_on_from == 1


@pytest.mark.slow
def test_a_document_that_is_gone_is_forgotten_by_its_name(make_quick):
    """The text was gone before, but the second version still knows it."""
    personalizer = make_quick(recipe=RECIPE)
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


def test_known_texts_hold_no_text_and_no_path(make_quick, model):
    path = make_quick(after=OLD).store.adapter("default").open(1).path
    content = (path / "known_texts.json").read_text()
    assert "ferry" not in content and str(model) not in content
    assert (path / "known_texts.json").stat().st_mode & 0o077 == 0
    assert len(json.loads(content)["texts"]) == 30


# Prints the names of the notes that are opened.
OPENED = """
import sys
sys.addaudithook(lambda event, found: event == "open" and str(found[0]).endswith(".md") and print("open", found[0]))
"""


def printed(*arguments):
    """Returns what a command prints, and how often it opens each note."""
    with start([OPENED + CODE, *arguments]) as one:
        output, errors = one.communicate(timeout=200)
    assert one.returncode == 0, errors
    return output, Counter(line for line in output.splitlines() if line.startswith("open /") and "note" in line)


@pytest.mark.slow
def test_the_command_learns_on_reads_the_texts_once_and_starts_over_if_asked(adapted, notes_folder):
    (notes_folder / "new.md").write_text(NEW[0])
    output, opened = printed(*adapted, "--activate-anyway")
    assert len(opened) == 25
    assert opened == printed("inspect", *adapted[1:], "--name", "new")[1]
    assert "Learning on from version 1: 1 new and 0 changed documents, and " in output
    (notes_folder / "new.md").unlink()
    assert "It also knows 1 document that is not among these texts; --sync" in run(*adapted).stdout
    synced = run(*adapted, "--sync", "--activate-anyway")
    assert "since version 2 knows 1 document that --sync (sync=True) forgets." in synced.stderr
    assert AdapterStore().adapter("default").active() == 3
