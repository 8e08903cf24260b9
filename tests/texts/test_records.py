"""Records under the usual names of other tools are read: questions with answers, Alpaca, ShareGPT."""

import json

import pytest
from reading import contents, left_out, write_file

from sebp_edge.texts.documents import Completion, Conversation

TURNS = ({"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Good morning"})


@pytest.mark.parametrize(
    ("record", "content"),
    [
        ({"question": "Q", "answer": "A"}, Completion("Q", "A")),
        ({"Question": "Q", " Answer ": "A", "id": 3}, Completion("Q", "A")),
        ({"instruction": "Do", "response": "Done"}, Completion("Do", "Done")),
        ({"query": "Q", "response": "A"}, Completion("Q", "A")),
        ({"input": "Q", "output": "A"}, Completion("Q", "A")),
        ({"instruction": "Do", "input": "this", "output": "Done"}, Completion("Do\n\nthis", "Done")),
        ({"instruction": "Do", "input": "", "output": "Done", "text": "### all"}, Completion("Do", "Done")),
        ({"instruction": "Do", "context": "There", "response": "Done"}, Completion("Do\n\nThere", "Done")),
        ({"question": "Q", "context": None, "answer": "A"}, Completion("Q", "A")),
        ({"prompt": "Q", "context": "other", "completion": "A"}, Completion("Q", "A")),
        ({"text": "T", "answer": "A"}, "T"),
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
    assert contents(path) == [Completion("Why?", "Because."), Completion("Who?", "Me.")]


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
