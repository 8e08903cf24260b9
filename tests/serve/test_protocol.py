"""Lines, requests and refusals of `sebp-edge serve`, without a worker."""

import itertools
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from served import COMMAND, Refused, Server, all_gone, environment, refused, rss, wait_until

resource = pytest.importorskip("resource", reason="needs a Unix")
PROTOCOL = 1
MAX_LINE = 2**23
INFINITE = float("inf")  # in JSON, 1e999


@pytest.fixture
def server(tmp_path):
    with Server() as server:
        server.initialize(store=str(tmp_path / "store"), folders=[str(tmp_path)])
        yield server


@pytest.fixture(scope="module")
def own_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("own")


@pytest.fixture(scope="module")
def shared(tmp_path_factory, own_folder):
    """A server for what is refused, which reads one folder."""
    with Server() as server:
        server.initialize(store=str(tmp_path_factory.mktemp("shared")), folders=[str(own_folder)])
        yield server


def test_the_first_line_says_that_it_is_ready():
    with Server() as server:
        ready = server.wait(lambda message: True)
        assert ready["method"] == "ready"
        assert ready["params"]["protocol"] == PROTOCOL
        assert ready["params"]["pid"] == server.process.pid


def test_neither_its_start_nor_its_answers_about_what_is_here_load_torch_or_numpy(server):
    for method in ("adapters.list", "jobs.list", "models", "health"):
        server.call(method)
    loaded = {one.path for one in psutil.Process(server.process.pid).memory_maps()}
    assert not any(name in path for path in loaded for name in ("torch", "numpy", "transformers"))
    assert server.call("status")["worker"] is None
    assert rss(server.process.pid) < 40 * 2**20


@pytest.mark.slow
def test_plans_inspections_and_quotations_wake_no_worker_and_take_no_memory_that_stays(tmp_path, notes_folder):
    (tmp_path / "trip.md").write_text("# Norway\n\nThe key of the cabin is in the meter box.")
    with Server(warm=True) as server:
        server.initialize(store=str(tmp_path / "store"), folders=[str(notes_folder), str(tmp_path)])
        texts, before = {"paths": [str(notes_folder)], "device": "cpu"}, rss(server.process.pid)
        absent = server.call("plan", model="llama-3.2-3b", gpu="8GB", **texts)  # both are not on this machine
        assert absent["peak"] > 0 and absent["device"] == "cuda"
        assert server.call("inspect", **texts)["documents"] == 24
        assert refused(server, "plan", device="cpu", paths=[str(tmp_path / "none")]).code == "texts"
        asked = {"paths": [str(tmp_path / "trip.md")], "question": "Where is the key of the cabin?"}
        answer = server.call("ask", **asked)
        assert (answer["text"], answer["line"]) == ("The key of the cabin is in the meter box.", 3)
        assert answer["quoted"] and answer["sources"][0]["document"] == "trip.md"
        assert not server.call("ask", **asked | {"question": "Is there a helicopter?"})["found"]
        assert refused(server, "ask", before=["And then?"], **asked).code == "invalid_params"
        assert server.call("status")["worker"] is None
        assert rss(server.process.pid) < before + 4 * 2**20


def test_a_search_finds_the_passages_of_several_folders_with_file_line_and_strength_and_wakes_no_worker(tmp_path):
    for folder, place in (("home", "under the stone"), ("trips", "in the meter box")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "key.md").write_text(f"# Norway\n\nThe key of the cabin is {place}.")
    with Server(warm=True) as server:
        server.initialize(store=str(tmp_path / "store"), folders=[str(tmp_path)])
        asked = {"question": "Where is the key of the cabin?", "paths": [f"{tmp_path}/home", f"{tmp_path}/trips"]}
        found = server.call("search", **asked, texts=["The ferry leaves at nine."])
        assert found["found"]
        passages = {hit["passage"]["path"]: hit["passage"] for hit in found["hits"]}
        assert passages.keys() == {f"{tmp_path}/home/key.md", f"{tmp_path}/trips/key.md"}
        first = passages[f"{tmp_path}/home/key.md"]
        assert (first["document"], first["line"]) == ("home/key.md", 1) and "under the stone" in first["text"]
        strengths = [hit["strength"] for hit in found["hits"]]
        assert strengths == sorted(strengths, reverse=True) and strengths[-1] > 1
        assert len(server.call("search", **asked, num_passages=1)["hits"]) == 1
        assert len(server.call("search", **asked, num_passages=10**15)["hits"]) == 2
        assert server.call("search", **asked | {"question": "Is there a helicopter?"}) == {"found": False, "hits": []}
        for changes, code in (
            ({"question": ""}, "texts"),
            ({"question": "\ud800"}, "texts"),
            ({"num_passages": 0}, "invalid_option"),
            ({"num_passages": 1.5}, "invalid_params"),
            ({"limit": 3}, "invalid_params"),
            ({"paths": []}, "texts"),
            ({"paths": [f"{tmp_path}/none"]}, "texts"),
            ({"paths": ["/etc"]}, "folder_not_allowed"),
        ):
            assert refused(server, "search", **asked | changes).code == code
        assert server.call("status")["worker"] is None


