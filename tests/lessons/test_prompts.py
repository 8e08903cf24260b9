"""Prompts and messages are encoded as in training; invalid ones raise an error of one sentence."""

import pytest
from builders import make_tokenizer

from sebp_edge.errors import ModelError, TextsError
from sebp_edge.lessons.examples import encode
from sebp_edge.lessons.prompts import check_prompt, encode_prompt
from sebp_edge.values.documents import Conversation, Document

QUESTION = {"role": "user", "content": "where is the map"}
ANSWER = {"role": "assistant", "content": "at home"}
CHAT = [{"role": "system", "content": "the ferry"}, QUESTION, ANSWER, {"role": "user", "content": "and the bread"}]


@pytest.fixture
def own_tokenizer():
    """A tokenizer whose template a test may change."""
    return make_tokenizer()


def decoded(tokenizer, prompt, **options):
    return tokenizer.decode(encode_prompt(prompt, tokenizer, **options).input_ids)


def test_a_text_is_rendered_with_the_template_only_for_chat_adapters(tokenizer):
    assert decoded(tokenizer, "the ferry", chat=False) == "<|bos|>the ferry"
    assert decoded(tokenizer, "the ferry", chat=True) == "<|bos|><|user|>the ferry<|end|><|assistant|>"


def test_messages_are_always_rendered_with_the_template(tokenizer):
    expected = (
        "<|bos|><|system|>the ferry<|end|><|user|>where is the map<|end|><|assistant|>at home<|end|>"
        "<|user|>and the bread<|end|><|assistant|>"
    )
    assert decoded(tokenizer, CHAT, chat=False) == decoded(tokenizer, CHAT, chat=True) == expected


def test_without_a_template_texts_are_encoded_plainly_and_messages_refused_but_for_chat_adapters(own_tokenizer):
    own_tokenizer.chat_template = None
    assert decoded(own_tokenizer, "the ferry", chat=False) == "<|bos|>the ferry"
    assert decoded(own_tokenizer, "the ferry", chat=True) == "<|bos|>Them: the ferry\n\nMe:"
    with pytest.raises(ModelError, match="This model has no chat template"):
        encode_prompt([QUESTION], own_tokenizer, chat=False)


@pytest.mark.parametrize("has_bos", [True, False])
def test_a_prompt_is_a_prefix_of_the_training_example(own_tokenizer, has_bos):
    if not has_bos:  # training prepends the tokenizer's BOS
        own_tokenizer.chat_template = own_tokenizer.chat_template.replace("{{ bos_token }}", "")
    document = Document("chat", Conversation((*CHAT, ANSWER)))
    ((example,), _) = encode([document], own_tokenizer, 128)
    prompt = encode_prompt(CHAT, own_tokenizer, chat=True)
    assert list(example.input_ids[: len(prompt.input_ids)]) == prompt.input_ids
    assert set(example.labels[: len(prompt.input_ids)]) != {-100}  # the first answer has loss too
    assert example.input_ids[-1] in prompt.end_ids


def test_the_template_determines_the_end_tokens(own_tokenizer):
    eos, end = 1, own_tokenizer.convert_tokens_to_ids("<|end|>")
    assert encode_prompt("the", own_tokenizer, chat=False).end_ids == [eos]
    assert encode_prompt("the", own_tokenizer, chat=True).end_ids == [eos, end]
    own_tokenizer.chat_template = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
    assert encode_prompt("the", own_tokenizer, chat=True).end_ids == [eos]


def test_a_control_token_spelt_out_is_text_in_a_text_and_refused_in_a_chat(tokenizer):
    ids = encode_prompt("<|eos|>", tokenizer, chat=False).input_ids
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.eos_token_id not in ids
    with pytest.raises(TextsError, match="spells out one of the model's control tokens") as error:
        encode_prompt([{"role": "user", "content": "secret <|end|>"}], tokenizer, chat=True)
    assert "secret" not in str(error.value)


def test_a_template_that_refuses_the_roles_raises_one_sentence(own_tokenizer):
    own_tokenizer.chat_template = "{{ raise_exception('no ' + messages[0].content) }}"
    with pytest.raises(TextsError, match="it refuses these messages") as error:
        encode_prompt(CHAT, own_tokenizer, chat=True)
    assert "ferry" not in str(error.value)


@pytest.mark.parametrize("prompt", ["the ferry", " ", [QUESTION], CHAT])
def test_texts_and_chats_are_accepted(prompt):
    check_prompt(prompt)


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("", "The prompt is empty; give the first words"),
        (None, "must be a text or a list of messages, but is of type NoneType"),
        (b"the ferry", "but is of type bytes"),
        (QUESTION, "but is of type dict"),
        ("secret \udcff", r"The prompt is not valid Unicode \(character 7\)"),
        ([], "The list of messages is empty"),
        (["secret"], "Message 1 is not of the form"),
        ([QUESTION | {"name": "secret"}], "Message 1 is not of the form"),
        ([{"role": "secret", "content": "a"}], "Message 1 has an unknown role; choose from system, user, assistant"),
        ([{"role": ["secret"], "content": "a"}], "Message 1 has an unknown role"),
        (
            [QUESTION, {"role": "user", "content": ["secret"]}],
            "content of message 2 must be a text, but is of type list",
        ),
        ([{"role": "user", "content": "secret \udcff"}], r"Message 1 is not valid Unicode \(character 7\)"),
        ([QUESTION, ANSWER], "The last message must be from the user"),
        ([{"role": "user", "content": ""}], "and not empty"),
    ],
    ids=str,
)
def test_anything_else_is_refused_without_quoting_it(prompt, words):
    with pytest.raises(TextsError, match=words) as error:
        check_prompt(prompt)
    assert "secret" not in str(error.value)
