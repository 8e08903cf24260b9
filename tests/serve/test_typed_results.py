"""What each method returns is as the schema has it, from which both clients have their types."""

import ast
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec

import client_stub
import pytest
from jsonschema import Draft202012Validator
from message_schema import RESULTS, make_schema
from served import Server, wait_until

from sebp_edge.serve.methods import METHODS

DEFINITIONS = make_schema()["$defs"]
for definition in DEFINITIONS.values():
    definition.setdefault("additionalProperties", False)


def check(method, result):
    """Checks a result: it has all keys of its type, and no other ones."""
    schema = {"$ref": f"#/$defs/{RESULTS[method].__name__}", "$defs": DEFINITIONS}
    assert [error.message for error in Draft202012Validator(schema).iter_errors(result)] == [], method
    return result


@pytest.mark.slow
def test_the_result_of_each_method_keeps_to_the_schema(tmp_path, store_of_notes, model_folder, training):
    shutil.copytree(store_of_notes.folder, tmp_path / "store" / "adapters")
    (tmp_path / "key.md").write_text("The key of the shed hangs behind the green door.")
    seen, model = set(), {"model": str(model_folder), "device": "cpu"}
    asked = {"question": "Where does the key of the shed hang?", "paths": [str(tmp_path / "key.md")]}
    with Server(warm=True) as server:

        def call(method, **params):
            seen.add(method)
            return check(method, server.call(method, **params))

        call("ping")
        call("status")
        call("initialize", protocol=1, store=str(tmp_path / "store"), folders=[str(tmp_path), str(model_folder)])
        call("search", **asked)
        call("ask", **asked)
        call("ask", question="Is there a helicopter?", paths=asked["paths"])
        call("health")
        call("folders")
        for method in ("adapters.list", "models", "recipes", "jobs.list"):
            call(method)
        for method in ("adapters.history", "adapters.documents", "report"):
            call(method, name="default")
        call("adapters.diff", name="default", old=1, new=1)
        call("adapters.export", name="default", to=str(tmp_path / "one"))
        call("adapters.import", file=str(tmp_path / "one"))
        call("adapters.import", file=str(tmp_path / "one"))
        call("adapters.gc", keep=1)
        call("adapters.activate", name="default", version=2)
        call("adapters.rollback", name="default")
        call("adapters.rename", name="default", new_name="mine")
        call("inspect", **model, paths=training["paths"])
        call("plan", **model, paths=training["paths"])
        call("generate", **model, prompt="the", max_new_tokens=2)
        call("complete", **model, before="the ", min_probability=0.001)
        call("search", **asked)
        assert call("health")["loaded"] and call("status")["worker"]
        call("cancel", request=10**6)
        with server.held("first", "step", params=training | {"name": "other"}):
            call("jobs.start", id="first", params=training | {"name": "other"})
            call("jobs.subscribe", id="first")
            call("jobs.unsubscribe", id="first")
            call("jobs.pause", expected_job_id="first")
        wait_until(lambda: call("jobs.get", id="first")["job"]["state"] == "paused")
        call("jobs.resume", id="first")
        call("jobs.cancel", expected_job_id="first")
        wait_until(lambda: call("jobs.list")["jobs"][0]["state"] == "interrupted")
        call("jobs.remove", id="first")
        call("adapters.remove", name="mine")
        call("unload")
        call("shutdown")
    assert seen == METHODS.keys() == RESULTS.keys()


def members(file):
    """Returns the names that the classes of a file define for others, by class."""
    classes = [node for node in ast.parse(file.read_text(encoding="utf-8")).body if isinstance(node, ast.ClassDef)]
    functions = ast.FunctionDef | ast.AsyncFunctionDef
    found = {kind.name: {each.name for each in kind.body if isinstance(each, functions)} for kind in classes}
    own = re.compile(r"__init__|_[^_].*")
    return {
        kind: {name for name in names if not own.fullmatch(name)} for kind, names in found.items() if kind[0] != "_"
    }


def test_the_types_of_the_python_client_have_what_it_has():
    assert members(client_stub.FILE) == members(client_stub.FILE.with_suffix(".py"))


TYPED = """
from sebp_edge.serve.client import Client

async def main() -> None:
    async with await Client.start(folders=["/home/me/notes"]) as client:
        strength: float = (await client.call("search", question="Who?"))["hits"][0]["strength"]
        async for event in client.events((await client.call("jobs.list"))["jobs"][0]["id"]):
            share: float = event["progress"]
        answer = await client.call("ask", question="Who?", on_text=print)
        line: int | None = answer["line"]
        (await client.call("jobs.list"))["job"]  # no such key
        await client.call("jobs.stop")  # no such method
        text: int = (await client.call("generate", prompt="the"))["text"]  # another type
        (await client.call("status"))["worker"]["pid"]  # there may be none
"""


@pytest.mark.skipif(not find_spec("mypy"), reason="needs the package mypy")
def test_a_type_checker_knows_the_results_of_the_python_client(tmp_path):
    (tmp_path / "app.py").write_text(TYPED)
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "app.py"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    errors = {int(line.split(":")[1]) for line in done.stdout.splitlines() if ": error:" in line}
    assert errors == {number for number, line in enumerate(TYPED.splitlines(), 1) if "  # " in line}, done.stdout
