"""No process of `sebp-edge serve` outlives its app, however that ends; `test_jobs.py` kills servers and workers."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest
from served import COMMAND, SECONDS, Server, all_gone, processes_below

linux = pytest.mark.skipif(sys.platform != "linux", reason="the kernel's signal at a parent's end is Linux's")
# An app: starts a server and a training, and prints the number of each event that it sees.
APP = """
import asyncio, json, sys
from sebp_edge.serve.client import Client

async def main():
    settings, job = json.loads(sys.argv[1]), json.loads(sys.argv[2])
    client = await Client.start(**settings)
    print(client.process.pid, flush=True)
    await client.call("jobs.start", id="first", params=job)
    async for event in client.events("first"):
        print(event["number"], flush=True)
    await asyncio.sleep(1000)

asyncio.run(main())
"""


@pytest.fixture
def app(settings, training):
    """A running app, and its server with all below, at a random moment of the start of a training."""
    command = [sys.executable, "-c", APP, json.dumps(settings), json.dumps(training)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        server = int(process.stdout.readline())
        for _ in range(random.randrange(3)):
            process.stdout.readline()
        time.sleep(random.uniform(0, 0.3))
        yield process, processes_below(server)
        process.kill()


def assert_the_job_is_shown(settings):
    with Server(warm=True) as server:
        server.initialize(**settings)
        jobs = server.call("jobs.list")["jobs"]
        assert [job["state"] for job in jobs] in ([], ["interrupted"], ["paused"], ["done"])
        assert all(job["resumable"] == (job["state"] == "paused") or job["state"] == "interrupted" for job in jobs)


@pytest.mark.slow
def test_a_killed_app_leaves_no_process(app, settings):
    process, below = app
    process.kill()
    assert all_gone(below)
    assert_the_job_is_shown(settings)


@pytest.mark.slow
def test_it_ends_after_its_input_whatever_it_does(settings, training):
    """A worker that is stopped cannot even save its state."""
    with Server(warm=True) as server:
        server.initialize(**settings)
        server.start_job("first", params=training)
        server.event("first", lambda event: event["event"] == random.choice(["preparing", "texts_read", "step"]))
        processes = processes_below(server.process.pid)
        assert len(processes) >= 2
        if random.random() < 0.5:
            os.kill(server.worker(), signal.SIGSTOP)
        server.process.stdin.close()
        assert all_gone(processes)
    assert_the_job_is_shown(settings)


@pytest.mark.parametrize("waits", [True, False])
def test_an_input_that_another_process_inherited_does_not_keep_it(waits):
    """The app is gone, perhaps since before its server ran; its end of the pipe is still open elsewhere."""
    code = (
        "import os, subprocess, sys, time\n"
        f"server = subprocess.Popen({COMMAND!r}, stdin=subprocess.PIPE, stdout=subprocess.PIPE)\n"
        "heir = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(100)'], stdout=subprocess.DEVNULL,\n"
        "    pass_fds=[server.stdin.fileno(), server.stdout.fileno()])\n"
        f"if {waits}: server.stdout.readline()\n"
        "print(server.pid, heir.pid, flush=True)\n"
        "os._exit(0)\n"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as app:
        server, heir = map(int, app.stdout.readline().split())
    try:
        assert all_gone(processes_below(server))
    finally:
        os.kill(heir, signal.SIGKILL)


@linux
def test_a_server_whose_app_is_outside_of_its_container_stays():
    inside = ["unshare", "--user", "--map-root-user", "--pid", "--fork"]
    if shutil.which("unshare") is None or subprocess.run([*inside, "true"], capture_output=True).returncode:
        pytest.skip("this system makes no namespace of processes")
    with Server(command=[*inside, *COMMAND]) as server:
        for _ in range(2):  # it looks at its app before it reads the second one
            assert server.call("ping") == {}


@pytest.mark.slow
@linux
def test_a_thread_that_ends_does_not_end_the_server_that_it_started():
    """The kernel's signal comes when the thread ends; the app is still there."""
    code = (
        "import subprocess, threading, time\n"
        "def start():\n"
        f"    server = subprocess.Popen({COMMAND!r}, stdin=subprocess.PIPE, stdout=subprocess.PIPE)\n"
        "    servers.append(server); server.stdout.readline()\n"
        "servers = []\n"
        "thread = threading.Thread(target=start); thread.start(); thread.join()\n"
        "time.sleep(0.5)\n"
        "assert servers[0].poll() is None\n"
        'servers[0].stdin.write(b\'{"jsonrpc": "2.0", "id": 1, "method": "ping"}\\n\'); servers[0].stdin.flush()\n'
        "print(servers[0].stdout.readline().decode())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=SECONDS)
    assert json.loads(done.stdout)["result"] == {}, done.stderr


@linux
def test_a_child_that_starts_after_its_parent_has_ended_ends():
    code = "from sebp_edge.basics.parents import end_with_parent; end_with_parent(1 << 22); print('still here')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=SECONDS)
    assert (done.returncode, done.stdout) == (1, "")


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP])
def test_signals_end_it(signum, tmp_path):
    # Under nohup the tests ignore SIGHUP, and what they start does then.
    before = signal.signal(signum, signal.SIG_DFL)
    try:
        server = Server()
    finally:
        signal.signal(signum, before)
    with server:
        server.initialize(store=str(tmp_path))
        server.process.send_signal(signum)
        assert server.process.wait(SECONDS) == 0


def test_ctrl_c_is_for_the_app(tmp_path):
    with Server() as server:
        server.initialize(store=str(tmp_path))
        server.process.send_signal(signal.SIGINT)
        assert server.call("ping") == {}
