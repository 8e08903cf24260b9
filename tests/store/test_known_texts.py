"""A damaged list of known texts is refused."""

import json

import pytest

from sebp_edge.errors import AdapterError
from sebp_edge.store.known_texts import KNOWN_TEXTS, KnownTexts


@pytest.mark.parametrize("salt", ["00" * 65, "0", None, 3])
def test_a_salt_that_cannot_be_one_is_refused(tmp_path, salt):
    values = {"format": 1, "salt": "00" * 64, "base": "tiny", "texts": {}, "gone": {}}
    (tmp_path / KNOWN_TEXTS).write_text(json.dumps(values))
    assert KnownTexts.read(tmp_path).salt == bytes(64)
    (tmp_path / KNOWN_TEXTS).write_text(json.dumps(values | {"salt": salt}))
    with pytest.raises(AdapterError, match="is damaged"):
        KnownTexts.read(tmp_path)
