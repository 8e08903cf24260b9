"""Edited copies, templates and quoted notes are found, in any language; documents that share little are not."""

import random
from pathlib import Path

import numpy as np
import pytest
from pace import at_most
from random_texts import edit, words

from sebp_edge.lessons.near_duplicates import Relations, Shingler, compare, find_clusters
from sebp_edge.values.remembered import SKETCH_SIZE

EXAMPLES = {
    path.name: text
    for path in sorted((Path(__file__).parents[2] / "examples/notes").glob("*/*.md"))
    if (text := path.read_text(encoding="utf-8"))
}


def related(*texts: str, **options) -> Relations:
    shingler = Shingler(b"salt")
    return compare([shingler.shingles(text) for text in texts], **options)


def clusters_of(*texts: str) -> list[int]:
    return find_clusters(len(texts), related(*texts)).cluster_of


def are_near(first: str, second: str) -> bool:
    return bool(related(first, second).near)


@pytest.mark.parametrize("share", [0, 0.05, 0.1, 0.15])
def test_edited_copies_are_near_duplicates(share):
    for seed in range(20):
        text = words(150, seed)
        assert are_near(text, edit(text, share, seed))


def test_case_punctuation_spaces_and_widths_do_not_count():
    assert are_near("The ferry left at SIX; we took the bread.", "the  ferry -- left at six\n\n- we took the bread")
    assert are_near("Ｔｈｅ ferry cafe\u0301 left at six", "The ferry caf\u00e9 left at six")


def test_a_template_with_another_date_is_a_near_duplicate():
    def daily(day: str, own: str) -> str:
        return f"# {day}\n## Slept\nwell enough\n## Done\n{own}\n## Tomorrow\nwrite to the harbour office about the map"

    first = daily("2024-01-09", "repaired the boat")
    assert are_near(first, daily("9.12.2025", "baked bread"))
    assert not are_near(first, words(20, 0))


def test_only_the_copy_among_real_notes_is_a_near_duplicate():
    names, notes = list(EXAMPLES), list(EXAMPLES.values())
    found = related(*notes)
    assert [{names[first], names[second]} for first, second in found.near] == [
        {"lentil-soup-copy.md", "lentil-soup.md"}
    ]
    assert found.holding == []


@pytest.mark.parametrize(
    ("text", "other"),
    [
        (
            "私は毎朝六時に起きて、港まで歩いてから朝ごはんを食べます。",
            "今日は雨だったので、家で本を読んで過ごしました。",
        ),
        ("风从西边吹来的时候，我们带着面包和旧地图回家。", "昨天晚上他在图书馆里看完了那本很厚的小说。"),
        ("паром ушёл в шесть утра и ветер дул с запада весь день", "вчера мы читали старую книгу про море и горы дома"),
        (
            "μια παλιά βάρκα έφυγε στις έξι το πρωί από το λιμάνι",
            "χθες διαβάσαμε ένα βιβλίο για τα βουνά και τη θάλασσα",
        ),
        ("सुबह छह बजे नाव चली गई और हवा पश्चिम से आ रही थी", "कल शाम हमने घर पर पुरानी किताब पढ़ी और चाय पी"),
        ("غادرت العبارة في السادسة صباحا وكانت الريح من الغرب", "قرأنا أمس كتابا قديما عن البحر والجبال في البيت"),
        (
            "배는 아침 여섯 시에 떠났고 바람은 서쪽에서 불어왔다 우리는 집으로",
            "어제 저녁 우리는 오래된 책을 읽고 차를 마셨다 그리고 잠들었다",
        ),
    ],
)
def test_any_language(text, other):
    assert are_near(f"1. {text} 2023", f"2. {text} 2024")
    assert not are_near(text, other)


def test_a_document_belongs_to_the_one_document_that_it_holds():
    note = words(60, 0)
    digest = f"{words(100, 1)} {note} {words(100, 2)}"
    assert related(note, digest) == Relations(near=[], holding=[(1, 0)])
    clusters = find_clusters(3, related(note, digest, words(80, 3)))
    assert (clusters.cluster_of, clusters.bridged) == ([0, 0, 1], set())


def test_a_document_that_holds_several_bridges_their_clusters():
    notes = [words(60, seed) for seed in range(4)]
    weekly = "\n".join(notes[:3])
    clusters = find_clusters(5, related(*notes, weekly))
    assert clusters.cluster_of == [0, 1, 2, 3, 4]
    assert clusters.bridged == {0, 1, 2, 4}


