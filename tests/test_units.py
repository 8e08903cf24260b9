"""Sizes, shares and counts are said so that a person can tell them apart."""

import pytest

from sebp_edge.basics.units import gigabytes, parameters, sizes_apart


@pytest.mark.parametrize(
    ("sizes", "shown"),
    [
        ((740e6, 660e6), ["740 MB", "660 MB"]),
        ((8e9, 0.7e9), ["8.0 GB", "0.7 GB"]),
        ((8e9, 8e9), ["8.0 GB", "8.0 GB"]),
        ((8.04e9, 8e9), ["8,040 MB", "8,000 MB"]),
        ((1_000_001, 1_000_000), ["1,000,001 bytes", "1,000,000 bytes"]),
        ((740e6, 660e6, 8e9), ["740 MB", "660 MB", "8,000 MB"]),
        ((740e6, 660e6, 660e6), ["740 MB", "660 MB", "660 MB"]),
        ((0, 1), ["0 bytes", "1 bytes"]),
    ],
)
def test_different_sizes_look_different(sizes, shown):
    assert sizes_apart(*sizes) == shown


def test_one_size_has_two_digits():
    assert [gigabytes(size) for size in (6.44e9, 0.1e9, 99e6, 26e6)] == ["6.4 GB", "0.1 GB", "99 MB", "26 MB"]


def test_a_small_number_of_parameters_is_not_0_billion():
    shown = [parameters(number) for number in (3_349_824, 134_515_008, 999_999_999, 8_954_000_000)]
    assert shown == ["3.35 million", "135 million", "1 billion", "8.95 billion"]
