"""Sizes, shares and counts are said so that a person can tell them apart."""

import pytest

from sebp_edge.basics.units import gigabytes, percent, percents_apart, plural, sizes_apart


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
    assert [gigabytes(size) for size in (6.44e9, 99e6, 26e6)] == ["6.4 GB", "99 MB", "26 MB"]


@pytest.mark.parametrize(
    ("share", "shown"), [(0.131, "13.1 %"), (-0.00001, "0.0 %"), (0, "0.0 %"), (-0.044, "-4.4 %"), (1, "100.0 %")]
)
def test_a_share_is_never_minus_zero(share, shown):
    assert percent(share) == shown


def test_different_shares_look_different():
    assert percents_apart(0.0096, 0.01) == ["0.96 %", "1.00 %"]
    assert percents_apart(0.131, 0.01) == ["13.1 %", "1.0 %"]
    assert percents_apart(0.01, 0.01) == ["1.0 %", "1.0 %"]


def test_one_thing_is_no_plural():
    assert [plural(number, "document") for number in (0, 1, 2, 1200)] == [
        *("0 documents", "1 document", "2 documents", "1,200 documents")
    ]


def test_sizes_are_formatted_in_mb_and_gb():
    assert [gigabytes(size) for size in (26_000_000, 100_000_000, 6.43e9)] == ["26 MB", "0.1 GB", "6.4 GB"]
