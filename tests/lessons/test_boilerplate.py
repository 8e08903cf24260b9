"""Lines that stand in many documents are found, and their tokens are marked."""

import pytest
from builders import make_sentences, make_tokenizer
from small_tokenizer import CHAT_TEMPLATE

from sebp_edge.lessons.boilerplate import common_lines, common_spans
from sebp_edge.lessons.examples import encode
from sebp_edge.values.documents import Conversation, Document, PromptCompletion, texts_of

FOOTER = "Sent from my phone"


def lines_of(texts, cluster_of=None):
    return common_lines(dict(enumerate(texts)), cluster_of or dict(enumerate(range(len(texts)))))


def letters(count, footers):
    return [f"{text}\n{FOOTER}" if n < footers else text for n, text in enumerate(make_sentences(count))]


@pytest.mark.parametrize(("count", "needed"), [(6, 3), (50, 3), (100, 5), (1000, 20)])
def test_a_line_is_common_in_a_twentieth_of_the_documents_but_at_least_3_and_at_most_20(count, needed):
    assert lines_of(letters(count, needed)) == {FOOTER}
    assert lines_of(letters(count, needed - 1)) == frozenset()


def test_a_line_counts_once_in_a_document_and_once_in_a_cluster_of_near_duplicates():
    repeated = [f"{text}\n" + f"{FOOTER}\n" * 9 for text in make_sentences(2)] + make_sentences(4, seed=1)
    assert lines_of(repeated) == frozenset()
    copies = letters(6, 4)
    assert lines_of(copies, {0: 0, 1: 0, 2: 0, 3: 3, 4: 4, 5: 5}) == frozenset()
    assert lines_of(copies, {0: 0, 1: 0, 2: 2, 3: 3, 4: 4, 5: 5}) == {FOOTER}


def test_lines_that_differ_in_numbers_and_whitespace_are_the_same():
    texts = ["Page 1  of 9", "Page 12 of\t130 \n", "a\n  Page 3 of 4", "b", "c", "d"]
    lines = lines_of(texts)
    assert lines == {"Page 0 of 0"}
    assert [common_spans(text, lines) for text in texts[:3]] == [[(0, 12)], [(0, 16)], [(2, 15)]]


# ------------------------------------------------------------------------------------------------------------- tokens


def marked(contents, lines=frozenset({FOOTER, "# Daily 0"}), template=CHAT_TEMPLATE, **options):
    """Returns the text of the loss tokens in boilerplate, and of the others, for each example."""
    tokenizer = make_tokenizer(template)
    documents = [Document(str(number), content) for number, content in enumerate(contents)]
    options = {"context_length": 512} | options
    examples, left_out = encode(documents, tokenizer, common_lines=lines, **options)
    assert not left_out
    found = []
    for example in examples:
        assert len(example.in_boilerplate) in (0, len(example.labels))
        labels = [label for label in example.labels[1:] if label != -100]
        pairs = list(zip(labels, example.outline(0).boilerplate or bytes(len(labels)), strict=True))
        found.append(tuple(tokenizer.decode([label for label, flag in pairs if flag == wanted]) for wanted in (1, 0)))
    return found


def test_tokens_that_begin_in_common_lines_are_marked_and_eos_never_is():
    assert marked([f"# Daily 7\nthe wind\n{FOOTER}"]) == [(f"# Daily 7\n{FOOTER}", "the wind\n<|eos|>")]
    assert marked([FOOTER]) == [(FOOTER, "<|eos|>")]
    assert marked(["the wind"]) == [("", "the wind<|eos|>")]


def test_without_common_lines_examples_are_as_before():
    documents = [Document("0", text) for text in letters(6, 6)]
    examples, _ = encode(documents, make_tokenizer(), 64)
    assert all(example.in_boilerplate == b"" for example in examples)
    assert {example.outline(0).boilerplate for example in examples} == {b""}
    other, _ = encode(documents, make_tokenizer(), 64, common_lines=frozenset({FOOTER}))
    assert [(one.input_ids, one.labels) for one in other] == [(one.input_ids, one.labels) for one in examples]


def test_only_completions_have_marked_loss_tokens():
    completion = PromptCompletion(f"{FOOTER}\nthe question?", f"the map\n{FOOTER}")
    assert marked([completion]) == [(FOOTER, "the map\n<|eos|>")]


def test_an_answer_of_common_lines_only_is_no_boilerplate():
    """As in a classification: each answer stands in many records, and is all there is to learn."""
    records = [PromptCompletion(f"{text}\nMood: ", ("good", "bad")[n % 2]) for n, text in enumerate(make_sentences(12))]
    lines = lines_of(["\n".join(texts_of(record)) for record in records])
    assert {"good", "bad"} <= lines
    assert {common for common, _ in marked(records, lines)} == {""}
    assert {common for common, _ in marked(records, lines, chat_template=True)} == {""}


@pytest.mark.parametrize("template", ["marks", "prefixes", "turn by turn"])
def test_marks_of_conversations_are_in_the_assistants_messages(template):
    templates = {
        "marks": CHAT_TEMPLATE,
        "prefixes": CHAT_TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", ""),
        # Shortens earlier answers.
        "turn by turn": "{% for message in messages %}<|{{ message.role }}|>"
        "{% if loop.last or message.role == 'user' %}{{ message.content }}"
        "{% else %}{{ message.content[:3] }}{% endif %}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}",
    }
    contents = [FOOTER, f"the wind\n{FOOTER}", f"home\n{FOOTER}", f"{FOOTER}", "why?", f"bread\n{FOOTER}\nsoup"]
    roles = ["user", "assistant"] * 3
    messages = tuple({"role": r, "content": c} for r, c in zip(roles, contents, strict=True))
    found = marked([Conversation(messages)], template=templates[template])
    assert len(found) == (3 if template == "turn by turn" else 1)
    assert "".join(common for common, _ in found) == f"{FOOTER}{FOOTER}\n"
    assert "".join(rest for _, rest in found) == f"the wind\n<|end|>{FOOTER}<|end|>bread\nsoup<|end|>"
