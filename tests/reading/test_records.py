"""Records under the usual names of other tools are read: questions with answers, Alpaca, ShareGPT."""

import json

import pytest
from reading import Conversation, PromptCompletion, contents, left_out, read_texts, write_file

from sebp_edge.reading.records import read_record

TURNS = ({"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Good morning"})


@pytest.mark.parametrize(
    ("record", "content"),
    [
        ({"question": "Q", "answer": "A"}, PromptCompletion("Q", "A")),
        ({"Question": "Q", " Answer ": "A", "id": 3}, PromptCompletion("Q", "A")),
        ({"instruction": "Do", "response": "Done"}, PromptCompletion("Do", "Done")),
        ({"query": "Q", "response": "A"}, PromptCompletion("Q", "A")),
        ({"input": "Q", "output": "A"}, PromptCompletion("Q", "A")),
        ({"instruction": "Do", "input": "this", "output": "Done"}, PromptCompletion("Do\n\nthis", "Done")),
        ({"instruction": "Do", "input": "", "output": "Done", "text": "### all"}, PromptCompletion("Do", "Done")),
        ({"instruction": "Do", "context": "There", "response": "Done"}, PromptCompletion("Do\n\nThere", "Done")),
        ({"question": "Q", "context": None, "answer": "A"}, PromptCompletion("Q", "A")),
        ({"prompt": "Q", "context": "other", "completion": "A"}, PromptCompletion("Q", "A")),
        (
            {"instruction": "Do", "input": "", "output": "Done", "system": "", "history": []},
            PromptCompletion("Do", "Done"),
        ),
        ({"question": "Q", "answer": "A", "system": None, "tools": "", "label": True}, PromptCompletion("Q", "A")),
        ({"text": "T", "answer": "A"}, "T"),
        ({"text": "T", "label": False, "role": "cook"}, "T"),
        ({"messages": None, "prompt": None, "question": "Q", "answer": "A"}, PromptCompletion("Q", "A")),
        ({"instruction": "", "input": "Q", "output": "A"}, PromptCompletion("Q", "A")),
        ({"prompt": "Sum up:", "input": "T", "output": "A"}, PromptCompletion("Sum up:\n\nT", "A")),
        ({"prompt": "Sum up:\nT", "input": "T", "output": "A"}, PromptCompletion("Sum up:\nT", "A")),
        ({"instruction": "Name it.", "question": "Q", "answer": "A"}, PromptCompletion("Name it.\n\nQ", "A")),
        ({"question": "Q: a or b?", "options": ["a", "b"], "answer": "a"}, PromptCompletion("Q: a or b?", "a")),
        ({"conversations": [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Good morning"}]}, TURNS),
        ({"conversations": list(TURNS), "id": "x"}, TURNS),
    ],
)
def test_records_of_other_tools_are_read(tmp_path, record, content):
    expected = Conversation(content) if content is TURNS else content
    assert contents(record) == [expected]
    assert contents(write_file(tmp_path, "a.jsonl", json.dumps(record))) == [expected]


def test_tables_of_questions_and_answers_are_read(tmp_path):
    path = write_file(tmp_path, "a.csv", "ID,Question,Answer\n1,Why?,Because.\n2,Who?,Me.\n")
    assert contents(path) == [PromptCompletion("Why?", "Because."), PromptCompletion("Who?", "Me.")]


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"question": 3, "answer": "A"}, '"question" is not a string'),
        ({"conversations": [{"from": ["x"], "value": "a"}]}, 'a message without "role" and "content" strings'),
        ({"conversations": [{"from": "gpt"}]}, 'a message without "role" and "content" strings'),
        ({1: "a", None: "b"}, 'no "text", "prompt" and "completion", or "messages"'),
    ],
)
def test_faulty_records_are_left_out(record, reason):
    assert left_out(["A text.", record])["record 2"] == reason


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def assistant(text: str, **others) -> dict:
    return {"role": "assistant", "content": text, **others}


