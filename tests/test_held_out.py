"""What is trained on: no judged state has seen the documents that it is tested on, in any version before."""

import pytest
from learnt import FEW, NEW, OLD, of_kind, roles
from random_texts import edit

from sebp_edge.engine.training.run import TrainingRun
from sebp_edge.events import LearningOn

pytestmark = pytest.mark.usefixtures("unassessed")


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


@pytest.mark.slow
@pytest.mark.parametrize("texts", [OLD, FEW], ids=["split", "folds"])
def test_no_judged_state_is_ever_trained_on_its_test_or_validation_documents(make_quick, trained, texts):
    """Through a chain of versions, by the roles that each has recorded."""
    personalizer, current = make_quick(), list(texts)
    assert personalizer.adapt(current, activate_anyway=True).learnt_on_from is None
    learnt = {phase: {current[number] for number in numbers} for phase, numbers in trained.items()}
    for number, new in enumerate(NEW[:2]):
        trained.clear()
        current = [edit(current[0], 0.1, seed=number), *current[1:], new]
        result = personalizer.adapt(current, activate_anyway=True)
        assert (result.learnt_on_from, result.new, result.changed) == (number + 1, 1, 1)
        role_of = dict(zip(current, roles(personalizer.store, result.version), strict=True))
        for phase, numbers in trained.items():
            learnt[phase] |= {current[each] for each in numbers}
            if phase == "all documents":
                continue
            held_out = {"train": {"test", "validation"}}.get(phase)
            if held_out is None:
                fold = int(phase[-1])
                held_out = {f"fold {fold}", f"fold {fold % 3 + 1}"}
            assert {text for text, role in role_of.items() if role in held_out}.isdisjoint(learnt[phase])
        assert {0, len(current) - 1} <= trained.get("all documents", {0, len(current) - 1})


@pytest.mark.slow
def test_it_trains_on_few_documents_and_on_the_same_splits(make_quick, trained):
    personalizer = make_quick(after=OLD)
    before = roles(personalizer.store)
    trained.clear()
    personalizer.adapt([*OLD, NEW[0]], activate_anyway=True)
    (event,) = of_kind(personalizer, LearningOn)
    assert (event.version, event.new, event.changed, event.unchanged, event.gone) == (1, 1, 0, 30, 0)
    assert event.replayed >= 1
    assert all(len(numbers) <= 2 + event.replayed for numbers in trained.values())
    assert roles(personalizer.store, 2)[:30] == before
