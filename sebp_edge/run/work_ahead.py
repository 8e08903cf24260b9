"""Lays out the phases of a call that are ahead, and how long each is expected to take. Imports no torch."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

from sebp_edge.ask.general_texts import CHAT_TOKENS
from sebp_edge.ask.make_quiz import REPLY_TOKENS
from sebp_edge.engine.memory.amount_of_work import TOKENS_PER_STEP_CPU
from sebp_edge.engine.memory.memory_plan import Choice, Plan
from sebp_edge.engine.memory.seconds import OVERHEAD_CPU, OVERHEAD_GPU
from sebp_edge.engine.sparse.rows.schedule import Schedule
from sebp_edge.recipe import Recipe
from sebp_edge.run import job
from sebp_edge.run.job import Phase
from sebp_edge.values.dataset import Dataset
from sebp_edge.values.remembered import MANY_FOLDS

LOAD = "loading"
# Of an assessment: the most tokens that are searched for copies, and how many beginnings are
# continued, by how many tokens; more than samples are shown, since some continuations are the same.
COPIED_TOKENS, NUM_BEGINNINGS, SAMPLED_TOKENS = 10_000, 5, 40
# Names of phases that are no training.
REPLIES, TEACHER, ACTIVE, ATTACH = "replies", "teacher", "active version", "attaching"
BASE_QUIZ, QUIZ, SAMPLES, GENERAL, COPIES, SAVE = "quiz before", "quiz", "samples", "general text", "copies", "saving"
# Decoding a token reads all weights, which takes at least as long as this many tokens of a long text.
MIN_DECODED = 8
# Bytes per second from a disk, and seconds that every loading and saving takes.
DISK_RATE, FILE_SECONDS = 500e6, 1.0
# Tokens of the bundled probes, and their examples.
GENERAL_TOKENS, GENERAL_EXAMPLES = 12_000, 340
# On a CPU, the trainings in folds may take so many seconds at this rate of floating-point operations per second, about
# that of two cores. A measured rate would not be the same each time, and so a draw would not.
MOST_SECONDS_IN_FOLDS, RATE_FOR_FOLDS = 120, 50e9


def seconds_of_a_token(num_parameters: int, rate: float, *, on_gpu: bool) -> float:
    """Estimates the seconds of a token's forward pass by the measured rate of a device."""
    return (OVERHEAD_GPU if on_gpu else OVERHEAD_CPU) * 2 * num_parameters / rate


def most_tokens_in_folds(recipe: Recipe, num_parameters: int, *, on_gpu: bool) -> float:
    """Returns up to how many tokens folds are worth their time: any number on a GPU."""
    if on_gpu:
        return math.inf
    # A document is trained on in all folds but two, and at the end. It is in one validation split, which is evaluated
    # after each epoch (before full fine-tuning too), and in one test split, evaluated twice; all are at the end.
    validations = recipe.epochs + (recipe.method != "lora")
    passes = _passes(recipe) * (MANY_FOLDS - 1) * recipe.epochs + validations + 3
    return MOST_SECONDS_IN_FOLDS / (passes * seconds_of_a_token(num_parameters, RATE_FOR_FOLDS, on_gpu=False))


class Pace(NamedTuple):
    """How long passes through a model take."""

    token: float  # seconds of a token's forward pass
    copying: float = 0.0  # seconds in which a pass copies streamed weights
    num_decoded: int = 1  # how many replies are written together

    @classmethod
    def planned(cls, choice: Choice, schedules: Sequence[Schedule]) -> "Pace":
        """Returns what the estimate of a choice's trainings means."""
        passes = _passes(choice.recipe)
        tokens = sum(passes * schedule.num_tokens + schedule.num_evaluated[1] for schedule in schedules)
        return cls(choice.seconds / tokens, choice.copying, choice.num_decoded)

    def decoding(self, prompts: list[int], new_tokens: int) -> float:
        """Returns the seconds in which new tokens follow prompts with these numbers of tokens."""
        computing = self.token * (sum(prompts) + new_tokens * max(MIN_DECODED, len(prompts)))
        return max(computing, self.copying * new_tokens * math.ceil(len(prompts) / self.num_decoded))


def with_all_phases(plan: Plan, dataset: Dataset, schedules: Sequence[Schedule], *, num_earlier: int) -> Plan:
    """Returns a plan of trainings with the time of all phases: loading, a quiz, general text, what is tested after."""

    def whole(choice: Choice | None) -> Choice | None:
        if choice is None or choice.seconds is None:
            return choice
        pace = Pace.planned(choice, schedules)
        phases = [loading(choice), *phases_ahead(dataset, schedules, choice.recipe, pace, num_earlier=num_earlier)]
        return replace(choice, seconds=sum(sum(phase.seconds.values()) for phase in phases))

    return replace(plan, **{name: whole(getattr(plan, name)) for name in ("chosen", "larger", "smaller", "full")})


