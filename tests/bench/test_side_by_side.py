"""Jobs of a benchmark in several processes: every result arrives, and a failure is not lost."""

from math import sqrt

import pytest

import side_by_side

pytestmark = pytest.mark.slow


def test_all_results_arrive():
    assert sorted(side_by_side.run(sqrt, [4, 9, 16], 1)) == [2, 3, 4]


@pytest.mark.parametrize("processes", [1, 2])
def test_a_failed_job_is_printed_and_ends_the_run_after_the_others(processes, capsys):
    found = []
    with pytest.raises(RuntimeError, match="1 of 3 jobs have failed"):
        found.extend(side_by_side.run(sqrt, [4, -1, 16], processes))
    assert sorted(found) == [2, 4] and "ValueError" in capsys.readouterr().err
