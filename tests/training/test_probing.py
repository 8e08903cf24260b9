"""The probes show what a model does with an adaptation and without it; what the base model does is computed once."""

import functools
import json
import math

import pytest
import torch
from builders import refuse_hoisting
from failing_memory import RECIPE

from sebp_edge.ask.general_texts import encode_probes
from sebp_edge.basics.files import cache_folder, read_kept
from sebp_edge.basics.stopping import StopRequested
from sebp_edge.engine.models.adaptation import attach, trainable
from sebp_edge.engine.models.catalog import resolve
from sebp_edge.engine.models.loading import load_base_model
from sebp_edge.engine.sparse.rows.row_plan import IGNORE
from sebp_edge.engine.training import probing as module
from sebp_edge.engine.training.probing import TIE
from sebp_edge.events import silent
from sebp_edge.lessons import general_probe
from sebp_edge.lessons.general_probe import PROBE
from sebp_edge.values.probe_figures import ProbeFigures

ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU, and there is none here"),
]


@pytest.fixture
def read_from(monkeypatch):
    """A function that sets the folder of the probe of general texts."""
    return functools.partial(monkeypatch.setattr, general_probe, "PROBE")


@pytest.fixture(autouse=True)
def short_probes(tmp_path, read_from):
    """Probes that take a moment; one text is longer than the model's context."""
    folder = tmp_path / "probe"
    folder.mkdir()
    (folder / "one.txt").write_text("The ferry left at six, and the wind was from the west. " * 8)
    (folder / "two.txt").write_text("So we took the bread, the soup and the old map.\n")
    read_from(folder)
    return folder


def changed(base, by=0.05, method="lora"):
    adaptation = attach(base, RECIPE.replace(method=method), 0)
    with torch.no_grad():
        for parameter in trainable(adaptation):
            parameter += by
    return adaptation


def probes_of(base):
    return encode_probes(base.tokenizer, getattr(base.model.config, "max_position_embeddings", None))


def encoded(base):
    return probes_of(base).examples


def probe(base, adaptation, on_event=silent, **options):
    return module.probe(base, adaptation, probes_of(base), on_event, **options)


def measured(base, adaptation):
    """What the probes show, and the number of micro-batches that it took."""
    events = []
    return probe(base, adaptation, events.append), len(events)


def cache_files():
    return list(cache_folder().glob("*"))


def own_figures(base):
    """The loss on general text, and which items are known, from passes over one example at a time."""
    nats, tokens = {}, {}
    for example in encoded(base):
        ids, labels = torch.tensor([example.input_ids]), torch.tensor([example.labels])
        with torch.no_grad():
            loss = base.model(input_ids=ids, labels=labels).loss.item()
        number, own = example.document, example.num_loss_tokens
        nats[number], tokens[number] = nats.get(number, 0) + loss * own, tokens.get(number, 0) + own
    margins = [sum((1, -1)[n % 2] * nats[n] for n in range(first, first + 4)) for first in range(2, 2 + 4 * 4, 4)]
    assert all(abs(margin + TIE) > 1e-3 for margin in margins)  # no rounding decides
    known = [margin < -TIE for margin in margins]
    return (nats[0] + nats[1]) / (tokens[0] + tokens[1]), known[:2], known[2:]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("hoists", [True, False])
def test_they_are_those_of_single_passes(base, method, hoists):
    if not hoists:
        refuse_hoisting(base.model)
    before = own_figures(base)
    adaptation = changed(base, method=method)
    found, after = probe(base, adaptation), own_figures(base)
    assert found.general_loss_before == pytest.approx(before[0], rel=1e-5)
    assert found.general_loss_after == pytest.approx(after[0], rel=1e-5)
    assert abs(found.general_loss_after / found.general_loss_before - 1) > 1e-4
    assert [found.language, found.facts] == list(map(ProbeFigures.of, before[1:], after[1:]))


def test_the_base_model_is_read_once(base):
    adaptation = changed(base)
    first, work = measured(base, adaptation)
    again, less = measured(base, adaptation)
    assert again == first and 0 < less == work / 2
    adaptation.detach()
    other, _ = measured(base, changed(base, 0.1))
    assert (
        other.general_loss_before == first.general_loss_before and other.general_loss_after != first.general_loss_after
    )


@pytest.mark.slow
def test_another_model_precision_or_probe_has_its_own_losses(base, short_probes, make_items, monkeypatch):
    adaptation = changed(base)
    _, work = measured(base, adaptation)
    for name, value in (("fingerprint", "other"), ("dtype", torch.bfloat16)):
        with monkeypatch.context() as patch:
            patch.setitem(vars(base), name, value)
            assert measured(base, adaptation)[1] == work
    (short_probes / "two.txt").write_text("Another text.")
    assert measured(base, adaptation)[1] == work
    make_items(1)
    measured(base, adaptation)
    assert len(cache_files()) == 5


