"""Folds side by side in a plan: where that pays, and what memory it takes."""

from builders import make_examples

from sebp_edge.memory.side_by_side import MAX_ROWS, pays, sizes_beside, steps_together
from sebp_edge.sparse.rows.buckets import Bucket
from sebp_edge.texts.schedule import RowLimit, Schedule

EXAMPLES = [example.outline(number) for number, example in enumerate(make_examples([31, 2, 17, 40, 5, 23]))]


def schedule_of(*epochs, max_rows=4096):
    schedule = Schedule(list(epochs))
    schedule.lay_out(RowLimit(max_rows))
    return schedule


def test_steps_that_run_at_once_are_those_of_the_same_number_from_where_each_is():
    one, other = schedule_of([EXAMPLES[:1], EXAMPLES[1:2]], [EXAMPLES[2:3]]), schedule_of([EXAMPLES[3:4]])
    found = [[step.examples[0].number for step in steps] for steps in steps_together([one, other], [0, 0])]
    assert found == [[0, 3], [1], [2]]
    found = [[step.examples[0].number for step in steps] for steps in steps_together([one, other], [2, 0])]
    assert found == [[2, 3]]


def test_many_steps_of_few_rows_and_one_micro_batch_each_pay():
    few, many = (schedule_of(number * [EXAMPLES[:2]]) for number in (160, 161))
    large = schedule_of([EXAMPLES * (MAX_ROWS // 100)], 161 * [EXAMPLES[:1]])
    assert pays([many, many], [0, 0])
    assert not pays([many, few], [0, 0])
    assert pays([many, few, few], [0, 0, 0])
    assert not pays([many, many], [0, 1])
    assert not pays([many, large], [0, 0])
    assert pays([many, large], [0, 1])
    assert not pays([many, schedule_of(161 * [EXAMPLES[:2]], max_rows=20)], [0, 0])


def test_batches_side_by_side_have_the_rows_of_all():
    assert sizes_beside([Bucket(30, 2, 20, 25), Bucket(12, 1, 12, 3)]) == Bucket(42, 3, 20, 28)
