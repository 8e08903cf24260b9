"""The general loss is the probe's with an adaptation and without it; the base model's is computed once."""

import json
import math
import shutil

import pytest
import torch
from failing_memory import CPU, RECIPE

from sebp_edge.basics.files import cache_folder
from sebp_edge.basics.stopping import StopRequested
from sebp_edge.events import silent
from sebp_edge.models.adaptation import attach, trainable
from sebp_edge.models.catalog import resolve
from sebp_edge.models.loading import load_base_model
from sebp_edge.run import general_loss as module
from sebp_edge.run.general_loss import GeneralLoss, general_loss
from sebp_edge.sparse.rows.row_plan import IGNORE
from sebp_edge.texts import general_probe
from sebp_edge.texts.general_probe import MAX_RISE, PROBE


@pytest.fixture(autouse=True)
def short_probe(tmp_path, monkeypatch):
    """A probe that takes a moment; one text is longer than the model's context."""
    folder = tmp_path / "probe"
    folder.mkdir()
    (folder / "one.txt").write_text("The ferry left at six, and the wind was from the west. " * 8)
    (folder / "two.txt").write_text("So we took the bread, the soup and the old map.\n")
    monkeypatch.setattr(general_probe, "PROBE", folder)
    return folder


def changed(base, by=0.05, method="lora"):
    adaptation = attach(base, RECIPE.replace(method=method), 0)
    with torch.no_grad():
        for parameter in trainable(adaptation):
            parameter += by
    return adaptation


def measured(base, adaptation):
    """The general loss, and the number of micro-batches that it took."""
    events = []
    return general_loss(base, adaptation, events.append), len(events)


def cache_files():
    return list(cache_folder().glob("*"))


@pytest.mark.parametrize("method", ["lora", "full"])
def test_it_is_the_mean_of_the_models_own_losses(base, method):
    def own_loss():
        nats = tokens = 0
        for example in module._encode_probe(base):
            ids, labels = torch.tensor([example.input_ids]), torch.tensor([example.labels])
            with torch.no_grad():
                loss = base.model(input_ids=ids, labels=labels).loss.item()
            nats += loss * example.num_loss_tokens
            tokens += example.num_loss_tokens
        return nats / tokens

    before = own_loss()
    adaptation = changed(base, method=method)
    found = general_loss(base, adaptation, silent)
    assert found.base == pytest.approx(before, rel=1e-5)
    assert found.adapted == pytest.approx(own_loss(), rel=1e-5)
    assert abs(found.rise) > 1e-4


def test_the_base_models_loss_is_computed_once(base):
    adaptation = changed(base)
    first, work = measured(base, adaptation)
    again, less = measured(base, adaptation)
    assert again == first and 0 < less == work / 2
    adaptation.detach()
    other, _ = measured(base, changed(base, 0.1))
    assert other.base == first.base and other.adapted != first.adapted


def test_another_model_precision_or_probe_has_its_own_loss(base, short_probe, monkeypatch):
    adaptation = changed(base)
    _, work = measured(base, adaptation)
    for name, value in (("fingerprint", "other"), ("dtype", torch.bfloat16)):
        with monkeypatch.context() as patch:
            patch.setitem(vars(base), name, value)
            assert measured(base, adaptation)[1] == work
    (short_probe / "two.txt").write_text("Another text.")
    assert measured(base, adaptation)[1] == work
    assert len(cache_files()) == 4


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"[1]",
        b'{"loss": 1.0}',
        b"[" * 100_000,
        lambda values: values | {"loss": "1.5"},
        lambda values: values | {"loss": math.nan},
        lambda values: values | {"model": "another"},
    ],
)
def test_a_damaged_file_is_ignored_and_replaced(base, content):
    adaptation = changed(base)
    expected, work = measured(base, adaptation)
    (file,) = cache_files()
    whole = file.read_text()
    file.write_bytes(content if isinstance(content, bytes) else json.dumps(content(json.loads(whole))).encode())
    assert measured(base, adaptation) == (expected, work)
    assert file.read_text() == whole


def test_without_a_cache_folder_it_is_computed_again(base, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    adaptation = changed(base)
    assert measured(base, adaptation) == measured(base, adaptation)


def test_the_cache_holds_no_text_and_no_path(base):
    general_loss(base, changed(base), silent)
    (file,) = cache_files()
    values = json.loads(file.read_text())
    assert values.keys() == {"model", "dtype", "probe", "loss"}
    assert "ferry" not in file.read_text() and "llama" not in file.read_text()


def test_a_stop_keeps_no_loss(base):
    def stop(event):
        raise StopRequested

    with pytest.raises(StopRequested):
        general_loss(base, changed(base), stop)
    assert not cache_files()


def test_the_end_of_a_text_has_no_loss(base):
    examples = module._encode_probe(base)
    eos = base.tokenizer.eos_token_id
    ends = [example for example in examples if example.input_ids[-1] == eos]
    assert len(ends) == 2 < len(examples)
    assert all(example.labels[-1] == IGNORE for example in ends)
    assert all(eos not in example.labels for example in examples)


@pytest.mark.parametrize(
    ("adapted", "is_high"), [(2.0, False), (4.0, False), (4.0 * (1 + MAX_RISE) + 1e-6, True), (math.nan, True)]
)
def test_it_warns_above_one_percent(adapted, is_high):
    assert GeneralLoss(4.0, adapted).is_high == is_high


def test_the_bundled_probe_is_some_thousand_tokens(short_probe):
    shutil.rmtree(short_probe)
    shutil.copytree(PROBE, short_probe)
    base = load_base_model(resolve("tiny"), RECIPE, CPU)
    tokens = sum(example.num_loss_tokens for example in module._encode_probe(base))
    assert 5_000 < tokens < 8_000


def test_the_bundled_probe_has_at_most_10000_tokens():
    """The usual tokenizers take at most one token for 2.5 bytes."""
    size = sum(path.stat().st_size for path in PROBE.glob("*.txt"))
    assert 20_000 < size <= 25_000


def test_every_text_of_the_probe_has_a_source():
    sources = (PROBE / "SOURCES").read_text(encoding="utf-8")
    names = {path.name for path in PROBE.glob("*.txt")}
    assert len(names) == 12
    assert all(name in sources for name in names)
