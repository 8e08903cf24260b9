"""Random strings, shuffled words, copies and unreadable languages are found; real texts of many kinds are not."""

import base64
import random
import string
import uuid
from pathlib import Path

import pytest
from pace import at_most
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from sebp_edge.engine.models.catalog import resolve
from sebp_edge.engine.models.loading import local_tokenizer
from sebp_edge.lessons.boilerplate import common_lines, common_spans
from sebp_edge.lessons.concerns import find_concerns

ROOT = Path(__file__).parents[2]
CHARACTERS, WORDS, COPIES = (
    "The characters of these texts",
    "The words of these texts",
    "copies or near-duplicates of another",
)
REPETITION, UNREADABLE, UNKNOWN = "These texts repeat", "tokens for each character", "does not know"

GERMAN = """Heute war ich beim Zahnarzt, danach einkaufen. Die Milch war aus, also habe ich Hafermilch genommen.
Besprechung mit Frau Kühn: Angebot bis Freitag, Budget noch offen. Rückruf wegen der Räume im zweiten Stock.
Rezept für Linsensuppe: Zwiebeln anbraten, Linsen und Brühe dazu, dreißig Minuten kochen, mit Essig abschmecken.
Der Zug hatte wieder Verspätung. Im Buch bis Seite 120 gelesen, es wird langsam spannend, und ich bin müde.
Ideen für den Garten: Tomaten an die Südwand, Kräuter ans Küchenfenster, die alte Bank endlich streichen."""
FRENCH = """Ce matin, réunion avec l'équipe : le budget n'est pas encore décidé, donc on commence par la documentation.
À midi, j'ai déjeuné avec Hélène près de la gare ; elle m'a prêté un livre sur les jardins japonais.
Il faut rappeler le plombier avant vendredi et acheter des piles, du papier et un cadeau pour ma mère.
Le soir, promenade le long du canal. Il faisait déjà froid, mais la lumière sur l'eau était très belle."""
CHINESE = """今天上午开了项目会议，讨论了下个月的计划。李老师说预算还没有批下来，所以我们先做文档。
下午去图书馆借了两本书，一本是关于数据库的，一本是小说。晚上和朋友一起吃饭，聊了很多以前的事情。
明天要早起去机场接人，不要忘记带护照复印件。周末打算去爬山，如果下雨就在家里看书，顺便把房间打扫一下。
昨天的会议记录已经发给大家了，请在星期五之前提出意见。我觉得这个计划还需要修改，特别是第二部分的时间安排。
早上下雨，地铁上人很多，差一点迟到。中午吃了一碗面，味道不错，就是有点咸。晚上早点睡觉，明天还要上班。"""
JAPANESE = """今日は朝から雨だった。駅前の喫茶店でコーヒーを飲みながら、来週の会議の資料を直した。
田中さんが来て、昨日の話の続きをした。予算はまだ決まっていない。帰りにスーパーで牛乳とパンを買った。
夜は本を読んで、早く寝た。明日は晴れるらしいので、自転車で会社に行こうと思う。
週末は母の誕生日なので、花を買って実家に帰る予定だ。弟も来ると言っていたが、まだ分からない。"""


@pytest.fixture(scope="module")
def tokenizer():
    return local_tokenizer(resolve("tiny"))


def concerns_of(texts, tokenizer, cluster_of=None, copies=0):
    texts = dict(enumerate([texts] if isinstance(texts, str) else texts))
    return find_concerns(texts.values(), cluster_of or {document: document for document in texts}, copies, tokenizer)


def files(pattern: str) -> list[str]:
    found = [path.read_text(encoding="utf-8") for path in sorted(ROOT.glob(pattern)) if path.is_file()]
    assert found
    return found


def table(rows: int) -> str:
    order = random.Random(rows)
    shops, kinds = ["Baker", "Bookshop", "Station", "Market", "Cinema"], ["food", "travel", "books", "gifts"]
    lines = (
        f"2024-{order.randint(1, 12):02}-{order.randint(1, 28):02},{order.choice(shops)},{order.choice(kinds)},"
        f"{order.uniform(1, 200):.2f}"
        for _ in range(rows)
    )
    return "date,payee,category,amount\n" + "\n".join(lines)


def measurements(rows: int) -> str:
    order = random.Random(rows)
    return "\n".join(
        f"{row},{order.gauss(0, 1):.3f},{order.gauss(5, 2):.2f},{order.random():.4f}" for row in range(rows)
    )


def lists(items: str, count: int, separator: str, length: int) -> list[str]:
    order = random.Random(count)
    return [separator.join(order.sample(items.split(), length)) for _ in range(count)]


FOODS = "milk eggs bread butter rice coffee tea apples onions garlic salt pasta cheese"
REAL = {
    "notes": files("examples/notes/*"),
    "code": files("sebp_edge/lessons/*.py"),
    "one file": files("sebp_edge/lessons/tokens.py"),
    "documents": [*files("*.md"), *files("kernels/bench/how-fast-is-a-step.md")],
    "licence": files("LICENSE"),
    "result tables": files("kernels/bench/results/*.csv"),
    "a small table": table(30),
    "tables": [table(50) for _ in range(6)],
    "measurements": measurements(300),
    "German": GERMAN,
    "French": FRENCH,
    "shopping lists": lists(FOODS, 60, ", ", 7),
    "items in lines": lists(FOODS, 60, "\n", 7),
    "tags": lists("python git sql html bash vim linux docker", 90, " ", 4),
    "a short text": "home",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REAL)
