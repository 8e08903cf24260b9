"""Documents become examples: every loss token once, none longer than the context, cuts at good boundaries."""

import random
from types import SimpleNamespace

import pytest
from builders import make_sentences, make_tokenizer
from pace import at_most
from random_texts import ALPHABET
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from sebp_edge import Recipe
from sebp_edge.errors import ModelError, TextsError
from sebp_edge.lessons.examples import encode
from sebp_edge.lessons.make_dataset import Drawing, make_dataset
from sebp_edge.values.documents import Document, LeftOut, PromptCompletion
from sebp_edge.values.draw import MIN_TOKENS
from sebp_edge.values.reading import Reading
from sebp_edge.values.remembered import SplitHistory

BOS, EOS = 0, 1
IGNORE = -100
KINDS = ["bos and eos", "no bos", "no eos", "neither", "offsets without blanks"]


def tokenizer_of(kind: str) -> PreTrainedTokenizerFast:
    tokenizer = make_tokenizer()
    if kind in ("no bos", "neither"):
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single="$A", special_tokens=[])
    if kind in ("no eos", "neither"):
        tokenizer.eos_token = None
    if kind == "offsets without blanks":  # as in Llama 3
        bos = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", BOS)])
        tokenizer.backend_tokenizer.post_processor = processors.Sequence([processors.ByteLevel(), bos])
    tokenizer.pad_token = None
    return tokenizer


@pytest.fixture(params=KINDS)
def any_tokenizer(request):
    return tokenizer_of(request.param)


def encode_one(content, tokenizer, context_length: int = 64):
    examples, left_out = encode([Document("note", content)], tokenizer, context_length)
    assert not left_out
    return examples


def tokens_of(text: str, tokenizer) -> list[int]:
    return tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]


def labelled(examples) -> list[int]:
    """Returns all labels in order, including those that no earlier token predicts."""
    return [label for example in examples for label in example.labels if label != IGNORE]


def predicted(examples) -> list[int]:
    return [label for example in examples for label in example.labels[1:] if label != IGNORE]


def random_text(seed: int) -> str:
    order = random.Random(seed)
    return "".join(order.choices(ALPHABET, k=order.randint(1, 400))).strip() or "a"


# ------------------------------------------------------------------------------------ no token is lost or duplicated


def test_chunks_hold_every_token_once_in_order_within_the_context_length(any_tokenizer):
    for seed in range(40):
        text, context_length = random_text(seed), random.Random(seed).choice([8, 9, 13, 32, 100])
        has_bos = any_tokenizer("a")["input_ids"][0] == BOS
        expected = tokens_of(text, any_tokenizer) + ([EOS] if any_tokenizer.eos_token else [])
        examples, _ = encode([Document("note", text)], any_tokenizer, context_length)
        if expected[1:] or has_bos:
            assert labelled(examples) == expected
            # Without a BOS no token predicts the first token of a text; every other one has loss.
            assert predicted(examples) == (expected if has_bos else expected[1:])
        for number, example in enumerate(examples):
            assert len(example.input_ids) == len(example.labels) <= context_length
            assert all(label in (IGNORE, token) for token, label in zip(example.input_ids, example.labels, strict=True))
            assert (example.input_ids[0] == BOS) == has_bos
            assert BOS not in example.input_ids[1:]
            assert (EOS in example.input_ids) == (number == len(examples) - 1 and any_tokenizer.eos_token is not None)


def test_short_texts_stay_one_example_each_and_keep_their_order(tokenizer):
    documents = [Document(str(number), text) for number, text in enumerate(make_sentences(5, words=3))]
    examples, _ = encode(documents, tokenizer, 64)
    assert [example.document for example in examples] == [0, 1, 2, 3, 4]
    for example, document in zip(examples, documents, strict=True):
        assert list(example.input_ids) == [BOS, *tokens_of(document.content, tokenizer), EOS]
        assert list(example.labels) == [IGNORE, *example.input_ids[1:]]
        assert example.num_loss_tokens == len(example.input_ids) - 1


@pytest.mark.parametrize("text", ["a", "日", "🙂", "\u05d0"])
def test_one_character_is_a_document(tokenizer, text):
    [example] = encode_one(text, tokenizer)
    assert list(example.input_ids) == [BOS, *tokens_of(text, tokenizer), EOS]


