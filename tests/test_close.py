"""A Personalizer that is closed gives its memory back, and says so to whoever calls it."""

import weakref

import psutil
import pytest
from builders import make_llama

from sebp_edge import Personalizer
from sebp_edge.errors import ClosedError, Interrupted
from sebp_edge.events import StepDone

pytestmark = pytest.mark.usefixtures("unassessed")

CALLS = {
    "adapt": ("x",),
    "forget": ("x.md",),
    "inspect": ("x",),
    "plan": ("x",),
    "generate": ("x",),
    "load_adapter": ("x",),
    "ask": ("x?", "x"),
}


def test_the_model_and_its_adapter_are_freed_at_once(make, notes_folder):
    with make() as personalizer:
        personalizer.adapt(notes_folder, activate_anyway=True)
        personalizer.generate("the ferry", max_new_tokens=2)
        personalizer.ask("Where is the ferry?", notes_folder)
        model = personalizer.in_use.base.model
        freed = [weakref.ref(each) for each in (model, personalizer.in_use.adaptation, *model.parameters())]
        freed.append(weakref.ref(personalizer._searched))
        del model
    assert [each() for each in freed] == [None] * len(freed)


def test_the_error_of_a_stopped_training_keeps_no_model(make, notes_folder):
    def stop(event):
        if isinstance(event, StepDone):
            raise KeyboardInterrupt

    with make(on_event=stop) as personalizer:
        with pytest.raises(Interrupted) as caught:
            personalizer.adapt(notes_folder)
        model = weakref.ref(personalizer.in_use.base.model)
    assert caught.value is not None and model() is None


@pytest.mark.slow
def test_the_process_shrinks_by_most_of_the_model(tmp_path, tokenizer):
    folder = tmp_path / "wide"
    make_llama(hidden_size=512, vocab_size=120_000, tie_word_embeddings=True).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    process = psutil.Process()
    personalizer = Personalizer(folder, device="cpu", store=tmp_path / "store")
    personalizer.generate("the ferry", max_new_tokens=2)
    size, before = personalizer.in_use.loaded_bytes, process.memory_info().rss
    personalizer.close()
    assert size > 100e6
    assert before - process.memory_info().rss > 0.8 * size


def test_later_calls_raise_a_clear_error(make):
    personalizer = make()
    personalizer.close()
    personalizer.close()
    for call, arguments in CALLS.items():
        with pytest.raises(ClosedError, match="was closed; make a new one"):
            getattr(personalizer, call)(*arguments)