def test_real_texts_raise_no_concern(name, tokenizer):
    assert concerns_of(REAL[name], tokenizer) == ()


@pytest.mark.slow
def test_no_part_of_real_texts_raises_a_concern(tokenizer):
    texts = [*REAL["notes"], *REAL["code"], *REAL["documents"], *REAL["licence"], *files("kernels/ops/*.py")]
    parts = [text[begin : begin + 1500] for text in texts for begin in range(0, len(text), 1500)]
    assert len(parts) > 150
    assert [part for part in parts if concerns_of(part, tokenizer)] == []


def random_strings() -> dict[str, list[str]]:
    order = random.Random(0)

    def letters(alphabet: str, size: int = 2000) -> str:
        return "".join(order.choices(alphabet, k=size))

    return {
        "base64": [base64.encodebytes(order.randbytes(1500)).decode()],
        "base64 in short documents": [base64.b64encode(order.randbytes(60)).decode() for _ in range(50)],
        "hex": [order.randbytes(600).hex()],
        "hex in pairs": [order.randbytes(600).hex(" ")],
        "UUIDs": [str(uuid.UUID(bytes=order.randbytes(16), version=4)) for _ in range(50)],
        "letters": [letters(string.ascii_lowercase)],
        "letters and spaces": [letters(string.ascii_lowercase + 5 * " ")],
        "passwords": ["\n".join(letters(string.ascii_letters + string.digits + "!?$%", 12) for _ in range(200))],
        "emoji": [letters("".join(map(chr, range(0x1F600, 0x1F640))))],
        "shuffled characters": ["".join(order.sample(text, len(text))) for text in files("examples/notes/*")],
    }


@pytest.mark.parametrize("name", random_strings())
def test_random_strings_are_found(name, tokenizer):
    first, *others = concerns_of(random_strings()[name], tokenizer)
    assert CHARACTERS in first
    assert (len(others) == 1 and UNREADABLE in others[0]) if name == "emoji" else not others


@pytest.mark.slow
@pytest.mark.parametrize("name", ["documents", "code"])
def test_shuffled_words_are_found(name, tokenizer):
    for seed in range(3):
        order = random.Random(seed)
        shuffled = [" ".join(order.sample(words, len(words))) for words in map(str.split, REAL[name])]
        [concern] = concerns_of(shuffled, tokenizer)
        assert WORDS in concern


@pytest.mark.parametrize("text", [CHINESE, JAPANESE], ids=["Chinese", "Japanese"])
def test_a_language_that_the_tokenizer_cannot_read_is_found(text, tokenizer):
    [concern] = concerns_of(text, tokenizer)
    assert UNREADABLE in concern
    assert concerns_of([text, *REAL["notes"]], tokenizer) == ()


def test_unknown_tokens_are_found():
    backend = Tokenizer(models.WordLevel({"[UNK]": 0, "the": 1, "map": 2}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    words = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")
    assert concerns_of("the map " * 19 + "the bread", words) == ()
    [concern] = concerns_of("the map the bread " * 5, words)
    assert "25 %" in concern
    assert UNKNOWN in concern


@pytest.mark.slow
def test_more_copies_than_other_documents_are_found(tokenizer):
    notes = REAL["code"][:6]
    pairs = {0: 0, 1: 0, 2: 2, 3: 2, 4: 4, 5: 4}
    assert concerns_of(notes, tokenizer, pairs) == ()
    most = {0: 0, 1: 0, 2: 0, 3: 0, 4: 0, 5: 5}
    for cluster_of, copies, expected in [(most, 0, "4 of 6"), (pairs, 1, "4 of 7"), (None, 7, "7 of 13")]:
        [concern] = concerns_of(notes, tokenizer, cluster_of, copies)
        assert expected in concern
        assert COPIES in concern
    assert concerns_of(notes, tokenizer, copies=6) == ()


def test_texts_that_repeat_themselves_are_found(tokenizer):
    for text in ["\0" * 5000, "the same line again\n" * 1000, "-" * 700]:
        [concern] = concerns_of(text, tokenizer)
        assert REPETITION in concern
    # As a chat's first message.
    assert concerns_of([f"{GERMAN}\n{word}" for word in FRENCH.split()], tokenizer) == ()


def test_concerns_contain_no_text_of_the_user(tokenizer):
    order = random.Random(0)
    for text in ["wolpertinger " * 900, " ".join(order.choices(["wolpertinger", *FOODS.split()], k=900)), "文" * 900]:
        concerns = concerns_of(text, tokenizer)
        assert concerns
        assert not {word for word in [*FOODS.split(), "wolpertinger", "文"] if word in " ".join(concerns).split()}


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2000])
def test_megabytes_take_seconds(count, tokenizer):
    size = 4_000_000 // count
    sentences = "\n".join([*files("*.md"), *files("kernels/ops/*.py")])
    text = sentences * (1 + 4_000_000 // len(sentences))
    texts = {number: text[number * size : (number + 1) * size] for number in range(count)}
    cluster_of = {document: document for document in texts}
    with at_most(3.2):
        lines = common_lines(texts, cluster_of)
        for each in texts.values():
            common_spans(each, lines or frozenset({"end"}))
        find_concerns(texts.values(), cluster_of, 0, tokenizer)
