"""English verbs are turned into the forms that questions need, or left alone."""

import pytest

from sebp_edge.questions.verbs import Verb, is_participle, known_form, likely_form, third_person


@pytest.mark.parametrize(
    ("word", "base", "tense"),
    [
        ("opened", "open", "past"),
        ("stopped", "stop", "past"),
        ("baked", "bake", "past"),
        ("tried", "try", "past"),
        ("wrote", "write", "past"),
        ("cost", "cost", "past"),
        ("carries", "carry", "third"),
        ("fixes", "fix", "third"),
        ("goes", "go", "third"),
    ],
)
def test_known_forms_have_a_base(word, base, tense):
    assert known_form(word, plain=False) == Verb(base, tense)


def test_base_forms_are_verbs_only_after_plural_subjects():
    assert known_form("open", plain=False) is None
    assert known_form("open", plain=True) == Verb("open", "plain")


def test_an_unknown_past_tense_has_no_base():
    assert likely_form("chafed") == Verb(None, "past")
    assert likely_form("embroiders") == Verb("embroider", "third")
    assert likely_form("always") is None
    assert likely_form("bus") is None
    assert likely_form("Jonas") is None


def test_third_persons_are_spelt_right():
    assert [third_person(base) for base in ("try", "play", "watch", "have", "lead")] == [
        "tries",
        "plays",
        "watches",
        "has",
        "leads",
    ]


def test_participles_are_known_by_form_or_by_ending():
    assert all(is_participle(word) for word in ("written", "built", "serviced", "chafed"))
    assert not any(is_participle(word) for word in ("red", "need", "kitchen"))