def phases_of_inspection() -> list[Phase]:
    """Returns the phases of `inspect`; what each takes is a guess, here and below."""
    return [_stage(name) for name in ("reading", "comparing", "tokenising", "planning")]


def phases_of_analysis(examples: int) -> list[Phase]:
    """Returns the phases of `analyze`."""
    own = Phase(job.GRADIENTS, {job.STEPS: examples}, {job.STEPS: 0.5 * examples})
    return [_stage("reading"), Phase(LOAD, {}, {job.LOADING: 2.0}), *map(_stage, ("comparing", "tokenising")), own]


def phases_of_export() -> list[Phase]:
    """Returns the phases of `export`."""
    return [
        Phase(LOAD, {}, {job.LOADING: 2.0}),
        Phase(job.WRITING, {job.STEPS: 1}, {job.STEPS: 5.0}),
        Phase(job.READING_BACK, {}, {job.SAVING: 5.0}),
    ]


def loading(choice: Choice) -> Phase:
    """Returns the phase in which the model of a plan's choice is loaded."""
    return Phase(LOAD, seconds={job.LOADING: FILE_SECONDS + choice.footprint.weights / DISK_RATE})


def phases_ahead(
    dataset: Dataset, schedules: Sequence[Schedule], recipe: Recipe, pace: Pace, *, num_earlier: int
) -> Iterator[Phase]:
    """Yields the phases from the model's being loaded to the end.

    Args:
        num_earlier: the number of earlier versions to compare with.
    """
    token = pace.token
    if dataset.general:
        prompts = [each.num_tokens_before_loss for each in dataset.general if each.num_tokens_before_loss]
        yield Phase(REPLIES, seconds={job.DECODING: pace.decoding(prompts, CHAT_TOKENS)})
        yield _evaluation(TEACHER, token, len(dataset.general), sum(each.num_tokens for each in dataset.general))
    writes = _samples(dataset, pace)
    if num_earlier:
        tested = num_earlier * list(chain.from_iterable(split.test for split in dataset.splits()))
        phase = _evaluation(ACTIVE, token, len(tested), sum(example.num_tokens for example in tested))
        if dataset.quiz is not None:
            phase.seconds[job.DECODING] = writes
        yield phase
    judged = [schedule for schedule in schedules if not schedule.trains_on_all]
    for number, schedule in enumerate(schedules, start=1):
        name = f"fold {number}" if len(judged) > 1 else "train"
        if schedule.trains_on_all:
            name = "all documents"
        phase = _evaluation(name, token, *schedule.num_evaluated)
        phase.units[job.STEPS] = schedule.num_batches
        trained = schedule.num_tokens + TOKENS_PER_STEP_CPU * schedule.num_batches
        phase.seconds[job.STEPS] = _passes(recipe) * token * trained
        yield phase
    if dataset.quiz is not None:
        yield Phase(BASE_QUIZ, seconds={job.DECODING: writes})
        yield Phase(QUIZ, seconds={job.DECODING: writes})
    yield Phase(SAVE, seconds={job.SAVING: FILE_SECONDS})
    if dataset.quiz is None:
        yield Phase(SAMPLES, seconds={job.DECODING: (2 + bool(num_earlier)) * writes})
    yield _evaluation(GENERAL, token, 2 * GENERAL_EXAMPLES, 2 * GENERAL_TOKENS)
    copied = min(COPIED_TOKENS, dataset.num_tokens)
    yield _evaluation(COPIES, token, max(1, round(len(dataset.examples) * copied / dataset.num_tokens)), copied)


def _passes(recipe: Recipe) -> int:
    """Returns how many forward passes a training step costs."""
    return 2 if recipe.method == "lora" else 3


def _evaluation(name: str, token: float, examples: int, tokens: int) -> Phase:
    return Phase(name, units={job.EVALUATIONS: examples}, seconds={job.EVALUATIONS: token * tokens})


def _samples(dataset: Dataset, pace: Pace) -> float:
    """Returns the seconds that a model writes for: replies to the quiz, or else samples."""
    if dataset.quiz is None:
        return pace.decoding([60] * NUM_BEGINNINGS, SAMPLED_TOKENS)
    questions = (*dataset.quiz.about_notes, *dataset.quiz.general)
    prompts = {each for question in questions for each in (question.alone, question.found, question.right) if each}
    return pace.decoding(list(map(len, prompts)), REPLY_TOKENS)


def _stage(name: str) -> Phase:
    return Phase(name, {job.PREPARING: 100}, {job.PREPARING: 1.0})
