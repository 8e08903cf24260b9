"""The bundled model: its tokenizer's rules, which other programs rely on, and adapters of the earlier model."""

import json
from pathlib import Path

import pytest

from sebp_edge import Personalizer
from sebp_edge.errors import BaseModelMismatch

# Llama 3's rules, which llama.cpp calls llama-bpe.
LLAMA_3 = "|".join(
    [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
# The bundled model's up to version 0.1.0, whose tokenizer no other program could read.
EARLIER_FINGERPRINT = "75b1741281556ac19bd1eeb9bbbc8cf5"


def test_texts_are_split_by_llama_3s_rules():
    folder = Path(Personalizer("tiny", device="cpu").reference.location)
    tokenizer = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    split, to_bytes = tokenizer["pre_tokenizer"]["pretokenizers"]
    assert (split["type"], split["pattern"]["Regex"], split["behavior"]) == ("Split", LLAMA_3, "Isolated")
    assert (to_bytes["type"], to_bytes["add_prefix_space"], to_bytes["use_regex"]) == ("ByteLevel", False, False)
    assert tokenizer["model"]["ignore_merges"]
    assert tokenizer["normalizer"] is None


def test_an_adapter_of_the_earlier_bundled_model_is_refused(tmp_path):
    record = {"base_model": "sebp-edge/tiny", "model": "tiny", "fingerprint": EARLIER_FINGERPRINT, "sebp_edge": "0.1.0"}
    record |= {"recipe": {"name": "notes", "method": "lora"}, "created": "2026-11-21T12:00:00+00:00"}
    record |= dict.fromkeys(("documents", "examples", "tokens", "seed"), 1)
    record |= dict.fromkeys(("heldout_loss_before", "heldout_loss_after"))
    (tmp_path / "sebp_edge.json").write_text(json.dumps(record))
    with pytest.raises(BaseModelMismatch, match=r"other weights of sebp-edge/tiny; adapt again\.$"):
        Personalizer("tiny", device="cpu", store=tmp_path / "store").load_adapter(tmp_path)
