"""Parametrises a test with the few cases in which each value of a parameter meets each value of every other one."""

from itertools import combinations, product

import pytest


def pairwise(**axes):
    """Replaces one `pytest.mark.parametrize` for each parameter, whose product has many cases for the same branches.

    Args:
        axes: the values of each parameter; the keys of a dictionary are their names. "a, b" has pairs of values.
    """
    values = [list(axis.values() if isinstance(axis, dict) else axis) for axis in axes.values()]
    names = [
        list(map(str, axis if isinstance(axis, dict) or isinstance(next(iter(axis)), str) else range(len(axis))))
        for axis in axes.values()
    ]
    cases = []
    for case in cover([len(axis) for axis in values]):
        given = []
        for name, axis, number in zip(axes, values, case, strict=True):
            given += axis[number] if "," in name else [axis[number]]
        cases.append(pytest.param(*given, id="-".join(axis[number] for axis, number in zip(names, case, strict=True))))
    return pytest.mark.parametrize(",".join(axes), cases)


def cover(sizes):
    """Returns few cases, as numbers of values, that contain each pair; each is the one with the most new pairs."""
    bits, pairs = {}, {}
    for case in product(*map(range, sizes)):
        # Sets of pairs as whole numbers, which are compared ten times as fast.
        pairs[case] = sum(1 << bits.setdefault(pair, len(bits)) for pair in combinations(enumerate(case), 2))
    left, cases = (1 << len(bits)) - 1, []
    while left:
        cases.append(max(pairs, key=lambda case: (left & pairs[case]).bit_count()))
        left &= ~pairs[cases[-1]]
    return cases
