"""An assistant's own client of the Model Context Protocol asks about notes, and ends what it started."""

import asyncio
import json
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
from builders import make_llama
from served import ENDED, SECONDS, all_gone, environment, processes_below

from sebp_edge import AdapterStore

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not find_spec("mcp"), reason="needs the package mcp")]
NOTE = "# Keys\n\nThe key of the shed hangs behind the green door.\n\nThe boat is paid until March.\n"


def with_session(notes, use, *options, first="", **callbacks):
    """Starts the server as an assistant does, and returns what `use` returns of the session.

    Args:
        first: code that the server runs first.
        callbacks: what the assistant offers.
    """
    # Imported here, since that takes a second, also in processes that do not run these tests.
    from mcp import ClientSession, StdioServerParameters
    from mcp.client.stdio import stdio_client

    async def serve():
        command = ["-c", f"{first}from sebp_edge.cli import main; main()", "serve", "--mcp", str(notes), *options]
        parameters = StdioServerParameters(command=sys.executable, args=command, env=environment())
        async with stdio_client(parameters) as streams, ClientSession(*streams, **callbacks) as session:
            await session.initialize()
            return await use(session)

    return asyncio.run(serve())


@pytest.fixture
def notes(tmp_path, own_data_folder):
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "keys.md").write_text(NOTE)
    return folder


def test_it_answers_with_a_notes_name_learns_and_forgets_if_allowed_and_leaves_no_process(
    notes, notes_folder, tokenizer, tmp_path, own_data_folder, warm_servers
):
    """The tools return at once; a path outside of the notes is refused."""
    model = tmp_path / "micro"
    make_llama(max_position_embeddings=1024, num_hidden_layers=1).save_pretrained(model)
    tokenizer.save_pretrained(model)
    first = f"import sebp_edge.serve.client as client; client.command_of = lambda *_: {warm_servers.command}\n"

    async def run_tool(session, tool, **arguments):
        started = json.loads((await session.call_tool(tool, arguments)).content[0].text)
        if tool == "forget":  # only once it is confirmed
            assert started["forgotten"] is False and "cannot be undone" in started["about"]
            wrong = json.loads((await session.call_tool(tool, arguments | {"confirm": "yes"})).content[0].text)
            assert wrong["forgotten"] is False
            arguments["confirm"] = wrong["confirm"]
            started = json.loads((await session.call_tool(tool, arguments)).content[0].text)
        while True:
            status = json.loads((await session.call_tool("status", {})).content[0].text)
            job = next(one for one in status["jobs"] if one["id"] == started["job"]["id"])
            if job["state"] in ENDED:
                return job
            await asyncio.sleep(0.2)

    async def use(session):
        answer = await session.call_tool("ask", {"question": "Where does the key of the shed hang?"})
        too_little = await run_tool(session, "learn")
        shutil.copytree(notes_folder, notes, dirs_exist_ok=True)
        learnt = await run_tool(session, "learn")
        other = {"document": str(notes.parent / "other.md")}
        other["confirm"] = json.loads((await session.call_tool("forget", other)).content[0].text)["confirm"]
        outside = await session.call_tool("forget", other)
        forgot = await run_tool(session, "forget", document=str(notes / "note-00.md"))
        (own,) = (one for one in psutil.process_iter(["cmdline"]) if str(notes) in (one.info["cmdline"] or []))
        started = [one for each in (own, *warm_servers.started) for one in processes_below(each.pid)]
        return answer, too_little, learnt, outside, forgot, started

    options = ("--may-learn", "--model", str(model))
    answer, too_little, learnt, outside, forgot, started = with_session(notes, use, *options, first=first)
    assert len(started) >= 3  # the assistant's server, the supervisor and its worker
    assert all_gone(started)
    assert not getattr(answer, "is_error", getattr(answer, "isError", False)), answer
    said = json.dumps([part.text for part in answer.content])
    assert "green door" in said and "keys.md" in said
    found = json.loads(answer.content[0].text)
    assert "text" not in found and ("quotation" in found) != ("reply_from_notes" in found)
    assert "instruction" in found["about"] and "green door" not in found["about"]
    assert all("green door" in each["quotation"] or "boat" in each["quotation"] for each in found["sources"])
    assert (too_little["state"], too_little["error"]["code"]) == ("refused", "texts")
    assert (learnt["kind"], learnt["state"]) == ("adapt", "done"), learnt
    assert "outside of the folders" in outside.content[0].text
    assert (forgot["kind"], forgot["state"]) == ("forget", "done"), forgot
    assert len(forgot["result"]["documents"]) == 1
    assert forgot["result"]["versions_removed"] == [1]
    adapter = AdapterStore(own_data_folder.parent).adapter("default")
    listed = {Path(document.name).name for version in adapter.versions() for document in adapter.documents(version)}
    assert "note-01.md" in listed and "note-00.md" not in listed


def test_it_says_what_reads_and_what_destroys_sends_no_note_and_ends_quietly(notes, notes_folder):
    """An assistant that may learn asks the person before it forgets; it forgets nothing if they do not want that."""
    from mcp_types import ElicitResult

    asked = []

    async def decline(context, params):
        asked.append(params.message)
        return ElicitResult(action="accept", content={"forget": False})

    async def use(session):
        tools = {tool.name: tool.annotations for tool in (await session.list_tools()).tools}
        inspected = await session.call_tool("inspect", {})
        return tools, inspected, await session.call_tool("forget", {"document": str(notes / "keys.md")})

    shutil.copytree(notes_folder, notes, dirs_exist_ok=True)
    tools, inspected, refused = with_session(notes, use, "--may-learn", elicitation_callback=decline)
    reads = {name: hints.read_only_hint for name, hints in tools.items()}
    assert reads == {"ask": True, "inspect": True, "status": True, "learn": False, "forget": False}
    assert (tools["learn"].destructive_hint, tools["forget"].destructive_hint) == (False, True)
    found = json.loads(inspected.content[0].text)
    assert found["documents"] > 20 and found["plan"]["peak"] > 0
    assert "rendered" not in found and {"smaller", "full", "footprint"}.isdisjoint(found["plan"])
    words = {word for path in notes.iterdir() for word in path.read_text().split() if len(word) > 9}
    assert not [word for word in words if word in inspected.content[0].text]
    assert refused.is_error and "Nothing was changed" in refused.content[0].text
    assert len(asked) == 1 and "keys.md" in asked[0]


def test_it_changes_nothing_by_default_and_ends_without_a_traceback_if_the_assistant_goes_away(notes):
    command = [sys.executable, "-c", "from sebp_edge.cli import main; main()", "serve", "--mcp", str(notes)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=environment(), text=True, **pipes) as process:
        about = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "x", "version": "1"}}
        for message in (
            {"id": 1, "method": "initialize", "params": about},
            {"method": "notifications/initialized"},
            {"id": 2, "method": "tools/list"},
            {"id": 3, "method": "tools/call", "params": {"name": "status", "arguments": {}}},
        ):
            print(json.dumps({"jsonrpc": "2.0"} | message), file=process.stdin, flush=True)
            if (id := message.get("id", 3)) < 3:
                answer = json.loads(process.stdout.readline())
                assert answer["id"] == id
        assert {tool["name"] for tool in answer["result"]["tools"]} == {"ask", "inspect", "status"}
        process.stdout.close()
        process.stdin.close()
        assert process.wait(SECONDS) == 0
        assert process.stderr.read() == ""
