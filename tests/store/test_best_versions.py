"""The best version so far, and how many were refused, are read from the records of the versions that are there."""

import random
from functools import partial

import pytest
import stored_adapter

from sebp_edge.store.best_versions import read_best_versions
from sebp_edge.store.record import RECORD


@pytest.fixture
def save(store):
    """A function that saves a version."""
    return partial(stored_adapter.save, store)


def best(store):
    return read_best_versions(store.adapter("mine")).best


def test_an_adapter_without_versions_has_none(store, save):
    assert read_best_versions(store.adapter("mine")) == ((), 0)
    save(verdict="no gain", is_best=False, activate=False)
    assert read_best_versions(store.adapter("mine")) == ((), 0)


def test_the_best_is_what_the_newest_record_says_then_what_was_it_before(store, save):
    save(verdict="better", is_best=True)
    save(verdict="better", is_best=False, best_before=1)
    assert best(store) == (1,)
    save(verdict="better", is_best=True, best_before=1)
    save(verdict="worse than best", is_best=False, best_before=3, activate=False)
    assert best(store) == (3, 1)
    # What the user activates is compared as the active version.
    store.adapter("mine").activate(4)
    assert best(store) == (3, 1)


def test_a_removed_version_is_named_and_the_one_before_it_follows(store, save):
    save(verdict="better", is_best=True)
    save(verdict="better", is_best=True, best_before=1)
    save(verdict="better", is_best=False, best_before=2)
    store.adapter("mine").remove(2)
    assert best(store) == (2, 1)
    store.adapter("mine").remove(3)
    assert best(store) == (1,)


def test_a_version_that_never_was_active_is_no_best_one(store, save):
    save(verdict="better", is_best=True)
    save(verdict="better", is_best=True, best_before=1, activate=False)
    assert best(store) == (1,)


def test_of_earlier_records_each_better_version_may_be_the_best(store, save):
    for verdict in ("better", "worse than active", "better", "no gain"):
        save(verdict=verdict, activate=verdict == "better")
    assert best(store) == (3, 1)


def test_a_record_that_cannot_be_read_is_left_out_unless_another_one_names_it(store, save):
    save(verdict="better", is_best=True)
    save(verdict="better", is_best=True, best_before=1)
    (store.adapter("mine").version_folder(2) / RECORD).write_text("{")
    assert best(store) == (1,)
    save(verdict="better", is_best=False, best_before=2)
    assert best(store) == (2, 1)


def test_gc_keeps_the_best_version(store, save):
    save(verdict="better", is_best=True)
    for number in range(2, 8):
        save(verdict="better", is_best=False, best_before=1, refused=number)
    store.gc(store.garbage(keep=1))
    assert store.adapter("mine").versions() == [1, 6, 7]
    assert best(store) == (1,)


def test_refusals_are_counted_over_the_versions_that_are_left(store, save):
    counts = random.choices(range(1, 100), k=4)
    for count in (None, *counts):
        save(refused=count, activate=False)
    assert read_best_versions(store.adapter("mine")).refused == max(counts)
    store.adapter("mine").remove(2 + counts.index(max(counts)))
    assert read_best_versions(store.adapter("mine")).refused == sorted(counts)[-2]