@pytest.mark.slow
def test_a_plan_is_cancelled_while_it_waits_and_while_it_is_made(server, tmp_path):
    (tmp_path / "long.md").write_text("".join(f"The boat {number} is green.\n\n" for number in range(300_000)))
    texts = {"paths": [str(tmp_path / "long.md")], "device": "cpu"}
    made, waiting = server.send("plan", **texts), server.send("inspect", **texts)
    wait_until(lambda: psutil.Process(server.process.pid).children())
    for number in (waiting, made):
        server.call("cancel", request=number)
    for number in (made, waiting):
        with pytest.raises(Refused, match="The request was cancelled"):
            server.answer(number)
    (tmp_path / "long.md").write_text("".join(f"The boat {number} is green.\n\n" for number in range(300)))
    server.send("plan", number=made, **texts)  # a number that was cancelled is free again
    assert server.answer(made)["peak"] > 0


def test_health_tells_versions_and_what_is_free(server):
    health = server.call("health")
    assert health["versions"]["sebp_edge"] and health["versions"]["torch"] and health["loaded"] is None
    assert health["free_host_memory"] > 10**6
    assert refused(server, "health", device="cpu").code == "invalid_params"


def test_what_comes_before_initialize_is_refused_and_what_comes_twice():
    with Server(warm=True) as server:
        assert server.call("ping") == {}
        assert refused(server, "jobs.list").code == "not_initialized"
        assert refused(server, "initialize", protocol=PROTOCOL + 1).code == "unsupported_version"
        assert refused(server, "initialize", protocol="1").code == "invalid_params"
        for wrong in ({"folders": ["notes"]}, {"folders": ["/a\0b"]}, {"store": "a\0b"}, {"store": "/\ud800"}):
            assert refused(server, "initialize", protocol=PROTOCOL, **wrong).code == "invalid_params"
        server.initialize()
        assert refused(server, "initialize", protocol=PROTOCOL).code == "already_initialized"


@pytest.mark.slow
def test_a_parent_that_has_ended_or_whose_number_is_used_again_is_refused():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    started = psutil.Process(child.pid).create_time()
    with Server(warm=True) as server:
        reused = {"pid": child.pid, "started": started - 3600}
        assert refused(server, "initialize", protocol=PROTOCOL, parent=reused).code == "parent_gone"
        assert server.initialize(parent={"pid": child.pid, "started": started})["protocol"] == PROTOCOL
        child.kill()  # not waited for: it is a zombie
        assert all_gone([psutil.Process(server.process.pid)])
    child.stdin.close()
    child.wait()


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (b"{", "parse_error"),
        (b"\xff\xfe", "parse_error"),
        (b"[" * 100_000, "parse_error"),
        (b'{"jsonrpc": "2.0", "id": 1, "method": "ping", "params": {"x": NaN}}', "parse_error"),
        (b'{"jsonrpc": "2.0", "id": ' + b"9" * 10_000 + b', "method": "ping"}', "parse_error"),
        (b"", "parse_error"),
        (b"[]", "invalid_request"),
        (b"17", "invalid_request"),
        (b'{"id": 1, "method": "ping"}', "invalid_request"),
        (b'{"jsonrpc": "2.0", "id": true, "method": "ping"}', "invalid_request"),
        (b'{"jsonrpc": "2.0", "method": "ping"}', "invalid_request"),
        (b'{"jsonrpc": "2.0", "id": 1, "method": 5}', "invalid_request"),
    ],
)
def test_a_broken_line_gets_an_error_and_the_next_one_an_answer(shared, line, code):
    shared.write(line + b"\n")
    assert shared.wait(lambda message: "error" in message)["error"]["data"]["code"] == code
    assert shared.call("ping") == {}


def test_a_line_of_100_mb_is_refused_without_being_kept(shared):
    before = rss(shared.process.pid)
    for _ in range(100):
        shared.write(b"x" * 2**20)
    shared.write(b"\n")
    error = shared.wait(lambda message: "error" in message)["error"]
    assert error["data"]["code"] == "too_long"
    assert rss(shared.process.pid) < before + 4 * MAX_LINE
    assert shared.call("ping") == {}


