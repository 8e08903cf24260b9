"""Events as JSON lines: their names, one object per line, and valid JSON."""

import io
import json
import math

import pytest

from sebp_edge import events
from sebp_edge.events import PROTOCOL, Evaluated, Event, JsonLines, Notice, TextsRead, message, new_job

KINDS = {
    "started": events.Started,
    "progress": events.JobProgress,
    "notice": events.Notice,
    "job_started": events.JobStarted,
    "waiting": events.Waiting,
    "name_in_use": events.NameInUse,
    "preparing": events.PreparationProgress,
    "memory_planned": events.MemoryPlanned,
    "memory_probed": events.MemoryProbed,
    "model_loaded": events.ModelLoaded,
    "texts_read": events.TextsRead,
    "learning_on": events.LearningOn,
    "training_started": events.TrainingStarted,
    "graph_captured": events.GraphCaptured,
    "memory_ran_out": events.MemoryRanOut,
    "memory_pressure": events.MemoryPressure,
    "step": events.StepDone,
    "examples_evaluated": events.ExamplesEvaluated,
    "evaluated": events.Evaluated,
    "tensor_written": events.TensorWritten,
    "example_analyzed": events.ExampleAnalyzed,
    "saved": events.AdapterSaved,
}


def lines(*emitted: Event, job: str | None = None) -> list[str]:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii", newline="\n")
    sink = JsonLines(stream, job)
    for event in emitted:
        sink(event)
    return stream.buffer.getvalue().decode("ascii").splitlines()


def test_every_event_has_its_name_in_json():
    assert {kind.event: kind for kind in Event.__subclasses__()} == KINDS


def test_each_event_is_one_flushed_line_with_the_protocol_the_time_and_the_job():
    emitted = [
        Notice("Two\nlines, “quoted” in 北京"),
        TextsRead(1, 2, 3, 0.5, ({"source": "a\udcff.md", "reason": "é"},)),
    ]
    before = events.now()
    found = lines(*emitted, job=new_job())
    first = json.loads(found[0])
    assert list(first) == ["v", "time", "job", "event", "message"]
    assert first["v"] == PROTOCOL and first["event"] == "notice" and first["message"] == emitted[0].message
    assert before - 60 < first["time"] == emitted[0].time <= before
    assert len(first["job"]) == 12 and first["job"] == json.loads(found[1])["job"]
    assert json.loads(found[1])["left_out"] == [{"source": "a\udcff.md", "reason": "é"}]


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_are_null(loss):
    def refuse(constant):
        raise AssertionError(constant)

    (line,) = lines(Evaluated("train", "validation", 1, loss, False))
    assert json.loads(line, parse_constant=refuse)["loss"] is None


def test_an_event_keeps_its_job_without_another_one_and_a_result_gets_the_same_envelope():
    job = new_job()
    (line,) = lines(Notice("x").of_job(job))
    assert json.loads(line)["job"] == job
    assert list(message({"event": "result"}, job)) == ["v", "time", "job", "event"]