def test_a_document_that_holds_near_duplicates_only_bridges_nothing():
    note = words(60, 0)
    copies = [note, edit(note, 0.1, 1), edit(note, 0.1, 2)]
    clusters = find_clusters(4, related(*copies, f"{words(90, 5)} {note} {words(90, 6)}"))
    assert (clusters.cluster_of, clusters.bridged) == ([0, 0, 0, 0], set())


def brute_force(texts: list[str]) -> Relations:
    shingler = Shingler(b"salt")
    sets = [set(shingler.shingles(text).hashes.tolist()) for text in texts]
    near, holding = [], []
    for second, larger in enumerate(sets):
        for first, smaller in enumerate(sets[:second]):
            pair = (second, first) if len(larger) > len(smaller) else (first, second)
            shared, sizes = len(smaller & larger), sorted((len(smaller), len(larger)))
            if shared and shared >= 0.4 * sizes[1] and (shared >= 6 or shared == sizes[1]):
                near.append((first, second))
            elif shared >= 0.5 * sizes[0] >= 8 and sizes[0] < sizes[1]:
                holding.append(pair)
    return Relations(sorted(near), sorted(holding))


@pytest.mark.parametrize("max_occurrences", [2_000_000, 1500])
def test_all_pairs_are_found_that_comparing_each_with_each_finds(max_occurrences):
    """Also if only a part of the shingles is used to find the pairs."""
    draw = random.Random(0)
    texts = [words(draw.randrange(1, 120), seed) for seed in range(60)]
    texts += [edit(text, draw.random() * 0.3, text) for text in texts]
    texts += [" ".join(draw.sample(texts, 3)) for _ in range(10)]
    found, expected = related(*texts, max_occurrences=max_occurrences), brute_force(texts)
    assert len(expected.near) > 30
    assert len(expected.holding) > 20
    if max_occurrences > 10_000:
        assert (sorted(found.near), sorted(found.holding)) == (expected.near, expected.holding)
    else:
        assert set(found.near) <= set(expected.near)
        assert len(found.near) > 0.9 * len(expected.near)


@pytest.mark.slow
def test_three_thousand_notes_take_less_than_four_seconds():
    notes = [words(200, seed) for seed in range(1500)]
    notes += [edit(note, 0.1) for note in notes]
    with at_most(4):
        clusters = clusters_of(*notes)
    assert clusters == [*range(1500), *range(1500)]


def test_a_sketch_shows_what_its_document_is_related_to():
    note = words(300, 0)
    shingler = Shingler(b"salt")
    sketch = shingler.shingles(note).sketch()
    assert len(sketch.hashes) == SKETCH_SIZE < sketch.number
    texts = {
        "near": edit(note, 0.05),
        "unrelated": words(300, 1),
        "holds it": f"{words(400, 2)} {note} {words(400, 3)}",
        "held": " ".join(note.split()[:90]),
        # A few of the sketch's shingles would stand for more than this text has.
        "one phrase": f"{words(20, 4)} {' '.join(note.split()[:8])}",
    }
    names = [*texts, "sketch"]
    found = compare([*(shingler.shingles(text) for text in texts.values()), sketch])
    assert [(names[first], names[second]) for first, second in found.near] == [("near", "sketch")]
    pairs = {(names[first], names[second]) for first, second in found.holding}
    assert {pair for pair in pairs if "sketch" in pair} == {("holds it", "sketch"), ("sketch", "held")}


def test_shingles_need_the_salt():
    text = words(100, 0)
    first, again, other = (Shingler(salt).shingles(text).hashes for salt in (b"a", b"a", b"b"))
    assert np.array_equal(first, again)
    assert not np.isin(first, other).any()


# Letters that change at the end of a word or beside a combining mark, wide and full-width ones, blanks of many kinds.
ODD = [*"aΣσ1日。,- \n\t\u3000", "\u0301", "é", "Å", "ﬁ", "ｶﾞ", "각", "İ", "\u00a8", "…", "🙂"]


@pytest.mark.parametrize("piece", [1, 7, 64])
def test_a_text_in_pieces_has_the_shingles_of_the_whole(piece):
    draw = random.Random(piece)
    texts = ["".join(draw.choices(ODD, k=draw.randrange(400))) for _ in range(60)] + ["", ".", "? ?", "word", "a b"]
    whole = [Shingler(b"salt").shingles(text) for text in texts]
    for text, expected in zip(texts, whole, strict=True):
        found = Shingler(b"salt", piece, max_words=5).shingles(text)
        assert found.hashes.tolist() == expected.hashes.tolist() and found.number == expected.number
