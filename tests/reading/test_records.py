"""Records under the usual names are read: questions with answers, Alpaca's, ShareGPT's, OpenAI's."""

import json

import pytest
from reading import Conversation, PromptCompletion, contents, left_out, write_file

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
        ({"instruction": "Do", "output": "Done", "system": "", "history": []}, PromptCompletion("Do", "Done")),
        ({"question": "Q", "answer": "A", "system": None, "tools": "", "label": True}, PromptCompletion("Q", "A")),
        ({"text": "T", "answer": "A"}, "T"),
        ({"text": "T", "label": False, "role": "cook"}, "T"),
        ({"messages": None, "prompt": None, "question": "Q", "answer": "A"}, PromptCompletion("Q", "A")),
        ({"instruction": "", "input": "Q", "output": "A"}, PromptCompletion("Q", "A")),
        ({"prompt": "Sum up:", "input": "T", "output": "A"}, PromptCompletion("Sum up:\n\nT", "A")),
        ({"prompt": "Sum up:\nT", "input": "T", "output": "A"}, PromptCompletion("Sum up:\nT", "A")),
        ({"instruction": "Name it.", "question": "Q", "answer": "A"}, PromptCompletion("Name it.\n\nQ", "A")),
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
        ({"question": "Q"}, 'no "text", "prompt" and "completion", or "messages"'),
        ({"question": 3, "answer": "A"}, '"question" is not a string'),
        ({"question": "Q", "answer": ["A"]}, '"answer" is not a string'),
        ({"conversations": "Q"}, '"conversations" is not a list of messages'),
        ({"conversations": [{"from": ["x"], "value": "a"}]}, 'a message without "role" and "content" strings'),
        ({"conversations": [{"from": "gpt"}]}, 'a message without "role" and "content" strings'),
        ({"conversations": [{"from": "human", "value": "a"}]}, "no message from the assistant"),
        ({1: "a", None: "b"}, 'no "text", "prompt" and "completion", or "messages"'),
    ],
)
def test_faulty_records_are_left_out(record, reason):
    assert left_out(["A text.", record])["record 2"] == reason


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def assistant(text: str, **others) -> dict:
    return {"role": "assistant", "content": text, **others}


SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize(
    ("record", "messages"),
    [
        ({"instruction": "Q", "output": "A", "system": "Be brief."}, (SYSTEM, user("Q"), assistant("A"))),
        ({"system_prompt": "Be brief.", "question": "Q", "response": "A"}, (SYSTEM, user("Q"), assistant("A"))),
        (
            {"system": "Be brief.", "conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]},
            (SYSTEM, user("Q"), assistant("A")),
        ),
        ({"system": "Be brief.", "messages": [SYSTEM, user("Q"), assistant("A")]}, (SYSTEM, user("Q"), assistant("A"))),
        # OpenAI's and Axolotl's marks of messages without loss.
        (
            {"messages": [user("Q"), assistant("A", weight=0), user("R"), assistant("B", weight=1)]},
            (user("Q"), assistant("A", weight=0), user("R"), assistant("B")),
        ),
        (
            {"messages": [user("Q"), assistant("A", train=False), user("R"), assistant("B", loss=True)]},
            (user("Q"), assistant("A", weight=0), user("R"), assistant("B")),
        ),
        # Parts of text, other names of roles.
        (
            {
                "messages": [
                    user([{"type": "text", "text": "Q"}, "R"]),
                    assistant([{"type": "output_text", "text": "A"}], refusal=None),
                ]
            },
            (user("QR"), assistant("A")),
        ),
        (
            {
                "conversations": [
                    {"from": "human", "value": [{"type": "text", "text": "the "}, {"type": "text", "text": "map?\n"}]},
                    {"from": "gpt", "value": [{"text": "at home"}, {"text": " or in the car"}]},
                ]
            },
            (user("the map?\n"), assistant("at home or in the car")),
        ),
        (
            {"messages": [{"role": "Human", "content": "Q"}, {"role": "model", "content": "A"}]},
            (user("Q"), assistant("A")),
        ),
        (
            {"messages": [user("Q") | {"name": "Ann"}, assistant("A", loss=False), assistant("B")]},
            (user("Q") | {"name": "Ann"}, assistant("A", weight=0), assistant("B")),
        ),
    ],
)
def test_records_keep_their_meaning(record, messages):
    assert contents(record) == [Conversation(messages)]


NO_PART = "a message with a part that is not text, such as an image"
ABOUT_TOOLS = "leave out what is about tools"


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"prompt": "Q", "chosen": "A", "rejected": "B"}, 'a preference; give the answer to learn as "completion"'),
        ({"chosen": [user("Q"), assistant("A")], "rejected": []}, "a preference"),
        ({"prompt": "Q", "completion": "A", "label": False}, 'an answer that is not to be learnt ("label" is false)'),
        ({"messages": list(TURNS), "kto_tag": "False"}, 'an answer that is not to be learnt ("kto_tag" is false)'),
        ({"prompt": "Q", "completion": "A", "label": "bad"}, 'an answer that is not to be learnt ("label" is bad)'),
        ({"prompt": "Q", "completion": "A", "label": -1}, 'an answer that is not to be learnt ("label" is -1)'),
        ({"role": "assistant", "text": "A", "parent_id": "1"}, "one message of a conversation"),
        ({"text": "A", "Text": "B"}, "an object that has a key twice"),
        ({"prompt": "Q", "completion": "A", "system": 3}, '"system" is not a string'),
        ({"question": "Q", "answer": "A", "context": {"a": "b"}}, '"context" is not a string'),
        ({"prompt": [user("Q")], "completion": [assistant("A")]}, '"prompt" is not a string'),
        ({"messages": [user("Q"), assistant("A", weight=0)]}, "no message from the assistant is to be learnt"),
        ({"messages": [user("Q"), assistant("A", weight=0.5)]}, 'a message whose "weight" is neither 0 nor 1'),
        ({"messages": [user([{"type": "image_url", "image_url": {}}]), assistant("A")]}, NO_PART),
        ({"messages": [user([{"type": "text", "text": None}]), assistant("A")]}, NO_PART),
        (
            {"messages": [user([{"text": "Q"}, {"type": "image", "image": "x"}, {"text": "R"}]), assistant("A")]},
            NO_PART,
        ),
        ({"messages": [user({"text": "Q"}), assistant("A")]}, 'a message without "role" and "content" strings'),
    ],
)
def test_records_that_cannot_keep_their_meaning_are_left_out(record, reason):
    assert left_out(["A text.", record])["record 2"].startswith(reason)


@pytest.mark.parametrize(
    ("record", "name", "advice"),
    [
        ({"prompt": "Q", "completion": "A", "history": [["1", "2"]]}, "history", 'give all turns as "messages"'),
        ({"question": "Q", "options": {"A": "one"}, "answer": "A"}, "options", "write them into the question"),
        ({"messages": [user("Q"), assistant("A", train_detail=[{}])]}, "train_detail", "mark whole messages"),
        ({"messages": [user("Q"), assistant("A", thinking="Hm.")]}, "thinking", "write thoughts into the answer"),
        ({"messages": [user("Q"), assistant("", tool_calls=[{"function": {}}])]}, "tool_calls", ABOUT_TOOLS),
        ({"messages": list(TURNS), "tools": [{"name": "area"}]}, "tools", ABOUT_TOOLS),
    ],
)
def test_a_record_with_more_than_is_read_is_left_out_and_says_what_to_do(record, name, advice):
    reason = left_out(["A text.", record])["record 2"]
    assert reason.startswith(f'"{name}" is not read, and changes what is said; {advice}')


@pytest.mark.parametrize("role", ["tool", "function_call", "observation"])
def test_messages_of_tools_are_left_out_with_their_conversation(role):
    record = {"conversations": [{"from": "human", "value": "Q"}, {"from": role, "value": "5"}, TURNS[1]]}
    assert left_out(["A text.", record])["record 2"] == f"a message of a tool, which is not read; {ABOUT_TOOLS}"
