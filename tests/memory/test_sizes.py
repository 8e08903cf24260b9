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


WRONG = ("", "8", "8000000000", "8XB", "GB", "-3GB", "0GB", "nan", "nanGB", "inf", "0.9MB", "eight", "8 GB of it")
UNIT = "a size with a unit, such as '8GB', '7.5GiB' or '8000MB', from 1 MB to 9 EB."


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        *((text, UNIT) for text in (*WRONG, "1e9", "٨GB", "9" * 25 + "GB")),
        *((number, "a number of bytes, or a text such as '8GB'") for number in (0, -5, 8, True, 8.5, float("nan"))),
        *((number, "from 0.1 MB to 9 EB") for number in (10**30, 10**5000)),
    ],
    ids=lambda given: str(given)[:20] if isinstance(given, str) or given != 10**5000 else "long",
)
def test_what_is_no_size_in_bytes_raises_one_sentence(size, expected):
    with pytest.raises(OptionError, match=r"The memory budget is .*, but must be ") as caught:
        Personalizer(device="cpu", memory_budget=size)
    assert expected in str(caught.value)
