"""The messages of --json and the SDK: one schema that ships, which only grows, and conversations that keep to it."""

import hashlib
import json
import re
from pathlib import Path

import client_stub
import pytest
from command import process, records, run
from jsonschema import Draft202012Validator
from message_schema import RELEASED, error_table, make_schema, schema_text, surface
from message_types import FILE, typescript

from sebp_edge import AdapterStore, SebpEdgeError, errors
from sebp_edge.errors import TrainingStopped

SCHEMA = (Path(__file__).parents[1] / "sebp_edge" / "basics" / "schema.json").read_bytes()
RECORDED = Path(__file__).parent / "messages"
KINDS = sorted(
    (kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, SebpEdgeError)),
    key=lambda kind: kind.code,
)


def strict(schema: dict) -> dict:
    """The schema, without keys that it does not name; of a model, more is known of some than of others."""
    for name, definition in schema["$defs"].items():
        if "properties" in definition and name != "model":
            definition["additionalProperties"] = False
    return schema


VALIDATOR = Draft202012Validator(strict(make_schema()))


def check(found: list[dict]) -> list[dict]:
    """Checks each message by the definition of its kind, and that all are of one job, in order; returns them."""
    for record in found:
        kind = "unchanged" if record.get("unchanged") else record["event"]
        name = "_".join(filter(None, [kind, record.get("result_of")]))
        problems = [
            error.message
            for error in VALIDATOR.evolve(
                schema=VALIDATOR.schema | {"anyOf": [{"$ref": f"#/$defs/{name}"}]}
            ).iter_errors(record)
        ]
        assert problems == [], (record, problems)
    times = [record["time"] for record in found]
    assert times == sorted(times)
    assert len({record["job"] for record in found}) == 1
    return found


# ------------------------------------------------------------------------------------------------------------- schema


def test_the_schema_and_the_types_that_ship_are_made_from_the_classes():
    assert SCHEMA.decode() == schema_text(), "run python tests/helpers/message_schema.py"
    assert FILE.read_text(encoding="ascii") == typescript(), "run python tests/helpers/message_types.py"
    assert client_stub.FILE.read_text(encoding="ascii") == client_stub.stub(), "run python tests/helpers/client_stub.py"
    Draft202012Validator.check_schema(json.loads(SCHEMA))


def test_what_was_released_stays():
    released = RELEASED.read_text().splitlines()
    assert len(released) > 300
    assert sorted(set(released) - set(surface(make_schema()))) == []


def test_a_change_of_a_type_or_a_missing_key_is_no_addition():
    schema = make_schema()
    before = set(surface(schema))
    schema["$defs"]["step"]["properties"]["loss"] = {"type": "string"}
    del schema["$defs"]["saved"]["properties"]["active"]
    lost = before - set(surface(schema))
    assert {line.split(" ")[0] for line in lost} == {"step.loss", "saved.active"}


# ------------------------------------------------------------------------------------------------------ conversations


@pytest.mark.parametrize("name", ["adapt", "refused", "option", "interrupted"])
def test_a_recorded_conversation_keeps_to_the_schema(name):
    found = check([json.loads(line) for line in (RECORDED / f"{name}.jsonl").read_text().splitlines()])
    assert found[0]["event"] == ("error" if name == "option" else "started")
    assert found[-1]["event"] == ("result" if name == "adapt" else "error")
    fractions = [record["fraction"] for record in found if record["event"] == "progress"]
    assert fractions == sorted(fractions)
    assert (fractions[-1:] == [1.0]) == (name == "adapt")


@pytest.mark.slow
def test_an_adaptation_and_its_repetition_keep_to_the_schema(adapt, own_data_folder):
    first = check(records(run(*adapt, "--json").stdout))
    assert [record["event"] for record in first][0 :: len(first) - 1] == ["started", "result"]
    assert first[0]["schema_hash"] == hashlib.sha256(SCHEMA).hexdigest()
    assert [record["fraction"] for record in first if record["event"] == "progress"][-1] == 1.0
    *_, again = check(records(run(*adapt, "--json").stdout))
    assert again["unchanged"] and again["result_of"] == "adapt"


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ["models"],
        ["recipes"],
        ["doctor"],
        ["adapters", "list"],
        ["adapters", "show", "default", "--version", "1"],
        ["adapters", "report", "default"],
        ["adapters", "show", "nobody"],
        ["adapters", "activate", "default", "1"],
        ["adapters", "rename", "default", "other"],
        ["adapters", "rollback", "default"],
        ["adapters", "gc", "--yes"],
        ["adapters", "remove", "default", "--yes"],
    ],
    ids=" ".join,
)
def test_a_list_keeps_to_the_schema(after_learning, own_data_folder, arguments):
    after_learning(AdapterStore())
    assert check(records(run(*arguments, "--json").stdout))


@pytest.mark.parametrize("arguments", [["inspect"], ["plan"], ["analyze", "--examples", "2"]], ids=" ".join)
def test_what_is_said_of_texts_keeps_to_the_schema(notes_folder, model_folder, recipe, own_data_folder, arguments):
    command, *options = arguments
    found = check(records(run(command, notes_folder, "--model", model_folder, *options, "--json").stdout))
    assert found[0]["event"] == "started"
    assert found[-1]["event"] == command.replace("inspect", "inspection").replace("analyze", "analysis")


def test_generated_text_keeps_to_the_schema(model_folder):
    found = check(records(run("generate", "a boat", "--model", model_folder, "--max-tokens", 3, "--json").stdout))
    assert [record["event"] for record in found][0 :: len(found) - 1] == ["started", "result"]


# ------------------------------------------------------------------------------------------------------------- errors


def test_each_kind_of_error_has_a_code_of_its_own_and_a_hint():
    codes = [kind.code for kind in KINDS]
    assert len(set(codes)) == len(codes)
    for kind in KINDS:
        assert re.fullmatch(r"[a-z]+(_[a-z]+)*", kind.code)
        assert re.fullmatch(r"[A-Z].*\.", kind.hint)
        assert {"code", "hint"} <= vars(kind).keys()


def test_the_page_for_apps_has_the_table_of_errors():
    page = Path(__file__).parents[1] / "sebp_edge" / "guide" / "messages.md"
    assert error_table() in page.read_text(encoding="utf-8"), "print message_schema.error_table()"


def test_an_error_of_a_training_names_what_was_saved():
    found = TrainingStopped("Stopped.", name="a", version=3).to_dict()
    assert (found["code"], found["name"], found["version"], found["exit_code"]) == ("training_stopped", "a", 3, 1)


@pytest.mark.parametrize(
    "arguments",
    [
        ["adapt", "notes", "--epoch", "3"],
        ["adapt", "notes", "--epochs", "many"],
        ["adapters", "lst"],
        ["adapters", "show"],
        ["generate", "--temperature", "-1", "x"],
        ["nothing"],
    ],
    ids=" ".join,
)
def test_an_invalid_option_is_a_line_of_json_too(arguments):
    done = run(*arguments, "--json")
    (error,) = check(records(done.stdout))
    assert done.exit_code == error["exit_code"] == 2
    assert (error["code"], error["error"], error["retry"]) == ("invalid_option", "OptionError", False)
    assert error["message"].split()[0] in done.stderr
    assert run(*arguments).stdout == ""


@pytest.mark.slow
def test_an_invalid_option_of_a_process_is_a_line_of_json_too():
    with process("adapt", "--json", "--epoch", "3") as one:
        output, errors = one.communicate(timeout=200)
    (error,) = check(records(output))
    assert one.returncode == 2 and error["code"] == "invalid_option" and "Usage" in errors
