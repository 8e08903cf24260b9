"""What a preparation makes of examples: which it refuses before a training, how it shows them, and where it stops."""

import threading

import pytest
from builders import dataset_of, make_sentences, make_tokenizer

from sebp_edge import Personalizer
from sebp_edge.basics.interruptions import Interruptions
from sebp_edge.basics.stopping import StopSignal
from sebp_edge.engine.memory.choosing import make_plan
from sebp_edge.engine.sparse.rows.schedule import Schedule
from sebp_edge.errors import ModelError, TextsError
from sebp_edge.lessons.examples import encode
from sebp_edge.lessons.learnable import refuse_unlearnable
from sebp_edge.run.inspection import render_examples
from sebp_edge.run.preparation import Preparation
from sebp_edge.values.documents import Conversation, Document, LeftOut, PromptCompletion
from sebp_edge.values.example import Example
from sebp_edge.values.preparation_progress import Progress

SECRET = "the ferry left at six"


class Slow(Schedule):
    """A schedule that is laid out once the stop is looked at meanwhile."""

    looked = threading.Event()

    def lay_out(self, limit, **options):
        self.looked.clear()
        assert self.looked.wait(60)
        super().lay_out(limit, **options)


@pytest.mark.slow
def test_the_layout_of_many_texts_is_stopped_midway():
    call = Personalizer("tiny", device="cpu")._make_call(StopSignal(), Interruptions())
    preparation = Preparation(*call.with_texts(make_sentences(24, words=60)))
    here = call.conditions()
    data = preparation.read_dataset(here).dataset
    slow = Slow([[list(data.outlines.own)]])
    recipe, progress = preparation.recipe, Progress(check=Slow.looked.set)
    assert make_plan(here.shape, data, [slow], recipe, here.target, here.budget, progress).chosen


def test_the_trained_part_of_a_completion_is_marked():
    tokenizer, documents = make_tokenizer(), [Document("a", PromptCompletion(SECRET, " and the wind"))]
    examples, _ = encode(documents, tokenizer, 64)
    [example] = render_examples(examples, documents, tokenizer, 2)
    assert "".join(piece.text for piece in example.pieces) == f"<|bos|>{SECRET} and the wind<|eos|>"
    assert [piece.trained for piece in example.pieces] == [False, True]
    assert example.pieces[1].text.endswith("the wind<|eos|>")


def refusing(examples, tokenizer, left_out=()):
    refuse_unlearnable(dataset_of(examples, left_out=left_out), 1, tokenizer)


def test_examples_without_loss_are_refused():
    with pytest.raises(TextsError, match="No token of these 1 documents has loss"):
        refusing([Example([0, 5, 6], [-100] * 3, 0)], make_tokenizer())
    left_out = [LeftOut("b.png", "a picture"), LeftOut("a", "the model's chat template refuses it")]
    with pytest.raises(TextsError, match=r"has loss \(for 1 of them: the model's chat template refuses it\), so"):
        refusing([], make_tokenizer(), left_out=left_out)


def test_two_start_tokens_are_refused():
    with pytest.raises(ModelError, match="two start tokens"):
        refusing([Example([0, 0, 6, 1], [-100, -100, 6, 1], 0)], make_tokenizer())


def test_an_end_that_is_never_learnt_is_refused():
    tokenizer = make_tokenizer()
    refusing([Example([0, 6, 1], [-100, 6, 1], 0)], tokenizer)
    with pytest.raises(ModelError, match="never learn where to stop"):
        refusing([Example([0, 6, 1], [-100, 6, -100], 0)], tokenizer)


def test_a_template_that_leaves_the_end_of_an_answer_untrained_is_refused():
    tokenizer = make_tokenizer()
    end = "{{ message.content }}<|end|>{% endgeneration %}"
    messages = ({"role": "user", "content": "the wind"}, {"role": "assistant", "content": "from the west"})
    document = Document("a", Conversation(messages))
    examples, _ = encode([document], tokenizer, 64)
    refuse_unlearnable(dataset_of(examples), 1, tokenizer)
    assert end in tokenizer.chat_template
    tokenizer.chat_template = tokenizer.chat_template.replace(end, "{{ message.content }}{% endgeneration %}<|end|>")
    examples, _ = encode([document], tokenizer, 64)
    with pytest.raises(ModelError, match="token that ends an answer"):
        refuse_unlearnable(dataset_of(examples), 1, tokenizer)
