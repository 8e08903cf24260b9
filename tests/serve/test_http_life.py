"""A server for apps that speak HTTP while apps go, wait and do not read, while a job trains, and at its end."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import psutil
import pytest
from builders import make_llama, write_notes
from command import COMMAND, RECIPE, assert_one_sentence, run
from http_door import Door, open_door, open_door_of_notes
from safetensors.torch import load_file, save_file
from served import SECONDS, environment, wait_until

pytest.importorskip("resource", reason="needs a Unix")
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
# Longer than a test waits.
ENDLESS = {"model": "base", "prompt": "the boat", "temperature": 0, "max_tokens": 200_000}
ASKED = [{"role": "user", "content": "Where does the key of the shed hang?"}]
CANARY = "xylophonequartz"


@pytest.fixture(scope="module")
def long_model(tmp_path_factory, tokenizer):
    """The folder of a model with a long context."""
    folder = tmp_path_factory.mktemp("models") / "long"
    make_llama(num_hidden_layers=1, max_position_embeddings=2**18).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("notes")
    write_notes(folder / "notes")
    (folder / "test.toml").write_text(RECIPE.replace("epochs = 1", "epochs = 20"))
    return folder


@pytest.fixture(scope="module")
def door(tmp_path_factory, long_model, folder):
    with open_door(tmp_path_factory.mktemp("door"), "--model", long_model, "--folder", folder) as door:
        yield door


def is_idle(door):
    worker = door.rpc("status")["worker"]
    return worker is not None and worker["requests"] == 0


@contextmanager
def sent(door, body):
    """Context of a request whose answer nobody has read yet, once the worker has it."""
    connection = door.send("POST", COMPLETIONS, json.dumps(body))
    try:
        wait_until(lambda: not is_idle(door))
        yield connection.sock
    finally:
        connection.close()


@pytest.mark.parametrize("stream", [True, False])
def test_an_app_that_goes_ends_its_request_and_one_that_waits(door, stream):
    with sent(door, ENDLESS | {"stream": stream}) as first:
        if stream:
            assert first.recv(4096).startswith(b"HTTP/1.1 200")
        with sent(door, ENDLESS | {"stream": stream}):
            wait_until(lambda: door.rpc("status")["worker"]["requests"] == 2)
        wait_until(lambda: door.rpc("status")["worker"]["requests"] == 1)
    wait_until(lambda: is_idle(door))
    assert door.chat(max_tokens=2)[0] == 200


@pytest.mark.slow
def test_an_app_that_does_not_read_keeps_no_other_one_waiting_for_ever(door):
    with sent(door, ENDLESS | {"max_tokens": 3000, "stream": True}) as slow:
        assert door.chat(max_tokens=2)[0] == 200
        slow.settimeout(SECONDS)
        answer = b""
        while b"[DONE]" not in answer[-100:]:
            answer += slow.recv(2**16)
    assert answer.count(b"text_completion") > 1000


def test_half_a_request_keeps_no_other_one_waiting(door):
    with socket.create_connection(("127.0.0.1", door.port)) as half:
        half.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: 127.0.0.1:{door.port}\r\nContent-Length: 9\r\n\r\n{{".encode())
        assert door.chat(max_tokens=2)[0] == 200


@pytest.mark.slow
def test_twenty_requests_at_once_are_answered_while_a_job_trains_that_two_apps_follow(door, folder, long_model):
    params = {"paths": [str(folder / "notes")], "model": str(long_model), "recipe": str(folder / "test.toml")}
    assert door.rpc("jobs.start", id="first", params=params | {"device": "cpu"})["job"]["state"] == "queued"
    with ThreadPoolExecutor(22) as apps:
        whole = apps.submit(lambda: list(door.follow("first")))
        answers = list(apps.map(lambda number: door.chat(seed=number, max_tokens=4), range(20)))
        wait_until(lambda: door.rpc("jobs.get", id="first")["job"]["last_event"] >= 5)
        other = apps.submit(lambda: list(door.follow("first", since=5)))
        (answered, *events), (_, *later) = whole.result(SECONDS), other.result(SECONDS)
    assert [status for status, _ in answers] == [200] * 20
    assert (answered["id"], answered["result"]["job"]["id"]) == (7, "first")
    numbers = [each["params"]["number"] for each in events]
    assert numbers == [*range(1, len(events) + 1)] and {each["method"] for each in events} == {"job.event"}
    assert later == events[5:]
    assert events[-1]["params"]["event"]["state"] == "done", events[-1]["params"]["event"]
    assert door.call("GET", "/v1/models")[1]["data"][-1]["id"] == "default@1"


@pytest.mark.slow
def test_more_requests_than_it_takes_are_refused_in_openai_s_form(door):
    with ThreadPoolExecutor(300) as apps:
        with sent(door, ENDLESS):
            asked = [apps.submit(door.chat, max_tokens=1) for _ in range(300)]
            wait_until(lambda: any(each.done() for each in asked))  # refused
        answers = [each.result() for each in asked]
    refused = [answer["error"] for status, answer in answers if status != 200]
    assert {status for status, _ in answers} == {200, 503}
    assert {(error["code"], error["type"]) for error in refused} == {("busy", "server_error")}
    assert door.chat(max_tokens=2)[0] == 200


def test_each_adapter_answers_with_its_own_base_model_of_which_one_is_in_memory(
    tmp_path, store_of_notes, model_folder, long_model
):
    with open_door_of_notes(tmp_path, store_of_notes, long_model) as door:
        lost = tmp_path / "sebp-edge" / "adapters" / "lost"
        shutil.copytree(lost.with_name("default"), lost)
        record = json.loads((lost / "1" / "sebp_edge.json").read_text())
        (lost / "1" / "sebp_edge.json").write_text(json.dumps(record | {"base_model": "moved", "fingerprint": "0"}))
        texts, own = {}, {"base": "long", "default": "micro-llama", "default@1": "micro-llama"}
        for name in ("base", "default", "base", "default@1"):
            base = own[name]
            status, answer = door.call("POST", COMPLETIONS, {"model": name, "prompt": "the boat", "temperature": 0})
            assert status == 200 and door.rpc("health")["loaded"]["model"] == base
            assert texts.setdefault(base, answer["choices"][0]["text"]) == answer["choices"][0]["text"]
        assert texts["long"] != texts["micro-llama"]
        status, answer = door.chat(model="lost")
        assert status == 400 and "made for the model in a folder 'moved'; give that" in answer["error"]["message"]
        assert {"default", "lost"} <= {each["id"] for each in door.call("GET", "/v1/models")[1]["data"]}


def test_an_adapter_answers_again_once_its_base_model_is_put_back(tmp_path, store_of_notes, model_folder):
    folder = shutil.copytree(model_folder, tmp_path / model_folder.name)
    weights = folder / "model.safetensors"
    own, changed = weights.read_bytes(), load_file(weights)
    changed["model.embed_tokens.weight"] *= 1.5
    with open_door_of_notes(tmp_path, store_of_notes, folder) as door:
        save_file(changed, weights, {"format": "pt"})
        status, answer = door.chat(model="default")
        assert status == 400 and "made for other weights of micro-llama; adapt again" in answer["error"]["message"]
        weights.write_bytes(own)
        assert door.chat(model="default")[0] == 200


def test_the_app_that_started_it_changes_folders_and_no_other_one(tmp_path, long_model):
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys" / "shed.md").write_text("The key of the shed hangs behind the green door.")
    keys = str(tmp_path / "keys")
    with open_door(tmp_path, "--model", long_model, stdin=subprocess.PIPE) as door:

        def tell(line):
            door.process.stdin.write(line + "\n")
            door.process.stdin.flush()
            return json.loads(door.process.stdout.readline())

        def folders(**params):
            return tell(json.dumps({"jsonrpc": "2.0", "id": "a", "method": "folders", "params": params}))

        def code(message):
            return message["error"]["data"]["code"]

        assert door.chat(model="base:ask", messages=ASKED)[0] == 400
        for params in ({"add": [keys]}, {}):
            assert door.rpc("folders", **params)["data"]["code"] == "forbidden"
        assert folders(add=[keys])["result"]["folders"] == [str(long_model), keys]
        status, answer = door.chat(model="base:ask", messages=ASKED)
        assert status == 200 and "green door" in answer["choices"][0]["message"]["content"]
        assert "base:ask" in {each["id"] for each in door.call("GET", "/v1/models")[1]["data"]}
        assert door.rpc("search", question="Where is the key?", paths=[keys])["hits"]
        for line in ("", "{", "[]", "5", '{"jsonrpc": "2.0", "id": 1, "method": "shutdown"}', "x" * 9_000_000):
            assert code(tell(line)) in ("parse_error", "invalid_request", "unknown_method")
        assert code(tell('{"jsonrpc": "2.0", "id": 1, "method": "folders", "params": [1]}')) == "invalid_params"
        assert code(folders(remove=["/elsewhere"])) == "invalid_params"
        assert folders(remove=[keys])["result"]["folders"] == [str(long_model)]
        assert door.chat(model="base:ask", messages=ASKED)[0] == 400
        assert door.rpc("search", question="Where is the key?", paths=[keys])["data"]["code"] == "folder_not_allowed"
        door.process.stdin.close()  # the server serves the others
        assert door.chat(max_tokens=2)[0] == 200


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_it_quietly_an_open_stream_says_so_and_nothing_is_kept_of_texts(
    tmp_path, long_model, folder, signum
):
    with open_door(tmp_path, "--model", long_model, "--folder", folder) as door:
        said = [{"role": "user", "content": f"Where is the {CANARY}?"}]
        assert door.chat(messages=said, max_tokens=4)[0] == 200
        assert door.chat(messages=said, model="base:ask")[0] == 200
        assert door.chat(messages=[{"role": CANARY, "content": CANARY}])[0] == 400
        assert door.call("GET", f"/{CANARY}?{CANARY}")[0] == 404
        stream = door.stream(COMPLETIONS, ENDLESS | {"stream": True, "prompt": CANARY})
        next(stream)
        assert door.end(signum) == (0, "")
        *_, last = stream
        assert last["error"]["type"] == "server_error"
        for server in door.servers:
            server.wait(SECONDS)
    kept = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert kept and not [path for path in kept if CANARY.encode() in path.read_bytes()]


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("strace"), reason="needs strace")
def test_a_job_and_answers_reach_nobody_write_nowhere_else_and_keep_no_text(tmp_path, long_model):
    """Traces the kernel's calls of all its processes, started cold, as their owner does."""
    homes = ("HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "TMPDIR")
    home, notes, trace = (tmp_path / name for name in ("home", "notes", "trace"))
    home.mkdir(), notes.mkdir()
    for number in range(16):
        (notes / f"{number}.md").write_text(f"The key of the shed number {number} is {CANARY}. " * 3)
    (home / "test.toml").write_text(RECIPE)
    traced = ["strace", "-f", "-qq", "-e", "trace=%network,open,openat,creat,rename,renameat,renameat2", "-o", trace]
    options = ("serve", "--http", "0", "--model", long_model, "--folder", notes, "--folder", home)
    environ = environment(PYTHONDONTWRITEBYTECODE="1", **dict.fromkeys(homes, str(home)))
    with subprocess.Popen(
        [*map(str, [*traced, *COMMAND, *options])],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environ,
        cwd=home,
    ) as serving:
        try:
            door = Door(serving)
            params = {"paths": [str(notes)], "model": str(long_model), "recipe": str(home / "test.toml")}
            door.rpc("jobs.start", id="first", params=params | {"device": "cpu", "activate_anyway": True})
            *_, last = door.follow("first")
            assert last["params"]["event"]["state"] == "done", last
            said = [{"role": "user", "content": f"Where is the {CANARY}?"}]
            for name in ("base", "default", "base:ask"):
                assert door.chat(model=name, messages=said, max_tokens=4)[0] == 200
            assert door.call("POST", COMPLETIONS, {"model": "default", "prompt": CANARY})[0] == 200
        finally:
            psutil.Process(serving.pid).children()[0].send_signal(signal.SIGINT)  # strace leaves signals to it
            output, errors = serving.communicate(timeout=SECONDS)
    assert CANARY not in output + errors
    calls = trace.read_text(errors="replace").splitlines()
    with_address = [call for call in calls if "sa_family=AF_INET" in call]
    bound = [call for call in with_address if " bind(" in call]
    assert len(bound) == 1 and 'inet_addr("127.0.0.1")' in bound[0]
    assert not [call for call in with_address if " connect(" in call or " sendto(" in call or " sendmsg(" in call]
    assert any(" accept" in call for call in with_address)  # of its apps
    writing = [call for call in calls if re.search(r"O_WRONLY|O_RDWR|O_CREAT| creat\(| rename", call)]
    elsewhere = [
        call for call in writing if not re.search(rf'"({home}|/dev|/proc|[^/])', call) and " = -1 " not in call
    ]
    assert writing and not elsewhere
    kept = [path for path in home.rglob("*") if path.is_file()]
    assert kept and not [path for path in kept if CANARY.encode() in path.read_bytes()]


@pytest.mark.slow
def test_it_ends_with_a_sentence_if_its_server_was_killed(tmp_path):
    with open_door(tmp_path) as door:
        os.kill(door.rpc("status")["pid"], signal.SIGKILL)
        output, errors = door.process.communicate(timeout=SECONDS)
    assert (door.process.returncode, output) == (1, "")
    assert errors.endswith("The server has ended unexpectedly.\n") and "Traceback" not in errors


def test_a_port_or_a_store_in_use_is_one_sentence(door, tmp_path, own_data_folder):
    assert_one_sentence(run("serve", "--http", door.port, "--model", "tiny"), f"Port {door.port} is in use", 2)
    with open_door(tmp_path):
        result = run("serve", "--http", "0", "--model", "tiny", env={"XDG_DATA_HOME": str(tmp_path)})
        assert_one_sentence(result, "Another .*server")


def test_a_token_that_others_can_read_or_that_is_damaged_is_refused(own_data_folder):
    file = own_data_folder.parent / "http-token"
    file.parent.mkdir(parents=True)
    file.write_text("a" * 43)
    assert_one_sentence(run("serve", "--http", "0", "--model", "tiny"), "Others than you can read")
    file.write_text("short")
    file.chmod(0o600)
    assert_one_sentence(run("serve", "--http", "0", "--model", "tiny"), "is damaged")


def test_without_the_extra_one_sentence_says_how_to_get_it(monkeypatch, own_data_folder):
    monkeypatch.setitem(sys.modules, "sebp_edge.serve.http.door", None)
    assert_one_sentence(run("serve", "--http", "--model", "tiny"), r"pip install 'sebp-edge\[http\]'", 2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["7000"], "go with --http"),
        (["--folder", "."], "go with --http"),
        (["--origin", "app://a"], "go with --http"),
        (["--http", "--mcp", "."], "do not go together"),
        (["--http", "--folder", "nowhere"], "There is no folder 'nowhere'"),
        (["--http", "--may-learn"], "goes with --mcp"),
        (["--http", "70000"], "less than or equal to 65535"),
    ],
)
def test_a_wrong_option_is_refused(options, words, own_data_folder):
    result = run("serve", *options)
    assert result.exit_code == 2 and words in " ".join(result.stderr.split()) and not result.stdout
