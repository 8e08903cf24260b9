"""Ghost text: the words that a model is sure of, wherever a text ends, and the same from what a decoder has kept.

The oracle is a language of a few texts with weights: the probability that one goes on with certain characters is known.
"""

import copy
import random
import re
import threading
from collections import Counter
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from builders import BUNDLED_FOLDER, make_llama, make_tokenizer
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from sebp_edge.basics.stopping import StopRequested, StopSignal
from sebp_edge.engine.models import completion
from sebp_edge.engine.models.completion import Completion, complete_text
from sebp_edge.engine.models.decoding import Decoder
from sebp_edge.engine.models.vocabulary import Vocabulary
from sebp_edge.errors import OptionError
from sebp_edge.lessons.prompts import encode_texts

WORDS = [
    *("ferry", "ferries", "feather", "fe", "don't", "done", "do", "the", "they", "them", "émigré", "e\u0301tude"),
    *("état", "unbelievable", "unbelieving", "3.5", "35", "well-known", "🏝️", "👍🏽", "👍", "日本語", "日本"),
    *("東京", "naïve", "I", "__init__"),
]
SIGNS = [" ", " ", " ", " ", "  ", ", ", ". ", "! ", "\n", "\n\n", "", "。", " (", ') "', "…\n", "\t"]


def random_text(draw, is_ascii=False):
    words, signs = ([each for each in found if each.isascii() or not is_ascii] for found in (WORDS, SIGNS))
    return "".join(draw.choice(words) + draw.choice(signs) for _ in range(draw.randint(1, 12)))


