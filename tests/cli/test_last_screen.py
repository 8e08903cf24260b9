"""The last screen of `adapt` begins with the verdict, and fits 15 lines of 80 columns, whatever has happened."""

from dataclasses import replace
from pathlib import Path

import pytest
from terminals import draw_on_terminal

from sebp_edge import AdaptResult
from sebp_edge.cli import adapt
from sebp_edge.engine.models.catalog import resolve
from sebp_edge.engine.training.comparison import Comparison
from sebp_edge.engine.training.evaluation import HeldOutLoss
from sebp_edge.engine.training.gate import EarlierVersion, GateResult, Life, Verdict
from sebp_edge.engine.training.quiz import QuizResult, Replies
from sebp_edge.run.expectations import expectation
from sebp_edge.values.dataset import Quiz, QuizQuestion
from sebp_edge.values.model_reference import ModelReference
from sebp_edge.values.probe_figures import ProbeFigures
from sebp_edge.values.training_facts import Copied
from sebp_edge.values.word_figures import WordFigures

LOSSES = HeldOutLoss(dict.fromkeys(range(1200), 4.0), dict.fromkeys(range(1200), 1))
UNSURE, BETTER, WORSE = (Comparison(5.048, 4.8, *gain, 13) for gain in ((0.044, -0.003), (0.131, 0.089), (-0.2, -0.3)))
ACTIVE = EarlierVersion(11, LOSSES, "it was saved before sebp-edge recorded which documents are for test")
CONCERNS = (
    "1,204 of 1,210 documents are copies or near-duplicates of another one, so a lower loss says little about others; "
    "leave out all copies but one.",
    "This model's tokenizer needs 2.4 tokens for each character of these texts, so it cannot read them; choose a model "
    "that was made for this language.",
)
QUIZ = QuizResult(
    Quiz((QuizQuestion("question", ("yes",), (1,), (2,), (2,)),) * 60, (QuizQuestion("?", ("yes",), (1,)),) * 9, 3, 50),
    Replies(("no",) * 60, ("no",) * 60, ("no",) * 60, ("yes",) * 9),
    Replies(("yes",) * 44 + ("no",) * 16, ("yes",) * 60, ("no",) * 60, ("yes",) * 9),
)
WORDS = WordFigures(123_456, 29_827, 33_679, 0.01, 0.02, 23_456, 6_333, 6_802, 0.01, 0.03, is_typed=True)
PLAIN = GateResult(
    Verdict.BETTER, LOSSES, LOSSES, gain=BETTER, life=Life(ACTIVE), gain_over_active=WORSE, refit_loss=3.744
)
OUTCOMES = {
    "kept": PLAIN,
    "no gain": replace(PLAIN, verdict=Verdict.NO_GAIN, gain=UNSURE),
    "worse than active": replace(PLAIN, verdict=Verdict.WORSE_THAN_ACTIVE),
    "worse than best": replace(
        PLAIN, verdict=Verdict.WORSE_THAN_BEST, life=Life(ACTIVE, replace(ACTIVE, version=9)), gain_over_best=WORSE
    ),
    "not comparable": replace(PLAIN, verdict=Verdict.NOT_COMPARABLE),
    "not judged": GateResult(Verdict.NOT_JUDGED),
    "words": replace(PLAIN, words=WORDS),
    "words, worse than active": replace(PLAIN, words=WORDS, verdict=Verdict.WORSE_THAN_ACTIVE),
    "words, no gain": replace(PLAIN, words=WORDS, verdict=Verdict.NO_GAIN, gain=UNSURE),
    "refit failed": replace(PLAIN, verdict=Verdict.REFIT_FAILED),
    "quiz": PLAIN.with_quiz(QUIZ),
    "quiz, no gain": PLAIN.with_quiz(replace(QUIZ, after=QUIZ.before)),
    "quiz, forgets": PLAIN.with_quiz(replace(QUIZ, after=replace(QUIZ.after, general=("no",) * 9))),
}
SIZES = {"demonstrator": resolve("tiny"), "model": ModelReference("mine", "local", "/secret")}


def outcome(gate: GateResult, reference=SIZES["model"], concerns=(), **changes) -> AdaptResult:
    """The result of an adaptation that the gate has judged so; made without one, since trainings take seconds."""
    values = {
        "overtaken_by": None,
        "compared_with": 11,
        "learnt_on_from": None,
        "passed": gate.passed,
        "active": gate.passed,
        "verdict": str(gate.verdict),
        "explanation": gate.explain(0.01, concerns),
        "name": "default",
        "version": 12,
        "adapter_path": Path("/home/somebody/.local/share/sebp-edge/adapters/default/12"),
        "quiz": gate.quiz and gate.quiz.figures,
        "general_loss_before": 3.915,
        "general_loss_after": 3.969,
        "language": ProbeFigures(40, 39, 38, 2),
        "facts": ProbeFigures(40, 35, 34, 3),
        "expectation": expectation(reference, 134_515_008, is_chat=False, has_quiz=gate.quiz is not None),
        "copies": (),
        "documents": 1210,
        "trained_on_all": gate.passed,
        "refit_loss": gate.refit_loss,
        "new": 0,
        "changed": 0,
        "command": "sebp-edge generate 'The first words' --name default",
        "activation": "" if gate.passed else "sebp-edge adapters activate default 12",
        "report_command": "sebp-edge adapters report default",
    }
    return object.__new__(type("Outcome", (AdaptResult,), values | changes))


