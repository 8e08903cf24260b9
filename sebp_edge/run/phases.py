"""The phases of calls that are no adaptation, and how long each is expected to take. Imports no torch."""

from sebp_edge.run.job import GRADIENTS, LOADING, PREPARING, READING_BACK, SAVING, STEPS, WRITING, Phase

LOAD = "loading"
# Of an assessment: the most tokens that are searched for copies, and how many beginnings are
# continued, by how many tokens; more than samples are shown, since some continuations are the same.
COPIED_TOKENS, NUM_BEGINNINGS, SAMPLED_TOKENS = 10_000, 5, 40


def phases_of_inspection() -> list[Phase]:
    """Returns the phases of `inspect`; what each takes is a guess, here and below."""
    return [_stage(name) for name in ("reading", "comparing", "tokenising", "planning")]


def phases_of_analysis(examples: int) -> list[Phase]:
    """Returns the phases of `analyze`."""
    own = Phase(GRADIENTS, {STEPS: examples}, {STEPS: 0.5 * examples})
    return [_stage("reading"), _loading(), *map(_stage, ("comparing", "tokenising")), own]


def phases_of_export() -> list[Phase]:
    """Returns the phases of `export`."""
    return [_loading(), Phase(WRITING, {STEPS: 1}, {STEPS: 5.0}), Phase(READING_BACK, {}, {SAVING: 5.0})]


def _loading() -> Phase:
    return Phase(LOAD, {}, {LOADING: 2.0})


def _stage(name: str) -> Phase:
    return Phase(name, {PREPARING: 100}, {PREPARING: 1.0})