@pytest.mark.slow
def test_a_damaged_file_is_ignored_and_replaced(base):
    adaptation = changed(base)
    found = measured(base, adaptation)
    (file,) = cache_files()
    whole = file.read_text()
    values = json.loads(whole)
    kept = values["probes"]
    damaged = [json.dumps(values | content).encode() for content in ({"probes": kept[1:]}, {"model": "another"})]
    key = {name: values[name] for name in ("model", "dtype", "probe")}
    assert read_kept("probes", key) == kept
    assert read_kept("probes", key | {"dtype": "bfloat16"}) is None
    for content in (b"", b"\xff\xfe", b"[1]", b'{"probes": [1.0]}', b"[" * 100_000, *damaged):
        file.write_bytes(content)
        assert read_kept("probes", key) is None
    assert measured(base, adaptation) == found
    assert file.read_text() == whole


def test_the_cache_holds_no_text_and_no_path(base):
    probe(base, changed(base))
    (file,) = cache_files()
    values = json.loads(file.read_text())
    assert values.keys() == {"model", "dtype", "probe", "probes", "crc32"}
    assert "ferry" not in file.read_text() and "llama" not in file.read_text()


def test_a_stop_keeps_no_loss(base):
    def stop(event):
        raise StopRequested

    with pytest.raises(StopRequested):
        probe(base, changed(base), stop)
    assert not cache_files()


def test_a_check_within_a_pass_can_stop(base):
    """Between two micro-batches, a stop would come late: all probes may be one."""
    calls = []

    def check():
        calls.append(None)
        if len(calls) == 3:
            raise StopRequested

    events = []
    with pytest.raises(StopRequested):
        probe(base, changed(base), events.append, check=check)
    assert not events and not cache_files()


def test_an_adaptation_that_computes_no_number_knows_nothing(base):
    found = probe(base, changed(base, math.nan))
    assert math.isnan(found.general_loss_after)
    for figures in (found.language, found.facts):
        assert (figures.after, figures.lost) == (0, figures.before)


def test_a_short_context_cuts_texts_and_keeps_items(base):
    base.model.config.max_position_embeddings = 11
    examples = encoded(base)
    assert max(example.num_tokens for example in examples) <= 11
    assert {example.document for example in examples} == set(range(2 + 4 * 4))
    found = probe(base, changed(base))
    assert found.language.items == found.facts.items == 2


def test_without_a_chat_template_facts_are_asked_in_the_plain_format(base):
    base.tokenizer.chat_template = None
    found = base.tokenizer.decode(encoded(base)[-1].input_ids)
    assert "Question:" in found and "Answer:" in found
    assert probe(base, changed(base)).facts.items == 2


def test_a_template_that_hides_answers_leaves_out_facts_only(base):
    base.tokenizer.chat_template = "{% for message in messages %}x{% endfor %}"
    found = probe(base, changed(base))
    assert found.facts is None and found.language.items == 2


def test_the_end_of_a_text_has_no_loss(base):
    examples = [example for example in encoded(base) if example.document < 2]
    eos = base.tokenizer.eos_token_id
    ends = [example for example in examples if example.input_ids[-1] == eos]
    assert len(ends) == 2 < len(examples)
    assert all(example.labels[-1] == IGNORE for example in ends)
    assert all(eos not in example.labels for example in examples)


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])
def test_the_bundled_probes_are_some_thousand_tokens_and_tell_what_tiny_knows(device, read_from, make_items):
    """It knows English, but no facts."""
    make_items(40)
    base, short = load_base_model(resolve("tiny"), RECIPE, torch.device(device)), general_probe.PROBE
    read_from(PROBE)
    examples = encoded(base)
    read_from(short)
    texts = sum(example.num_loss_tokens for example in examples if example.document < 12)
    assert 5_000 < texts < 8_000
    assert sum(example.num_tokens for example in examples) < 15_000
    found = probe(base, attach(base, RECIPE, 0))
    assert found.language.is_telling and not found.facts.is_telling
    rounded = 0 if device == "cpu" else 2  # in bf16, an adapter that does nothing may round otherwise
    assert max(found.language.lost, found.facts.lost) <= rounded


def test_every_text_of_the_probe_has_a_source():
    sources = (PROBE / "SOURCES").read_text(encoding="utf-8")
    names = {path.name for path in PROBE.glob("*.txt")}
    assert len(names) == 12
    assert all(name in sources for name in names)
