"""The progress of an adaptation: notes, lines and the bar."""

import pytest
from command import records, run, without_controls
from terminals import draw_on_terminal

from sebp_edge.cli import progress
from sebp_edge.cli.progress import ProgressPrinter
from sebp_edge.events import JobProgress, MemoryRanOut, Notice, StepDone, TextsRead


def test_running_out_of_memory_is_a_note_on_the_standard_error(capsys):
    ProgressPrinter(None)(MemoryRanOut(4096, 1500))
    out, err = capsys.readouterr()
    assert out == ""
    assert "memory ran out; micro-batches have at most 1,500 tokens from now on" in err.replace("\n", " ")


@pytest.mark.parametrize("both_on_terminal", [True, False], ids=["standard error too", "standard error in a file"])
def test_a_note_on_a_terminal_appears_above_the_bar(monkeypatch, both_on_terminal):
    drawn = draw_on_terminal(monkeypatch, progress, width=60)
    errors = draw_on_terminal(monkeypatch, progress, width=60, stream="err", is_terminal=both_on_terminal)
    with progress.show_progress(as_json=False) as sink:
        sink(Notice("other programs took memory"))
    lines = without_controls(drawn.getvalue())
    assert any(line.startswith("starting ━") for line in lines)
    assert ("note: other programs took memory" in lines) == both_on_terminal
    assert errors.getvalue() == ("" if both_on_terminal else "note: other programs took memory\n")


def test_files_that_were_read_in_part_are_not_said_to_be_left_out(capsys):
    counts = [(3, 20), (126, 332), (5, 40), (1_200, 9_000)]
    lost = [
        (f"{number}.md", f"words that were not read: {lost:,} of {total:,}")
        for number, (lost, total) in enumerate(counts)
    ]
    left_out = [{"source": source, "reason": reason} for source, reason in lost]
    ProgressPrinter(None)(TextsRead(4, 4, 100, 0.0, tuple(left_out)))
    assert capsys.readouterr().out.splitlines()[2:] == [
        "  in 4 files, words that were not read: 1,200 of 9,000 in 3.md",
    ]


WHOLE = JobProgress("train", 0.4217, 125.0)
STEP = StepDone("train", 3, 30, 1, 3.2109, 1e-3, 1.0, 100, 987.0, 12.0)


@pytest.mark.parametrize("width", [40, 60, 100])
def test_the_bar_shows_the_whole_job(monkeypatch, width):
    drawn = draw_on_terminal(monkeypatch, progress, width=width)
    with progress.show_progress(as_json=False) as sink:
        for event in (WHOLE, STEP, WHOLE):
            sink(event)
    last = [line for line in without_controls(drawn.getvalue()) if line.startswith("training ")][-1]
    assert last.rstrip().endswith("42 %  2 min left" if width < 70 else "42 % step 3/30  loss 3.211 2 min left")
    assert len(last) <= width


def test_lines_in_a_pipe_say_how_far_the_whole_job_is(capsys, monkeypatch):
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", -1)
    printer = ProgressPrinter(None)
    for event in (WHOLE, STEP, JobProgress("samples", 0.8, 5.4), JobProgress("saving", 1.0, 0.0)):
        printer(event)
    assert capsys.readouterr().out.splitlines() == [
        "training: 42 %, 2 min left",
        "step 3/30  loss 3.211  987 tokens/s  42 %, 2 min left",
        "writing samples: 80 %, 5 s left",
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "phases"),
    [
        (("inspect",), {"reading", "tokenising", "planning"}),
        (("analyze", "--examples", "2"), {"reading", "loading", "gradients"}),
    ],
)
def test_a_command_tells_how_far_the_whole_of_it_is(notes_folder, model_folder, recipe, tell_after, command, phases):
    tell_after(0)  # each time that it may
    name, *options = command
    result = run(name, notes_folder, "--model", model_folder, "--recipe", recipe, "--json", *options)
    assert result.exit_code == 0, result.output
    told = [record for record in records(result.stdout) if record["event"] == "progress"]
    fractions = [record["fraction"] for record in told]
    assert (fractions[0], fractions[-1], fractions) == (0, 1, sorted(fractions))
    assert phases <= {record["phase"] for record in told}