def shown(result: AdaptResult, monkeypatch, width=80, **options) -> list[str]:
    drawn = draw_on_terminal(monkeypatch, adapt, width=width, stream="console")
    adapt.show_result(result, **options)
    return drawn.getvalue().splitlines()


COSTS = {
    "language": ProbeFigures(40, 39, 22, 18),
    "facts": ProbeFigures(40, 23, 18, 12),
    "copies": tuple(Copied(f"travel/2026/{'a long name ' * 4}{number}.md", 90 - number, 3) for number in range(40)),
}
HOW = {
    "plainly": {},
    "learnt on": {"learnt_on_from": 11, "new": 3, "changed": 1},
    "not refitted": {"trained_on_all": False},
    "with warnings": COSTS,
    "anyway": {"active": True, "activation": ""},
    "overtaken": {"overtaken_by": 13, "active": False, "activation": "sebp-edge adapters activate default 12"},
    "outside the store": {"name": None, "version": None, "active": False, "activation": ""},
    "under a wide name": {
        "name": "日" * 64,
        "command": f"sebp-edge generate 'The first words' --name {'日' * 64} --model /home/{'m' * 90}",
        "activation": f"sebp-edge adapters activate {'日' * 64} 12",
        "report_command": f"sebp-edge adapters report {'日' * 64}",
    },
    "with all at once": COSTS | {"learnt_on_from": 11, "new": 1203, "changed": 1104, "with_concerns": True},
}


LONGEST = ("under a wide name", "with all at once")


@pytest.mark.parametrize("number", range(len(OUTCOMES)), ids=list(OUTCOMES))
def test_every_outcome_fits_15_lines_and_begins_with_the_verdict(number, monkeypatch):
    """Whatever else has happened: each verdict with the longest screens, and with two more of the events in turn."""
    gate = list(OUTCOMES)[number]
    others = [changes for name, changes in HOW.items() if name not in LONGEST]
    in_turn = [others[(2 * number + place) % len(others)] for place in range(2)]
    for place, changes in enumerate([*in_turn, *map(HOW.get, LONGEST)], number):
        check_screen(gate, dict(changes), list(SIZES.values())[place % 2], monkeypatch)


def check_screen(gate, changes, reference, monkeypatch):
    concerns = CONCERNS if changes.pop("with_concerns", False) else ()
    result = outcome(OUTCOMES[gate], reference, concerns, **changes)
    lines = shown(result, monkeypatch, with_samples=True)
    assert len(lines) <= 15, "\n".join(lines)
    assert lines[0].startswith(
        "Better: " if result.passed else "Not judged: " if gate == "not judged" else "Not better: "
    )
    text = " ".join(lines)
    assert "perplexity" not in text and "-0.0" not in text
    if result.warnings:
        assert text.count("warning: ") == 2
    unwrapped = "".join(lines).replace(" ", "")
    for command in result.next_steps.values():
        assert command.replace(" ", "") in unwrapped
    assert "and samples: " in text


def test_it_says_what_was_learnt_on_top_of_what(monkeypatch):
    lines = shown(outcome(OUTCOMES["kept"], learnt_on_from=3, new=1), monkeypatch)
    text = " ".join(map(str.strip, lines))
    assert text.count("Then it learnt 1 new document on top of version 3.") == 1
    assert "all 1,210 documents" not in text


def test_names_of_documents_cannot_control_the_terminal(monkeypatch):
    result = outcome(OUTCOMES["kept"], copies=(Copied("\x1b[2J[red]a.md", 40, 2),))
    text = " ".join(shown(result, monkeypatch))
    assert "\x1b[2J" not in text and "[red]a.md" in text


def test_the_first_line_says_what_decided_and_typing_does_not_contradict_it(monkeypatch):
    """Whatever the keystrokes show: the gate decides by predictions."""
    for lowest, highest, surely in ((0.01, 0.02, "."), (-0.01, 0.02, ", which may be chance."), (-0.02, -0.01, ".")):
        words = replace(WORDS, saved_more_lowest=lowest, saved_more_highest=highest)
        first, *lines = shown(outcome(replace(PLAIN, words=words)), monkeypatch)
        assert first == "Better: version 12 of 'default' is active, since it predicts your texts better."
        assert " ".join(map(str.strip, lines)).startswith(
            "On 1,200 documents that it was not trained on, it predicts the text 13.1 % better than the base model, "
            f"which is more than chance. Typing your texts with its suggestions takes 73 of 100 keys, 76 before{surely}"
        )
    for name in ("words, no gain", "words, worse than active"):
        assert "Typing" not in " ".join(shown(outcome(OUTCOMES[name]), monkeypatch))


@pytest.mark.parametrize("gate", OUTCOMES)
def test_the_screen_has_few_figures_and_no_word_that_it_does_not_explain(gate, monkeypatch):
    text = " ".join(shown(outcome(OUTCOMES[gate]), monkeypatch))
    assert text.count(" %") <= 3, text
    for word in ("ghost text", "points", "held out", "loss", "nats", "confidence", "epoch"):
        assert word not in text, text


@pytest.mark.parametrize(("after", "warned"), [(3.0, 0), (4.39, 0), (4.41, 1), (float("nan"), 1)])
def test_a_high_loss_on_general_text_is_warned_of(after, warned):
    warnings = outcome(OUTCOMES["kept"], general_loss_before=4.0, general_loss_after=after).warnings
    assert len(warnings) == warned and all("it predicts general text " in each for each in warnings)