def test_a_document_without_loss_tokens_is_left_out():
    examples, left_out = encode([Document("note", "a")], tokenizer_of("neither"), 64)
    assert examples == []
    assert left_out == [LeftOut("note", "no tokens to train on")]


def test_special_tokens_spelt_out_in_a_text_stay_text(tokenizer):
    text = "<|eos|> and <|bos|><|user|> are how <|end|>"
    [example] = encode_one(text, tokenizer, context_length=512)
    assert tokenizer.decode(example.input_ids[1:-1]) == text
    assert not {token for token in example.input_ids[1:-1] if token in tokenizer.added_tokens_decoder}


def test_a_tokenizer_that_is_not_fast_is_refused():
    with pytest.raises(ModelError, match="no fast version"):
        encode([], SimpleNamespace(is_fast=False), 64)


# ------------------------------------------------------------------------------------------------------------ cutting


def cuts(text: str, tokenizer, context_length: int) -> list[str]:
    """Returns the text of each chunk."""
    return [
        tokenizer.decode([token for token in example.labels if token not in (IGNORE, EOS)])
        for example in encode_one(text, tokenizer, context_length)
    ]


@pytest.mark.parametrize("kind", ["bos and eos", "no bos", "offsets without blanks"])
def test_cuts_prefer_paragraphs_then_sentences_then_words(kind):
    tokenizer = tokenizer_of(kind)
    paragraphs = "qqqq. qqqq\n\nxxxx. xxxx zzzz"
    assert cuts(paragraphs, tokenizer, 22)[0] == "qqqq. qqqq\n\n"
    sentences = 'qqqqqqqq "xx." zzz zzzzzzz'
    assert cuts(sentences, tokenizer, 20)[0].rstrip() == 'qqqqqqqq "xx."'
    words = "qqqqqqqqqq xxxxxxxxxx zzzzzzzzzz"
    assert [chunk.strip() for chunk in cuts(words, tokenizer, 18)] == ["qqqqqqqqqq", "xxxxxxxxxx", "zzzzzzzzzz"]


def test_chinese_and_japanese_sentences_are_cut_without_spaces(tokenizer):
    chunks = cuts("今日は雨。明日は晴れ。私は家に帰る。", tokenizer, 44)
    assert chunks == ["今日は雨。明日は晴れ。", "私は家に帰る。"]


@pytest.mark.parametrize("text", ["日" * 60, "🙂" * 60, "the " + "🙂 " * 60])
def test_characters_of_several_tokens_are_not_cut_apart(text, tokenizer):
    chunks = cuts(text, tokenizer, 32)
    assert "".join(chunks) == text
    assert "\ufffd" not in "".join(chunks)


@pytest.mark.slow
def test_long_texts_take_seconds(tokenizer):
    text = "\n\n".join(make_sentences(4_000))
    assert len(text) > 350_000
    with at_most(3.5):
        encode_one(text, tokenizer, 512)


# -------------------------------------------------------------------------------------------------------- completions


def test_only_the_completion_has_loss(any_tokenizer):
    [example] = encode_one(PromptCompletion("the wind: ", " west  \n "), any_tokenizer)
    eos = [EOS] if any_tokenizer.eos_token else []
    joint = tokens_of("the wind:  west  \n ", any_tokenizer)
    assert list(example.input_ids[-len(joint + eos) :]) == joint + eos
    labels = labelled([example])
    assert any_tokenizer.decode(labels[: len(labels) - len(eos)]) == " west  \n "
    assert labels[len(labels) - len(eos) :] == eos


def test_a_token_across_the_boundary_has_loss(tokenizer):
    [example] = encode_one(PromptCompletion("so th", "e map"), tokenizer)
    assert list(example.input_ids) == [BOS, *tokens_of("so the map", tokenizer), EOS]
    assert tokenizer.decode(labelled([example])) == " the map<|eos|>"


def test_a_completion_longer_than_the_context_has_loss_throughout(any_tokenizer):
    completion = " ".join(make_sentences(3))
    examples = encode_one(PromptCompletion("the question? ", completion), any_tokenizer, 32)
    eos = [EOS] if any_tokenizer.eos_token else []
    whole = tokens_of("the question? " + completion, any_tokenizer) + eos
    labels = predicted(examples)
    assert len(examples) > 2
    assert labels == whole[-len(labels) :]
    assert any_tokenizer.decode(labels).removesuffix("<|eos|>").strip() == completion


