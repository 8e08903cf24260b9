"""The phases of N:M training: what each method prunes at each step."""

import pytest
from pairwise import pairwise

from sebp_edge.errors import OptionError
from sebp_edge.research.pruning.pruning_phases import DENSE, METHODS, Phases, Stage, parse_pattern


def stages(pattern, method, num_steps, dense=0.0, decay=0.5):
    phases = Phases(pattern=pattern, num_steps=num_steps, method=method, dense=dense, decay=decay)
    return [phases.stage(step) for step in range(num_steps)]


@pairwise(
    method=METHODS, pattern=["1:2", "2:4", "1:4", "3:8", "1:16", "31:32", "1:32", "5:7"], num_steps=[1, 3, 10, 101]
)
def test_a_training_is_dense_then_decays_then_has_the_pattern(method, pattern, num_steps):
    n, m = map(int, pattern.split(":"))
    dense = 0.2 if num_steps > 3 else 0.0
    found = stages(pattern, method, num_steps, dense)
    first = int(dense * num_steps)
    assert found[:first] == [DENSE] * first
    phases = Phases(pattern=pattern, num_steps=num_steps, method=method, dense=dense)
    first += 0 if method == "sr-ste" else num_steps // 2
    assert set(found[first:]) == {Stage(n, m)} == {phases.final}
    # The share of weights that count, by their factor, never grows.
    shares = [stage.n / stage.m + (1 - stage.n / stage.m) * stage.decay for stage in found]
    assert shares == sorted(shares, reverse=True)
    assert all(phases.largest_group % stage.m == 0 for stage in found)


def test_sr_ste_prunes_from_the_first_step_after_the_dense_phase():
    assert stages("2:4", "sr-ste", 10, dense=0.3) == [DENSE] * 3 + [Stage(2, 4)] * 7


def test_mdgf_decays_linearly_or_exponentially_and_then_to_zero():
    decays = [stage.decay for stage in stages("1:4", "mdgf-linear", 8)]
    assert decays == [1, 0.75, 0.5, 0.25, 0, 0, 0, 0]
    decays = [stage.decay for stage in stages("1:4", "mdgf-exponential", 8)]
    assert decays == pytest.approx([1, 0.01**0.25, 0.1, 0.01**0.75, 0, 0, 0, 0])


def test_sdgf_removes_weights_in_equal_parts():
    assert [stage.n for stage in stages("1:8", "sdgf-stepwise", 16)] == [7, 7, 4, 4, 2, 2, 1, 1] + [1] * 8
    assert [stage.n for stage in stages("2:4", "sdgf-stepwise", 8)] == [3, 3, 2, 2, 2, 2, 2, 2]
    assert [stage.n for stage in stages("3:8", "sdgf-stepwise", 8)] == [7, 7, 4, 4, 3, 3, 3, 3]
    found = [(stage.n, stage.m) for stage in stages("1:8", "sdgf-geometric", 16)]
    assert found == [(8, 64)] * 2 + [(4, 32)] * 2 + [(2, 16)] * 2 + [(1, 8)] * 10


@pytest.mark.parametrize("text", ["4:2", "2:2", "0:4", "2:33", "2", "2:4:8", "a:b", "", "-1:4", "2 : 4", None, 0.5])
def test_what_is_no_pattern_is_refused(text):
    with pytest.raises(OptionError, match="expected N:M with N below M and M at most 32"):
        parse_pattern(text)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (("mdgf", 10, 0.0, 0.5), "Unknown N:M method 'mdgf'; "),
        ((7, 10, 0.0, 0.5), "Unknown N:M method '7'"),
        (("sr-ste", 0, 0.0, 0.5), "The number of steps is 0"),
        (("sr-ste", 2.0, 0.0, 0.5), "The number of steps is 2.0"),
        (("mdgf-linear", 10, 0.5, 0.5), "whose sum is below 1"),
        (("mdgf-linear", 10, -0.1, 0.5), "of at least 0"),
        (("mdgf-linear", 10, 0.0, float("nan")), "the decay phase nan"),
        (("mdgf-linear", 10, "0.1", 0.5), "The dense phase is 0.1"),
    ],
)
def test_phases_that_do_not_fit_are_refused(values, message):
    with pytest.raises(OptionError, match=message):
        method, num_steps, dense, decay = values
        Phases(pattern="2:4", num_steps=num_steps, method=method, dense=dense, decay=decay)