@pytest.mark.parametrize(
    ("method", "params", "words"),
    [
        ("generate", {"promt": "x"}, "did you mean 'prompt'"),
        ("generate", {"prompt": 5}, "'prompt' of 'generate' is not a text"),
        ("generate", {"prompt": "x", "max_new_tokens": 1.5}, "is not a whole number"),
        ("generate", {"prompt": "x", "stop": ["a", 1]}, "a list of which each is a text"),
        ("jobs.get", {}, "lacks the parameter 'id'"),
        ("jobs.start", {"id": "a/b", "params": {}}, "64 letters"),
        (
            "jobs.start",
            {"id": "a", "kind": "train", "params": {}},
            "choose from adapt, forget, export, verify, download",
        ),
        ("jobs.start", {"id": "a", "params": {"activate": True}}, "did you mean 'activate_anyway'"),
        ("jobs.start", {"id": "a", "params": {"paths": ["notes"]}}, "not an absolute path"),
        ("jobs.start", {"id": "a", "kind": "export", "params": {"to": "/out"}}, "'export' lacks the parameter 'name'"),
        ("ping", {"x": 1}, "it has none"),
        ("inspect", {"seed": 10**40}, "'seed' of 'inspect' is not a whole number below 2\\^53"),
        ("generate", {"prompt": "x", "temperature": 10**400}, "'temperature' of 'generate' is not a finite number"),
        ("generate", {"messages": [{"role": "user", "content": [INFINITE]}]}, "an object of texts and finite numbers"),
        ("generate", {"prompt": "x", "temperature": INFINITE}, "is not a finite number"),
        (
            "jobs.start",
            {"id": "a", "params": {"texts": ["x"], "name": ""}},
            "'name' of 'adapt' is not a text of one or",
        ),
        ("jobs.start", {"id": "a", "params": {"texts": ["x"], "seed": INFINITE}}, "an object of texts and finite"),
        ("ask", {"question": "x", "adapter": ""}, "is not a text of one or more characters"),
        ("inspect", {"paths": ["/a\0b"]}, "is not an absolute path"),
        ("inspect", {"paths": ["/\ud800"]}, "is not an absolute path"),
        ("inspect", {"texts": ["x"], "model": "/\ud800"}, "is not an absolute path"),
    ],
)
def test_wrong_parameters_are_refused_with_what_is_right(shared, method, params, words):
    number = random.randrange(10**6, 10**9)
    line = json.dumps({"jsonrpc": "2.0", "id": number, "method": method, "params": params})
    shared.write(line.replace("Infinity", "1e999").encode() + b"\n")
    with pytest.raises(Refused, match=words) as caught:
        shared.answer(number)
    assert caught.value.code == "invalid_params"


def test_unknown_methods_and_jobs_are_refused(shared):
    assert refused(shared, "jobs.stop").code == "unknown_method"
    for method, params in (("get", {"id": "a"}), ("cancel", {"expected_job_id": "a"}), ("subscribe", {"id": "a"})):
        assert refused(shared, f"jobs.{method}", **params).code == "unknown_job"
    error = refused(shared, "adapters.rollback", name="nobody").error
    assert error["data"]["code"] == "adapter"
    assert "There is no adapter 'nobody'" in error["message"]


def test_a_thousand_requests_at_once_are_all_answered(shared):
    numbers = [shared.send(random.choice(["ping", "status", "jobs.list", "adapters.list"])) for _ in range(1000)]
    for number in random.sample(numbers, len(numbers)):
        assert isinstance(shared.answer(number), dict)


@pytest.mark.slow
def test_an_app_that_asks_without_reading_is_not_read_either(tmp_path):
    with subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        request = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "x"}).encode() + b"\n"
        written = 0
        os.set_blocking(process.stdin.fileno(), False)
        still_since = time.monotonic()
        while written < 2**17 or time.monotonic() < still_since + 0.5:  # it has read more than a pipe holds
            try:
                sent = os.write(process.stdin.fileno(), request * 1000)
            except BlockingIOError:
                time.sleep(0.01)
                continue
            written += sent
            still_since = time.monotonic()
            assert written < 2**22
        assert rss(process.pid) < 60 * 2**20
        process.stdout.close()  # now it can end
        os.set_blocking(process.stdin.fileno(), True)


