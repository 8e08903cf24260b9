"""The benchmark of reading: its people, its questions, and what counts as right."""

import pytest
from builders import QUICK_TEMPLATE, make_tokenizer
from reader_notes import NO_EFFECT, make_quick, save_model, write_general

from quality import know_people, reading
from quality.quizzes import is_right, stands_in

SEEDS = range(4)
TUNING, TEST = know_people.TUNING, know_people.TEST


@pytest.mark.parametrize("seed", SEEDS)
def test_the_same_seed_gives_the_same_person(seed):
    assert know_people.person(seed) == know_people.person(seed)
    assert know_people.person(seed) != know_people.person(seed + 3)


@pytest.mark.parametrize("notes", [-1, 0, 97])
def test_a_number_of_notes_that_cannot_be_invented_is_refused(notes):
    with pytest.raises(ValueError, match=rf"1 to 96 notes, but {notes} were asked for"):
        know_people.person(0, notes, TUNING)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("kinds", "notes"), [(TUNING, 60), (TUNING, 96), (TEST, 60)])
def test_each_note_is_asked_twice_and_answers_its_own_questions_alone(seed, kinds, notes):
    person = know_people.person(seed, notes, kinds)
    texts = {note.file: note.text for note in person.notes}
    assert len(texts) == notes and len(set(texts.values())) == notes
    assert len({asked.question for asked in person.quiz}) == len(person.quiz) == 2 * notes
    assert all("{" not in text and "}" not in text for text in (*texts.values(), *(q.question for q in person.quiz)))
    for asked in person.quiz:
        for answer in asked.answers:
            assert stands_in(answer, texts[asked.document]), asked
            assert not stands_in(answer, asked.question), asked


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        ("Olga Fenwick.", "Olga"),
        ("It was olga's idea", "Olga"),
        ("The boiler was serviced on May 3rd.", "3 May"),
        ("On the 3rd of May, by Olga", "3 May"),
        ("the third of May", "3 May"),
        ("2024-05-03", "3 May"),
        ("Sun 3 May 2024", "3 May"),
        ("The 21st of December", "21 December"),
        ("the twenty-first of December", "21 December"),
        ("At 6:40 pm.", "18:40"),
        ("06.40 a.m. sharp", "6:40"),
        ("It opens at 18.40", "18:40"),
        ("12:05 am", "00:05"),
        ("twenty-four jars", "24"),
        ("24", "twenty-four"),
        ("About two hundred and fifty", "250"),
        ("a hundred", "100"),
        ("£1,250.00", "1250"),
        ("2.5 kilos", "two and a half"),
        ("kd4817", "KD-4817"),
        ("Goran", "Göran"),
        ("A coin in the pump!", "a coin in the pump"),
        ("in a teapot", "in the teapot"),
        ("Your spare dibber", "my spare dibber"),
        ("Dr. Szabo", "Dr Szabo"),
        ("Sure! It is blue.", "blue"),
        ("Answer: blue", "blue"),
        ("  **Blue**\n\nThe note says so.", "blue"),
        ("bottle\u2011green", "bottle-green"),
    ],
)
def test_a_right_reply_is_right_however_it_is_written(reply, answer):
    assert is_right(reply, (answer,))


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        ("", "Olga"),
        ("?!", "Olga"),
        ("Holga", "Olga"),
        ("On 13 May", "3 May"),
        ("On 3 March", "3 May"),
        ("3 May", "3"),
        ("At 3:15", "3"),
        ("3.5", "3"),
        ("1250", "250"),
        ("In the 1930s", "1930"),
        ("12,500", "500"),
        ("7:05", "7:50"),
        ("6:40", "18:40"),
        ("KD-48170", "KD-4817"),
        ("Blue. Or red.", "red"),
        ("Blue\nRed", "red"),
        ("green", "bottle-green"),
        ("the teapot on the shelf", "in the teapot"),
        (" ".join(["blue,"] * 24 + ["red"]), "red"),
        ("the pump had a coin in it", "a coin in the pump"),
    ],
)
def test_a_wrong_reply_is_wrong(reply, answer):
    assert not is_right(reply, (answer,))


@pytest.mark.parametrize("answer", ["", "...", "the"])
def test_an_answer_without_words_is_refused(answer):
    with pytest.raises(ValueError, match="has no words"):
        is_right("anything", (answer,))


def test_people_for_testing_share_nothing_with_those_that_settings_were_chosen_with():
    (_, tuning, words), (_, test, others) = map(know_people.written, (TUNING, TEST))
    # "{Subject}" alone is no title that one has from the other.
    assert {kind["title"] for kind in tuning} & {kind["title"] for kind in test} <= {"{Subject}"}
    assert not {kind["text"] for kind in tuning} & {kind["text"] for kind in test}
    asks = {fact["ask"] for kind in tuning for fact in kind["facts"]}
    # "Who lent me {subject}?" is a question that anybody asks.
    assert all(len(ask.split()) <= 6 for ask in asks & {fact["ask"] for kind in test for fact in kind["facts"]})
    for sort in ("first", "surname", "town", "street", "firm"):
        assert not set(words[sort]) & set(others[sort])


@pytest.mark.slow
def test_the_benchmark_runs(capsys, monkeypatch, tmp_path):
    make_quick(monkeypatch, write_general(tmp_path))
    monkeypatch.setattr(reading, "READER", NO_EFFECT)
    monkeypatch.setattr(reading, "NUM_NOTES", 3)
    model = save_model(tmp_path / "model", make_tokenizer(QUICK_TEMPLATE), max_position_embeddings=1024)
    reading.main(["--people", "1", "--arms", "base", "reader", "--device", "cpu", "--model", str(model)])
    shown = (dict(cell.split(" ", 1) for cell in line.split(", ")) for line in capsys.readouterr().out.splitlines())
    base, reader = ({name: row[name] for name in ("arm", "person", "found", "search")} for row in shown)
    assert base == {"arm": "base", "person": "1", "found": "0", "search": reader["search"]}
    assert reader["arm"] == "reader"
