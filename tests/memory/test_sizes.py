"""Memory sizes are read as people write them."""

import pytest

from sebp_edge import Personalizer
from sebp_edge.errors import OptionError


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8GB", 8_000_000_000),
        ("8 gb", 8_000_000_000),
        (" 7.5GiB ", 8_053_063_680),
        ("8000MB", 8_000_000_000),
        ("1mib", 2**20),
        ("8000000000b", 8_000_000_000),
        (1_000_000, 1_000_000),
    ],
)
def test_sizes_are_parsed_as_people_write_them(text, size):
    personalizer = Personalizer(device="cpu", memory_budget=text)
    assert personalizer.memory_budget.size == size
    assert Personalizer(device="cpu", memory_budget=personalizer.memory_budget).memory_budget.size == size


WRONG = [
    *("", "8", "8000000000", "8XB", "GB", "-3GB", "0GB", "nan", "nanGB", "inf", "0.9MB", "eight"),
    *("8 GB of it", "1e9"),
]


@pytest.mark.parametrize("text", [*WRONG, "1e9", "٨GB"])
def test_an_invalid_size_raises_one_sentence(text):
    with pytest.raises(OptionError) as caught:
        Personalizer(device="cpu", memory_budget=text)
    assert str(caught.value) == (
        f"The memory budget is {text!r}, but must be a size with a unit, such as '8GB', '7.5GiB' or '8000MB', from 1 "
        "MB to 9 EB."
    )


@pytest.mark.parametrize("number", [0, -5, 8, True, 8.5, float("nan")])
def test_a_number_that_is_no_size_in_bytes_raises_one_sentence(number):
    with pytest.raises(OptionError) as caught:
        Personalizer(device="cpu", memory_budget=number)
    assert f"The memory budget is {number!r}, but must be a number of bytes, or a text such as '8GB'" in str(
        caught.value
    )


@pytest.mark.parametrize("size", [10**30, 10**5000, "9" * 25 + "GB"], ids=["number", "long number", "text"])
def test_a_size_beyond_any_memory_raises_one_sentence(size):
    with pytest.raises(OptionError, match=r"from (0\.1|1) MB to 9 EB"):
        Personalizer(device="cpu", memory_budget=size)