def sentencepiece(prefix):
    """A tokenizer as Llama 2's, which puts a space before texts, or as Gemma's, which does not."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    special = ["<s>", "</s>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=special, limit_alphabet=40, show_progress=False)
    words = [pre_tokenizers.Split("▁", "merged_with_next"), pre_tokenizers.Split(Regex("[-.]"), "isolated")]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(words)
    tokenizer.train_from_iterator([" ".join(WORDS * 3)], trainer)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([])
    stripped = [decoders.Strip(" ", 1, 0)] if prefix else []
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *stripped]
    tokenizer.decoder = decoders.Sequence(parts)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    # Bytes were trained as special tokens, so that they have an id; they are none.
    plain = Tokenizer.from_str(
        re.sub(r'\{[^{}]*"content":"<0x..>"[^{}]*\},?', "", tokenizer.to_str()).replace(",]", "]")
    )
    return PreTrainedTokenizerFast(tokenizer_object=plain, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


TOKENIZERS = {
    "byte-level": make_tokenizer,
    "Llama 3's words": lambda: AutoTokenizer.from_pretrained(BUNDLED_FOLDER),
    "SentencePiece": lambda: sentencepiece(prefix=True),
    "SentencePiece without a space": lambda: sentencepiece(prefix=False),
}


def writer_of(tokenizer, size=None):
    """A tokenizer with what completions need of it."""
    return SimpleNamespace(
        tokenizer=tokenizer,
        size=size or len(tokenizer),
        vocabulary=Vocabulary(tokenizer, size or len(tokenizer)),
        encode=partial(encode_texts, tokenizer=tokenizer),
    )


@pytest.fixture(scope="module", params=TOKENIZERS)
def written(request):
    return writer_of(TOKENIZERS[request.param]())


@pytest.fixture(scope="module")
def llama():
    return make_llama(max_position_embeddings=512).eval()


@pytest.fixture(scope="module")
def plain(llama):
    return writer_of(make_tokenizer(), llama.config.vocab_size)


@pytest.fixture
def sizes(llama):
    """How many tokens each pass of the model computes."""
    found = []
    hook = llama.register_forward_pre_hook(
        lambda *given: found.append(given[2]["input_ids"].shape[1]), with_kwargs=True
    )
    yield found
    hook.remove()


class Language:
    """Texts with weights, as a decoder: its next tokens have the probabilities that these texts give them."""

    def __init__(self, texts, written):
        self.texts, self._size, self._vocabulary = texts, written.size, written.vocabulary
        self._tokens = {text: [*written.encode([text])[0], written.tokenizer.eos_token_id] for text in texts}

    def decode(self, prompts, end_ids, sampling, *, choose, check):
        (tokens,) = map(list, prompts)
        for _ in range(sampling.max_new_tokens):
            token = choose(tokens, self.next_logits(tokens, 1))
            if token is None:
                return
            tokens.append(token)

    def next_logits(self, prompt, count, check=None):
        logits = torch.full([count, self._size], -70.0)
        for at, size in enumerate(range(len(prompt) - count + 1, len(prompt) + 1)):
            weights = Counter()
            for text, weight in self.texts.items():
                tokens = self._tokens[text]
                if tokens[:size] == prompt[:size] and len(tokens) > size:
                    weights[tokens[size]] += weight
            logits[at, list(weights)] = torch.tensor(list(weights.values())).log()
        return logits

    def probability(self, before, text):
        """That a text that begins with `before` goes on with `text`, which ends there or before another word."""
        begun = {each: weight for each, weight in self.texts.items() if each.startswith(before)}
        going_on = [weight for each, weight in begun.items() if self._has(each, before + text)]
        return sum(going_on) / sum(begun.values())

    def tokens_at(self, beginning, at):
        """The tokens in which the character at an offset is, in all texts that begin so; of ASCII texts."""
        return {self._token_at(text, at) for text in self.texts if text.startswith(beginning)}

    def _token_at(self, text, at):
        left = len(text) - at  # from the end, since SentencePiece begins with a space
        for token in reversed(self._tokens[text][:-1]):
            left -= len(self._vocabulary[token])
            if left <= 0:
                return token
        raise AssertionError(at)

    def _has(self, text, beginning):
        return text.startswith(beginning) and is_word_end(text, len(beginning))


def is_word_end(text, at):
    inside = r"[A-Za-z0-9_éïà'\u0301]"
    following = text[at : at + 1]
    joins = re.match("[\u0301\ufe0f\U0001f3fb-\U0001f3ff]", following)
    return not (joins or (re.match(inside, text[at - 1]) and re.match(inside, following)))


def complete(decoder, written, before, min_probability=0.5, max_new_tokens=300, **options):
    options = {"max_new_tokens": max_new_tokens, "min_probability": min_probability} | options
    return complete_text(decoder, written.vocabulary, written.encode, before, **options)


def make_language(written, draw, is_ascii):
    """Texts of which several begin alike, and a beginning of one of them."""
    common = random_text(draw, is_ascii)
    texts = {common + random_text(draw, is_ascii): draw.random() for _ in range(6)}
    chosen = draw.choice([*texts])
    for _ in range(4):
        cut = draw.randint(len(common), len(chosen))
        texts[chosen[:cut] + random_text(draw, is_ascii)] = draw.random()
    return Language(texts, written), chosen[: draw.randint(0, len(chosen))]


def longest(language, before, min_probability):
    """The longest text that ends with a word, within a line and a sentence, and has this probability."""
    found = [""]
    for text in language.texts:
        for end in range(len(before) + 1, len(text) + 1):
            rest = text[len(before) : end]
            if re.search(r"[\r\n]", rest) or re.search(r"[.!?…][\"'”’)\]]*\s|[。！？].", rest):
                break
            if text.startswith(before) and not rest[-1].isspace() and is_word_end(text, end):
                found += [rest] * (language.probability(before, rest) >= min_probability)
    return max(found, key=len)


@pytest.mark.parametrize("is_ascii", [True, False])
def test_the_text_is_the_longest_that_has_the_probability(written, is_ascii):
    shown = 0
    for seed in random.sample(range(10**6), 12):
        language, before = make_language(written, random.Random(seed), is_ascii)
        found = complete(language, written, before, max_passes=100)
        assert longest(language, before, 0.5).startswith(found.text), seed
        # Ways with a tenth of the probability together are not computed; nor is what a part of a character may become.
        # Nor are signs shown that only begin the next tokens, as "-" does "-known" and "-ferry".
        surely = longest(language, before, 0.5 * 1.12)
        if is_ascii and not found.text.startswith(surely):
            assert re.fullmatch(r"[^\w\s]+", surely.removeprefix(found.text)), seed
            assert len(language.tokens_at(before + surely, len(before + found.text))) > 1, seed
        for at, probability in enumerate(found.probabilities, start=1):
            assert 0.5 <= probability <= language.probability(before, "".join(found.words[:at])) + 1e-4, seed
        shown += bool(found.text)
    assert shown > 3


@pytest.mark.parametrize(
    ("texts", "before", "expected"),
    [
        (["the ferry left"], "", "the ferry left"),
        (["the ferry left"], "the", " ferry left"),
        (["the ferry left"], "the ", "ferry left"),
        (["the ferry left"], "the fer", "ry left"),
        (["the ferry left", "the ferries left", "the ferrous oxide"], "the ferr", ""),
        (["the ferry left. It was late."], "the fer", "ry left."),
        (['"the ferry left?" It was late.'], '"the fer', 'ry left?"'),
        (["35.5 or 3.5 a day"], "35.", "5 or 3.5 a day"),
        (["the ferry left\nIt was late."], "the fer", "ry left"),
        (["the ferry left   \r\nlate."], "the fer", "ry left"),
        (["the ferry\n\nleft late"], "the ferry\n", ""),
        (["the ferry\nleft late"], "the ferry\n", "left late"),
        (["we don't"], "we d", "on't"),
        (["👍🏽 the 🏝️ left"], "👍", "🏽 the 🏝️ left"),
        (["日本語。日本。"], "日", "本語。"),
        (["the e\u0301tat left"], "the e", "\u0301tat left"),
        (["the  ferry\tleft"], "the ", " ferry\tleft"),
    ],
)
def test_the_text_ends_with_its_sentence_or_line(written, texts, before, expected):
    language = Language(dict.fromkeys(texts, 1.0), written)
    found = complete(language, written, before, max_passes=100)
    assert found.text == expected
    assert found.probabilities == pytest.approx([1.0] * len(found.words))
    assert (found.num_tokens > 0) == bool(expected)


def test_words_are_received_as_soon_as_the_model_is_sure(written):
    language, received = Language({"the ferry left at six": 3, "the ferry left at ten": 2}, written), []
    found = complete(language, written, "the f", on_text=received.append)
    assert tuple(received) == found.words == ("erry", " left", " at", " six")
    assert found.probabilities == pytest.approx([1, 1, 1, 0.6])
    assert complete(language, written, "the f", 0.7).words == found.words[:3]


def test_no_word_is_cut_by_the_limit_of_tokens(plain):
    language = Language({"the unbelievable ferry": 1.0}, plain)
    texts = {complete(language, plain, "the", max_new_tokens=count).text for count in range(1, 30)}
    assert texts == {"", " unbelievable", " unbelievable ferry"}


def test_without_a_beginning_token_nothing_is_completed_before_the_first_word():
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.Sequence([])
    written = writer_of(tokenizer)
    language = Language({"the ferry": 1.0}, written)
    assert complete(language, written, "") == Completion()
    assert complete(language, written, "the f", max_passes=100).text == "erry"


def edited(text, draw):
    """A text as an editor has it next: typed, erased, edited in the middle, or another one."""
    middle, end = len(text) // 2, draw.randint(0, len(text))
    inserted = text[:middle] + draw.choice(WORDS) + text[middle:]
    typed = text + draw.choice("abefrty .")
    return draw.choice([typed, f"{text} {random_text(draw)}", text[:end], inserted, random_text(draw)])


@pytest.mark.slow
def test_an_edited_text_is_completed_as_by_a_fresh_decoder(plain, llama):
    draw = random.Random()
    kept, shown, text, before = Decoder(llama, keeps=True), 0, random_text(draw), ""
    for edits in range(200):
        text, before = draw.choice([edited(text, draw), before]), text
        found, expected = (complete(each, plain, text, 1e-9, 6) for each in (kept, Decoder(llama)))
        assert found.words == expected.words
        assert found.probabilities == pytest.approx(expected.probabilities, rel=1e-4)
        shown += bool(found.text)
        # Of 25 texts, 3 to 24 have a completion.
        if edits >= 25 and shown > 5:
            break
    assert shown > 5


@pytest.mark.gpu
def test_an_edited_text_is_completed_on_a_gpu_as_by_a_fresh_decoder(plain, llama):
    draw, text = random.Random(), random_text(random.Random())
    model = copy.deepcopy(llama).cuda()
    kept = Decoder(model, keeps=True)
    for _ in range(25):
        text = edited(text, draw)
        found, expected = (complete(each, plain, text, 1e-9, 6) for each in (kept, Decoder(model)))
        assert found.words == expected.words
        assert found.probabilities == pytest.approx(expected.probabilities, rel=1e-3)


def test_what_was_typed_before_is_not_computed_again(plain, llama, sizes):
    text, decoder = "the ferry left at six and the wind was from the west so we took ", Decoder(llama, keeps=True)
    complete(decoder, plain, text, 0.5)
    sizes.clear()
    complete(decoder, plain, text + "the ", 0.5)
    assert sum(sizes) <= 2 * completion.MAX_PASSES
    assert len(plain.encode([text])[0]) > 16


def test_a_stopped_call_keeps_what_it_has_computed(plain, llama, sizes):
    text, event = "the ferry left at six and the wind was from the west so we took the ", threading.Event()
    decoder = Decoder(llama, keeps=True)
    event.set()
    with pytest.raises(StopRequested):
        complete(decoder, plain, text, check=StopSignal(event).check)
    assert sizes == [len(plain.encode([text])[0])]
    sizes.clear()
    found = complete(decoder, plain, text, 1e-9)
    assert sizes[0] == 2
    assert found.words == complete(Decoder(llama), plain, text, 1e-9).words


@pytest.mark.parametrize("options", [{"min_probability": 1.1}, {"min_probability": True}, {"max_new_tokens": 0}])
def test_options_out_of_range_are_refused(plain, llama, options):
    with pytest.raises(OptionError, match=next(iter(options))):
        complete(Decoder(llama), plain, "the", **options)
