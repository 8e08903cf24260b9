"""Messages of a worker that arrive late, when the app has asked for something else already.

The worker is a stand-in: a process that answers each message with what the test has given it, and nothing else.
"""

import json
import os
import random
import sys
from types import SimpleNamespace

import pytest
from command import start
from served import CHILDREN, WORKER, Refused, Server, wait_until

from sebp_edge import AdapterStore
from sebp_edge.serve.journal import Journal
from sebp_edge.serve.messages import AdaptParams, InitializeParams, StartJobParams, parse
from sebp_edge.serve.served_jobs import ServedJobs
from sebp_edge.serve.store_methods import ServedStore
from sebp_edge.serve.tasks import Tasks

CODE = """
import json, sys
from sebp_edge.basics.children import Children
start, told = Children.start, sys.argv[1]
def start_stand_in(children, command, **options):
    if "sebp_edge.serve.worker" in command:
        command = [sys.executable, "-S", "-c", STAND_IN, told]
    return start(children, command, **options)
Children.start = start_stand_in
from sebp_edge.serve.__main__ import main
main()
"""
STAND_IN = """
import json, sys
told = json.loads(sys.argv[1])
for line in sys.stdin:
    message = json.loads(line)
    for one in told.get(message["do"], []):
        print(json.dumps({"id": message.get("id"), **one}), flush=True)
"""
# What a planner tells is heard once its request is cancelled.
LATE = """
from sebp_edge.serve.processes import Planning
from sebp_edge.serve.supervisor import Supervisor
heard = Supervisor._answer_plan
def hear(server, planning, answered):
    if planning.requests[answered[0]] is None:
        heard(server, planning, answered)
    else:
        server._inbox.put(lambda: hear(server, planning, answered))
Supervisor._answer_plan = hear
def answers(planning):
    while True:
        yield planning._waiting.get(), {"asks": "worker"}
Planning.answers = answers
"""
# An app reads so slowly that it gets no events that the journal has.
SLOW = """
from sebp_edge.serve.served_jobs import ServedJobs
found = ServedJobs.events
ServedJobs.events = lambda jobs, id, since, limit: found(jobs, id, since, limit) if limit == 1 else []
"""
DONE = {"tells": "ended", "state": "done", "facts": {"result": {}}}
JOB = {"texts": ["The ferry."]}
PAUSED = {"tells": "ended", "state": "paused", "facts": {}}


@pytest.fixture
def serve(tmp_path):
    """A function that starts a server whose worker tells these messages when it gets one."""
    servers = []

    def start(first="", **told):
        names = {name.replace("_", " "): messages for name, messages in told.items()}
        code = f"STAND_IN = {STAND_IN!r}\n{first}{CODE}"
        server = Server(command=[sys.executable, "-c", code, json.dumps(names)])
        servers.append(server)
        server.initialize(store=str(tmp_path / "store"))
        return server

    yield start
    for server in servers:
        server.__exit__()


def test_a_job_that_is_cancelled_while_it_is_paused_does_not_stay_paused(serve):
    server = serve(job=[{"tells": "running"}], stop_job=[PAUSED])  # it had saved its state before it was told to stop
    server.start_job("first", params=JOB)
    server.state("first", {"running"})
    assert server.call("jobs.pause", expected_job_id="first")["job"]["state"] == "pausing"
    assert server.call("jobs.cancel", expected_job_id="first")["job"]["state"] in ("cancelling", "interrupted")
    ended = server.state("first")
    assert (ended["state"], ended["error"]["code"]) == ("interrupted", "cancelled")
    assert server.worker() is None  # its memory is free, as after a pause


def test_a_job_that_ends_before_its_pause_arrives_is_done_and_the_next_one_runs(serve):
    server = serve(job=[{"tells": "running"}], pause_job=[DONE])
    server.start_job("first", params=JOB)
    server.state("first", {"running"})
    server.start_job("second", params=JOB)
    server.call("jobs.pause", expected_job_id="first")
    assert server.state("first")["state"] == "done"
    assert server.state("second", {"running"})
    with pytest.raises(Refused, match="The job is done") as caught:
        server.call("jobs.pause", expected_job_id="first")  # which is not about the one that runs
    assert caught.value.code == "wrong_state"
    assert server.call("jobs.get", id="second")["job"]["state"] == "running"


@pytest.mark.slow
def test_what_the_worker_had_not_begun_is_cancelled_and_the_worker_stays(serve):
    server = serve(stop_job=[{"tells": "dropped", "do": "job"}], stop=[{"tells": "dropped", "do": "answer"}])
    request = server.send("generate", prompt="The")
    server.call("cancel", request=request)
    with pytest.raises(Refused, match="The request was cancelled"):
        server.answer(request)
    worker = server.worker()
    server.start_job("first", params=JOB)
    server.state("first", {"starting"})
    server.call("jobs.cancel", expected_job_id="first")
    ended = server.state("first")
    assert (ended["state"], ended["error"]["code"], ended["resumable"]) == ("interrupted", "cancelled", False)
    assert server.worker() == worker
    server.start_job("second", params=JOB)
    assert server.state("second", {"starting"})