def test_chunks_of_a_long_prompt_without_loss_tokens_are_dropped(tokenizer):
    examples = encode_one(PromptCompletion(" ".join(make_sentences(5)), " home"), tokenizer, 32)
    assert all(example.num_loss_tokens for example in examples)
    assert tokenizer.decode(predicted(examples)) == " home<|eos|>"


def test_a_completion_with_an_empty_prompt_is_encoded_like_a_text(tokenizer):
    assert encode_one(PromptCompletion("", "home"), tokenizer) == encode_one("home", tokenizer)


# -------------------------------------------------------------------------------------------------------- the dataset


def dataset_of(texts: list, tokenizer, seed: int = 0, earlier: SplitHistory | None = None, **recipe):
    reading = Reading([Document(str(number), text) for number, text in enumerate(texts)], [LeftOut("x", "empty")])
    recipe = Recipe.load("notes").replace(**recipe)
    return make_dataset(reading, tokenizer, recipe, 128, Drawing(seed, earlier or SplitHistory(salt=b"salt")))


def test_the_dataset_reports_what_was_used_and_what_was_left_out(tokenizer):
    data = dataset_of(make_sentences(8), tokenizer)
    assert data.context_length == 128  # the model's limit, which is below the recipe's
    assert data.num_documents == len(data.examples) == 8
    assert data.left_out == [LeftOut("x", "empty")]
    assert data.num_tokens == sum(len(example.input_ids) for example in data.examples)
    assert data.padding_share == pytest.approx(1 - data.num_tokens / (8 * 128))
    assert dataset_of(make_sentences(8), tokenizer, context_length=32).context_length == 32


@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_few_long_documents_are_cut_at_the_context_only(kind, count):
    """Pieces of one document share its topic and template: none could test what was learnt from another."""
    tokenizer, text = tokenizer_of(kind), " ".join(make_sentences(60))
    texts = [text[number::count] for number in range(count)]
    data = dataset_of(texts, tokenizer)
    assert data.num_documents == count
    assert data.examples == encode([Document(str(n), text) for n, text in enumerate(texts)], tokenizer, 128)[0]
    assert data.draw.kind == "none"
    assert data.draw.splits(data.examples) == []


@pytest.mark.parametrize("kind", KINDS)
def test_one_text_of_just_enough_tokens_can_be_trained_on(kind):
    one, other = (dataset_of(["q" * length], tokenizer_of(kind)) for length in (MIN_TOKENS + 1, MIN_TOKENS - 2))
    assert one.draw.splits(one.examples) == []
    with pytest.raises(TextsError, match="Too little text"):
        other.draw.splits(other.examples)


def test_lines_that_stand_in_many_documents_are_boilerplate(tokenizer):
    data = dataset_of([f"kept by the harbour office\n{text}" for text in make_sentences(20)], tokenizer)
    for example in data.examples:
        common = [token for token, flag in zip(example.labels, example.in_boilerplate, strict=True) if flag]
        assert tokenizer.decode(common) == "kept by the harbour office\n"
    assert not any(example.in_boilerplate for example in dataset_of(make_sentences(20), tokenizer).examples)


def test_word_level_tokenizers_are_supported():
    """They have no bytes, drop blanks, and have a token for unknown words."""
    words = {"[UNK]": 0, "the": 1, "map": 2, ".": 3}
    backend = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    examples = encode_one("the map . the bread . " * 20, PreTrainedTokenizerFast(tokenizer_object=backend), 16)
    assert predicted(examples) == ([1, 2, 3, 1, 0, 3] * 20)[1:]
    assert {example.input_ids[-1] for example in examples[:-1]} == {3}


def test_all_examples_of_a_document_are_in_one_split(tokenizer):
    data = dataset_of([" ".join(make_sentences(8, seed)) for seed in range(20)], tokenizer)
    assert len(data.examples) >= 40
    (split,) = data.draw.splits(data.examples)
    parts = [{example.document for example in part} for part in (split.train, split.validation, split.test)]
    assert sum(map(len, parts)) == len(set.union(*parts)) == 20
    assert len(split.train) + len(split.validation) + len(split.test) == len(data.examples)
