"""Leaves out what most tests of trainings do not look at, and what takes longer than these trainings."""

import functools
import importlib.metadata
from dataclasses import replace
from pathlib import Path

from jinja2 import Environment

from sebp_edge.engine.training.probing import Probed
from sebp_edge.run import samples

# What is assessed would take most of a tiny adaptation's time.
SHORT_ASSESSMENT = {
    "sebp_edge.lessons.general_probe.PROBE": Path(__file__).parent / "short_probe",
    "sebp_edge.ask.general_texts.MAX_ITEMS": 2,
    "sebp_edge.run.assessment.COPIED_TOKENS": 200,
    "sebp_edge.run.samples.SAMPLING": replace(samples.SAMPLING, max_new_tokens=2),
    # Else most adaptations would take six trainings and more; tests of folds set it.
    "sebp_edge.run.preparation.MOST_IN_FOLDS": 0,
    # Else a busy machine, on which all of it takes seconds, prints lines that no test expects.
    "sebp_edge.cli.progress.SECONDS_BETWEEN_LINES": 3600,
}

# The page of each version is a template, which is compiled each time.
Environment.compile = functools.lru_cache(maxsize=32)(Environment.compile)
# A twentieth of that time goes into reading the versions of libraries twice.
importlib.metadata.version = functools.cache(importlib.metadata.version)


def skip_losses_of_texts(patch) -> None:
    """Leaves out the probes and the search for copies."""
    patch.setattr("sebp_edge.run.assessment.encode_probes", lambda *_: None)
    patch.setattr("sebp_edge.run.assessment.probe", lambda *_: Probed(1.0, 1.0))
    patch.setattr("sebp_edge.run.assessment.longest_copies", lambda *_: [])


def skip_assessment(patch) -> None:
    """Leaves out the samples too."""
    skip_losses_of_texts(patch)
    patch.setattr("sebp_edge.run.assessment.continue_each", lambda base, beginnings, *others: [""] * len(beginnings))
