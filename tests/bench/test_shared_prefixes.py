"""The benchmark of shared system prompts: it checks gradients first, and computes fewer rows."""

import pytest
from builders import make_llama, make_tokenizer

import shared_prefixes
from sebp_edge.training.losses import RowLosses

SYSTEM = "{{ bos_token }}<|system|>You are an assistant who answers the questions of one person.<|end|>"


@pytest.fixture
def model(tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace("{{ bos_token }}", SYSTEM)
    make_llama(max_position_embeddings=1024).save_pretrained(tmp_path / "chat")
    tokenizer.save_pretrained(tmp_path / "chat")
    return str(tmp_path / "chat")


def test_the_system_prompt_is_computed_once(model, capsys):
    shared_prefixes.main(["--model", model, "--micro-batches", "2", "--rounds", "1", "--batch-rows", "1024"])
    assert "for each question" in capsys.readouterr().out
    alone, once = shared_prefixes.measure(model, 1024, 2, rounds=1)
    assert once["rows"] < 0.9 * alone["rows"] and once["questions"] == alone["questions"]


def test_nothing_is_measured_if_gradients_differ(model, monkeypatch):
    compute = RowLosses.__call__

    def other(self, examples):
        losses, sequences = compute(self, examples)
        return losses * (1.1 if self.shares_prefixes else 1.0), sequences

    monkeypatch.setattr(RowLosses, "__call__", other)
    with pytest.raises(RuntimeError, match="differ"):
        list(shared_prefixes.measure(model, 1024, 1, rounds=1))
