"""What other programs write is recognised by its name or its JSON."""

import json

import pytest

from sebp_edge.reading.foreign import foreign_export, reason_against_name
from sebp_edge.reading.formats import FORMATS


def test_no_format_that_is_read_is_named_as_another():
    assert [ending for ending in FORMATS if reason_against_name(f"a{ending}")] == []


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ({"title": "Soup", "children": [{"string": "Lentils", "uid": "x"}]}, "a Roam export; export it as Markdown"),
        ({"title": "Soup", "edit-time": 1}, "a Roam export"),
        ({"id": "1097531864213579864", "type": 0, "name": "b"}, "a channel of Discord or Slack; what was said there"),
        ({"1097531864213579864": "Direct Message with b", "109753186421357986": None}, "a channel of Discord or Slack"),
        ({"id": "C01", "name": "b", "created": 1, "members": ["U01"]}, "a channel of Discord or Slack"),
        ({"version": 2, "type": "net.daringfireball.markdown"}, "the settings of a text bundle"),
        ({"title": "Soup", "textContent": "Lentils"}, "a Google Keep note"),
        ({"metadata": {}, "entries": [{"creationDate": "x", "text": "y"}]}, "a Day One export"),
    ],
)
def test_exports_in_json_are_recognised(value, named):
    assert foreign_export(json.loads(json.dumps(value))).startswith(f"this looks like {named}")


@pytest.mark.parametrize(
    "value",
    [
        *[None, 3, "text", [], {}, {"text": "a"}, {"prompt": "a", "completion": "b"}, {"title": "a", "text": "b"}],
        {"messages": [{"role": "user", "content": "a"}]},
        {"conversations": [{"from": "human", "value": "a"}]},
        {"title": "a", "children": [1, None, "x"]},
    ],
)
def test_other_json_is_no_known_export(value):
    assert foreign_export(value) is None