def call(name: str, arguments, **others) -> dict:
    return {**others, "type": "function", "function": {"name": name, "arguments": arguments}}


SYSTEM = {"role": "system", "content": "Be brief."}
AREA = {"name": "area", "description": "Computes an area."}


@pytest.mark.parametrize(
    ("record", "messages"),
    [
        # The system message and the turns before are context.
        ({"instruction": "Q", "output": "A", "system": "Be brief."}, (SYSTEM, user("Q"), assistant("A"))),
        ({"system_prompt": "Be brief.", "question": "Q", "response": "A"}, (SYSTEM, user("Q"), assistant("A"))),
        (
            {"instruction": "Q", "input": "I", "output": "A", "history": [["1", "2"], ["3", "4"]]},
            (user("1"), assistant("2", weight=0), user("3"), assistant("4", weight=0), user("Q\n\nI"), assistant("A")),
        ),
        (
            {"prompt": "Q", "completion": "A", "history": [user("1"), assistant("2")]},
            (user("1"), assistant("2", weight=0), user("Q"), assistant("A")),
        ),
        (
            {"system": "Be brief.", "conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]},
            (SYSTEM, user("Q"), assistant("A")),
        ),
        ({"system": "Be brief.", "messages": [SYSTEM, user("Q"), assistant("A")]}, (SYSTEM, user("Q"), assistant("A"))),
        # TRL's prompts and completions may be messages; only the completion's have loss.
        (
            {"prompt": [user("1"), assistant("2"), user("3")], "completion": [assistant("4")]},
            (user("1"), assistant("2", weight=0), user("3"), assistant("4")),
        ),
        ({"prompt": "Q", "completion": [assistant("A")]}, (user("Q"), assistant("A"))),
        (
            {"prompt": "Q", "completion": "A", "chat_history": '[["1", "2"]]'},
            (user("1"), assistant("2", weight=0), user("Q"), assistant("A")),
        ),
        ({"prompt": [SYSTEM, user("Q")], "completion": "A"}, (SYSTEM, user("Q"), assistant("A"))),
        # OpenAI's and Axolotl's marks of messages without loss.
        (
            {"messages": [user("Q"), assistant("A", weight=0), user("R"), assistant("B", weight=1)]},
            (user("Q"), assistant("A", weight=0), user("R"), assistant("B")),
        ),
        (
            {"messages": [user("Q"), assistant("A", train=False), user("R"), assistant("B", loss=True)]},
            (user("Q"), assistant("A", weight=0), user("R"), assistant("B")),
        ),
        # Parts of text, reasoning, other names of roles.
        (
            {
                "messages": [
                    user([{"type": "text", "text": "the "}, "map", {"type": "input_text", "text": "?\n"}]),
                    assistant([{"type": "output_text", "text": "at home"}, {"text": " or in the car"}]),
                ]
            },
            (user("the map?\n"), assistant("at home or in the car")),
        ),
        (
            {"messages": [user("Q"), assistant("A", thinking="Hm.", refusal=None)]},
            (user("Q"), assistant("A", reasoning_content="Hm.")),
        ),
        (
            {"messages": [{"role": "Human", "content": "Q"}, {"role": "model", "content": "A"}]},
            (user("Q"), assistant("A")),
        ),
        (
            {"messages": [user("Q") | {"name": "Ann"}, assistant("A", loss=False), assistant("B")]},
            (user("Q") | {"name": "Ann"}, assistant("A", weight=0), assistant("B")),
        ),
        # Calls of tools.
        (
            {"messages": [user("Q"), {"role": "assistant", "content": None, "tool_calls": [call("area", '{"a": 5}')]}]},
            (user("Q"), assistant("", tool_calls=[call("area", {"a": 5})])),
        ),
        (
            {
                "messages": [
                    user("Q"),
                    assistant("One moment.", tool_calls=[call("area", {"a": 5}, id="x1")]),
                    {"role": "tool", "content": "15", "tool_call_id": "x1"},
                    assistant("15."),
                ]
            },
            (
                user("Q"),
                assistant("One moment.", tool_calls=[call("area", {"a": 5}, id="x1")]),
                {"role": "tool", "content": "15", "tool_call_id": "x1"},
                assistant("15."),
            ),
        ),
        (
            {
                "conversations": [
                    {"from": "human", "value": "Q"},
                    {"from": "function_call", "value": '{"name": "area", "arguments": {"a": 5}}'},
                    {"from": "observation", "value": "15"},
                    {"from": "gpt", "value": "15."},
                ]
            },
            (
                user("Q"),
                assistant("", tool_calls=[call("area", {"a": 5})]),
                {"role": "tool", "content": "15"},
                assistant("15."),
            ),
        ),
        (
            {"messages": [user("Q"), {"role": "assistant", "function_call": {"name": "area", "arguments": "{}"}}]},
            (user("Q"), assistant("", tool_calls=[call("area", {})])),
        ),
    ],
)
def test_records_keep_their_meaning(record, messages):
    assert contents(record) == [Conversation(messages)]


LONG = "This is the answer that was not chosen."
ANSWERED = Conversation((user("Q"), assistant("A")))


@pytest.mark.parametrize(
    ("record", "content"),
    [
        ({"prompt": "Q", "chosen": "A", "rejected": LONG}, PromptCompletion("Q", "A")),
        ({"instruction": "Q", "input": "C", "chosen": "A", "rejected": LONG}, PromptCompletion("Q\n\nC", "A")),
        ({"prompt": "Q", "completion": "A", "label": True}, PromptCompletion("Q", "A")),
        ({"prompt": [user("Q")], "chosen": [assistant("A")], "rejected": [assistant(LONG)]}, ANSWERED),
        ({"chosen": [user("Q"), assistant("A")], "rejected": [user("Q"), assistant(LONG)]}, ANSWERED),
        ({"prompt": "Q", "chosen": [user("Q"), assistant("A")], "rejected": LONG, "score_chosen": 8.5}, ANSWERED),
        (
            {
                "conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}, user("Q")],
                "chosen": {"from": "gpt", "value": "A"},
                "rejected": {"from": "gpt", "value": LONG},
            },
            Conversation((user("Q"), assistant("A", weight=0), user("Q"), assistant("A"))),
        ),
    ],
)
def test_of_a_preference_the_chosen_answer_is_learnt_and_the_other_one_is_not_missed(record, content):
    assert read_record(record) == (content, set())


@pytest.mark.parametrize("tools", [[AREA], [{"type": "function", "function": AREA}], json.dumps([AREA])])
def test_descriptions_of_tools_are_kept(tools):
    [content] = contents({"messages": list(TURNS), "tools": tools})
    assert content == Conversation(TURNS, ({"type": "function", "function": AREA},))


NO_CALL = "a call of a tool without its name"
NO_PART = "a message with a part that is not text, such as an image"


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"chosen": "Q? A", "rejected": "Q? B"}, 'a preference without a "prompt"; give the answer'),
        ({"prompt": "Q", "chosen": ["A"], "rejected": ["B"]}, '"chosen" is not a string'),
        ({"prompt": "Q", "completion": "A", "label": False}, 'an answer that is not to be learnt ("label" is false)'),
        ({"messages": list(TURNS), "kto_tag": "False"}, 'an answer that is not to be learnt ("kto_tag" is false)'),
        ({"prompt": "Q", "completion": "A", "label": "bad"}, 'an answer that is not to be learnt ("label" is bad)'),
        ({"prompt": "Q", "completion": "A", "label": -1}, 'an answer that is not to be learnt ("label" is -1)'),
        ({"role": "assistant", "text": "A", "parent_id": "1"}, "one message of a conversation"),
        ({"question": "Q", "options": {"A": "one", "B": "two"}, "answer": "A"}, 'a question whose "options" are apart'),
        ({"text": "A", "Text": "B"}, "an object that has a key twice"),
        ({"prompt": "Q", "completion": "A", "system": 3}, '"system" is not a string'),
        ({"prompt": "Q", "completion": "A", "history": "none"}, '"history" is not a list of pairs'),
        ({"prompt": "Q", "completion": "A", "history": [["1"]]}, '"history" is not a list of pairs'),
        ({"prompt": "Q", "completion": "A", "history": [["1", None]]}, '"history" is not a list of pairs'),
        ({"question": "Q", "answer": "A", "context": {"a": "b"}}, '"context" is not a string'),
        ({"prompt": [user("Q")], "completion": [user("A")]}, "no message from the assistant"),
        ({"prompt": ["Q"], "completion": "A"}, '"prompt" is not a string'),
        ({"messages": [user("Q"), assistant("A", weight=0)]}, "no message from the assistant is to be learnt"),
        ({"messages": [user("Q"), assistant("A", weight=0.5)]}, 'a message whose "weight" is neither 0 nor 1'),
        ({"messages": [user("Q"), assistant("A", train_detail=[{}])]}, "a message of which a part is to be learnt"),
        ({"messages": [user("Q"), assistant("A", reasoning=["Hm."])]}, '"reasoning_content" is not a string'),
        ({"messages": [user([{"type": "image_url", "image_url": {}}]), assistant("A")]}, NO_PART),
        ({"messages": [user([{"type": "text", "text": None}]), assistant("A")]}, NO_PART),
        (
            {"messages": [user([{"text": "Q"}, {"type": "image", "image": "x"}, {"text": "R"}]), assistant("A")]},
            NO_PART,
        ),
        ({"messages": [user({"text": "Q"}), assistant("A")]}, 'a message without "role" and "content" strings'),
        ({"messages": [user("Q"), assistant("", tool_calls="area")]}, NO_CALL),
        ({"messages": [user("Q"), assistant("", tool_calls=[{"function": {}}])]}, NO_CALL),
        (
            {"conversations": [{"from": "function_call", "value": "area(5)"}]},
            "a call or a description of a tool that is",
        ),
        ({"messages": [user("Q"), assistant("", tool_calls=[call("area", {"a": {1}})])]}, "a call or a description"),
        ({"conversations": [{"from": "function_call", "value": ["area"]}]}, NO_CALL),
        ({"messages": list(TURNS), "tools": "area"}, "a call or a description of a tool that is not JSON"),
        ({"messages": list(TURNS), "tools": ["area"]}, '"tools" is not a list of descriptions'),
        ({"messages": list(TURNS), "tools": "[" * 100_000}, "a call or a description of a tool that is not JSON"),
    ],
)
def test_records_that_cannot_keep_their_meaning_are_left_out(record, reason):
    assert left_out(["A text.", record])["record 2"].startswith(reason)


def test_fields_with_words_that_are_not_read_are_named(tmp_path):
    secret = {"my own secret": "words of a field with another name"}
    rows = [
        {"text": "One.", "title": "A title of four words", "date": "2024-01-01", "tags": ["a", "b"], **secret},
        {"messages": [user("Q"), assistant("A", summary="what was said in so many words")], "id": 3},
        {"prompt": "Q", "context": "what it is about, in words", "completion": "A"},
        {"instruction": "Do", "output": "Done and done.", "text": "Below is an instruction: Do. Done and done."},
    ]
    path = write_file(tmp_path, "a.jsonl", "\n".join(map(json.dumps, rows)))
    reading = read_texts(path)
    assert len(reading.documents) == 4
    [item] = reading.left_out
    names = '"context", "summary", "title", others'
    assert (item.source, item.reason) == (
        "a.jsonl",
        f"fields of records with words that are not read: {names} (in 1 records)",
    )