def test_a_plan_that_is_cancelled_once_it_is_the_workers_does_not_wake_it(serve):
    """The planner has ended, and what it told reaches the supervisor after the app's request."""
    server = serve(first=LATE)
    request = server.send("plan", texts=["The ferry."])
    assert server.call("cancel", request=request) == {}
    with pytest.raises(Refused, match="The request was cancelled"):
        server.answer(request)
    assert server.worker() is None


def test_a_subscription_ends_with_its_job_whose_last_event_is_sent_before_it_is_forgotten(serve):
    server = serve(first=SLOW, job=[{"tells": "running"}, DONE])
    server.start_job("first", params=JOB)
    server.call("jobs.start", id="second", kind="forget", params={"documents": ["1"]})  # of the same adapter
    last = server.event("first")
    assert (last["number"], last["event"]["state"]) == (4, "done")
    wait_until(lambda: [job["id"] for job in server.call("jobs.list")["jobs"]] == ["second"])
    with pytest.raises(Refused, match="There is no job"):
        server.call("jobs.subscribe", id="first")


def test_a_job_with_the_id_of_a_forgotten_one_has_no_subscription(tmp_path):
    jobs = ServedJobs(Journal(tmp_path), AdapterStore(tmp_path).jobs)
    for name in ("mine", "mine", "other"):
        jobs.start(StartJobParams(id="a", params={}), {}, name, {})
        assert jobs.subscriptions == {}
        jobs.subscriptions["a"] = jobs.get("a").last_event
        jobs.waiting.clear()
        jobs.change("a", "interrupted")
        jobs.forget_adapter("mine")
    assert [event["event"]["state"] for event in jobs.last_events] == ["interrupted"] * 2
    assert jobs.subscriptions == {"a": 1}  # of the adapter that is there


@pytest.mark.slow
def test_a_pause_that_arrives_after_its_job_has_ended_is_not_the_next_ones(settings, too_little):
    """With the worker itself, which the test speaks with as the supervisor does."""
    store = ServedStore(InitializeParams(protocol=1, store=settings["store"]))
    with start([CHILDREN[WORKER], os.getpid()], stdin=-1, stderr=None) as worker:

        def send(do, **values):
            print(json.dumps({"do": do, **values}), file=worker.stdin, flush=True)

        def end_of_job(id):
            _, needed = store.keep_job(id, parse(AdaptParams, too_little, "adapt"))
            send("job", id=id, kind="adapt", stored=id, params=needed, folders=["/"])
            for line in worker.stdout:
                if (message := json.loads(line))["tells"] == "ended":
                    return message["state"]

        send("settings", store=settings["store"], memory_budget=None, low_priority=False)
        assert end_of_job("first") == "refused"  # there is too little text
        send("pause job")
        assert end_of_job("second") == "refused"


def test_what_the_worker_is_to_stop_is_dropped_or_ends_and_an_answer_does_not_hold_up_its_job():
    reading, writing = os.pipe()  # never closed: that would end this process
    dropped, tasks = [], None

    def told(*messages):
        """Sends messages, and one more, which is received after them."""
        os.write(writing, b"".join(json.dumps(each).encode() + b"\n" for each in (*messages, {"do": "end", "id": 0})))
        wait_until(lambda: 0 in tasks.stops)
        tasks._waiting.remove({"do": "end", "id": 0})
        del tasks.stops[0]

    tasks = Tasks(reading, SimpleNamespace(send=dropped.append))
    answers = [{"do": "answer", "id": id} for id in ("a", "b", "job")]
    told({"do": "job", "id": "job"}, *answers, {"do": "stop", "id": "b"})
    assert (tasks.next()["do"], dropped) == ("job", [answers[1] | {"tells": "dropped"}])
    assert tasks.next_within_job() == answers[0]
    told({"do": "stop", "id": "nobody"})
    assert not (tasks.stops["a"].is_set() or tasks.ends_job)
    told({"do": random.choice(["stop job", "pause job"])})
    assert tasks.stops["a"].is_set() and tasks.ends_job
    assert tasks.next_within_job() is None  # the job ends first
    assert not tasks.stops["job"].is_set() and tasks.next() == answers[2]  # which has the number of a job
    told({"do": "job", "id": "next"})
    assert not tasks.ends_job
    told({"do": "stop job"})
    assert dropped == [each | {"tells": "dropped"} for each in (answers[1], {"do": "job", "id": "next"})]