@pytest.mark.parametrize("path", ["/etc/passwd", "{own}/../elsewhere", "{own}/link/x"])
def test_folders_outside_of_those_allowed_are_refused(shared, own_folder, path):
    (own_folder / "link").unlink(missing_ok=True)
    (own_folder / "link").symlink_to("/")
    path = path.format(own=own_folder)
    for method, params in (
        ("jobs.start", {"id": "a", "params": {"paths": [path]}}),
        ("jobs.start", {"id": "a", "params": {"texts": ["x"], "recipe": path}}),
        ("jobs.start", {"id": "a", "params": {"texts": ["x"], "model": path}}),
        ("jobs.start", {"id": "a", "kind": "export", "params": {"name": "x", "to": path}}),
        ("jobs.start", {"id": "a", "kind": "forget", "params": {"documents": [path]}}),
        ("inspect", {"paths": [path]}),
        ("models", {"folders": [path]}),
    ):
        assert refused(shared, method, **params).code == "folder_not_allowed"
    assert shared.call("jobs.list") == {"jobs": []}


@pytest.mark.slow
def test_two_apps_cannot_have_one_store_which_is_free_once_its_server_was_killed(tmp_path):
    with Server(warm=True) as server, Server(warm=True) as other:
        server.initialize(store=str(tmp_path))
        error = refused(other, "initialize", protocol=PROTOCOL, store=str(tmp_path))
        assert (error.code, error.error["data"]["retry"]) == ("store_in_use", True)
        assert server.call("jobs.list") == {"jobs": []}
        server.process.kill()
        server.process.wait()
        assert other.initialize(store=str(tmp_path))


@pytest.mark.skipif(sys.platform != "linux", reason="needs prlimit")
def test_a_process_that_cannot_be_started_is_told_and_the_server_goes_on(server, tmp_path):
    """As if there were no memory for it: the pipes of a process cannot be opened."""
    pid = server.process.pid
    numbers = {int(open_file.name) for open_file in Path(f"/proc/{pid}/fd").iterdir()}
    most = next(size for size in itertools.count() if len({*range(size)} - numbers) == 4)
    _, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (most, hard))
    for method, params in (("plan", {"texts": ["The ferry."]}), ("generate", {"prompt": "The"})):
        error = refused(server, method, **params)
        assert (error.code, error.error["data"]["retry"]) == ("worker_broken", True)
    server.start_job("first", params={"texts": ["The ferry."]})
    ended = server.state("first")
    assert (ended["state"], ended["error"]["code"], ended["resumable"]) == ("interrupted", "worker_broken", True)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (hard, hard))
    assert server.call("status")["worker"] is None


def test_prints_and_children_do_not_reach_the_stream(tmp_path):
    """What imports print, what is written to descriptor 1, and what a child reads from 0."""
    code = (
        "import sys; from sebp_edge.serve.streams import take_streams; taken = take_streams()\n"
        "import os, subprocess; print('stray'); os.write(1, b'stray')\n"
        "child = subprocess.run(['cat'], stdout=1); print(child.returncode, flush=True)\n"
        "os.write(taken[1], os.read(taken[0], 100))"
    )
    done = subprocess.run([sys.executable, "-c", code], input=b"request\n", capture_output=True, timeout=200)
    assert done.stdout == b"request\n"
    assert done.stderr.count(b"stray") == 2


@pytest.mark.parametrize("closed", ["1", "012"])
def test_it_starts_with_closed_streams(closed):
    """A service may have none; without input, it ends."""
    closing = f"import os\nfor one in {list(map(int, closed))}: os.close(one)\n"
    code = closing + "from sebp_edge.serve.__main__ import main; main()"
    done = subprocess.run([sys.executable, "-c", code], stdin=subprocess.DEVNULL, capture_output=True, timeout=200)
    assert done.returncode == 0
    assert b"Traceback" not in done.stderr


def test_the_command_line_has_it_too():
    with Server(command=[sys.executable, "-c", "from sebp_edge.cli import main; main()", "serve"]) as server:
        assert {"adapters.list", "jobs.start"} < {*server.initialize()["methods"]}


@pytest.mark.slow
def test_a_worker_that_cannot_start_says_why(tmp_path):
    """As in an app that was frozen without a library."""
    (tmp_path / "torch.py").write_text("raise ImportError('libcuda is missing')")
    with Server(env=environment(PYTHONPATH=str(tmp_path))) as server:
        server.initialize(store=str(tmp_path / "store"))
        error = refused(server, "generate", prompt="the")
        assert error.code == "worker_broken"
        assert "libcuda is missing" in str(error)
        server.start_job("first", params={"texts": ["the"]})
        assert server.state("first")["error"]["code"] == "worker_broken"
        assert server.call("status")["worker"] is None
