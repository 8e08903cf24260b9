"""The comparison of N:M methods, in small: what is trained, counted and recorded is what its page says."""

import csv
import gzip
import lzma

import numpy as np
import pytest
import torch

import nm_quality
import nm_settings
import nm_tables
from nm_quality import DENSE, Run
from nm_settings import COUPLED, Corpus, Digits, Notes, Sst2
from sebp_edge.research import nm_sparse
from sebp_edge.sparsity import Pattern

CPU = torch.device("cpu")


@pytest.fixture
def digits_file(tmp_path):
    """Images of two classes in two halves, as scikit-learn stores its digits."""
    random = np.random.RandomState(0)
    labels = random.randint(2, size=80)
    images = random.randint(8, size=(80, 64)) + 8 * (labels[:, None] == (np.arange(64) < 32))
    file = tmp_path / "digits.csv.gz"
    with gzip.open(file, "wt") as table:
        np.savetxt(table, np.column_stack([images, labels]), fmt="%d", delimiter=",")
    return file


@pytest.fixture
def small(monkeypatch, digits_file):
    """The digits' setting with a narrow model and few steps."""
    for name, value in {"width": 32, "depth": 1, "num_steps": 20, "batch_size": 8, "num_heldout": 20}.items():
        monkeypatch.setattr(Digits, name, value)
    monkeypatch.setattr(nm_quality, "NOISE_BATCHES", 2)
    return digits_file


def run(file, tmp_path, *more):
    nm_quality.main(["digits", str(file), "--device", "cpu", "--record", str(tmp_path / "results.json"), *more])
    (table,) = (tmp_path / "results").glob("nm-quality-*.csv")
    return list(csv.DictReader(table.read_text().splitlines()))


def test_every_method_is_trained_beside_dense_with_every_seed(small, tmp_path, capsys):
    rows = run(small, tmp_path, "--patterns", "2:4", "1:8", "--seeds", "0", "1")
    # Groups of 64 do not divide a width of 32.
    pruned = [(m, p) for m in Digits.methods for p in ("2:4", "1:8") if (m, p) != ("sdgf-geometric", "1:8")]
    expected = [(*each, seed) for seed in "01" for each in [("dense", ""), *pruned]]
    assert [(row["method"], row["pattern"], row["seed"]) for row in rows] == expected
    losses = {(row["method"], row["pattern"]): float(row["loss"]) for row in rows if row["seed"] == "0"}
    assert len(set(losses.values())) == len(losses)
    assert all(float(row["train_9"]) < float(row["train_0"]) for row in rows)
    assert all(float(row[f"variance_{part}"]) > 0 < float(row[f"squared_{part}"]) for row in rows for part in range(10))
    assert "sdgf-geometric 1:8, seed 1: the pattern does not divide the layers" in capsys.readouterr().out


def test_several_processes_give_the_rows_of_one(small, tmp_path, monkeypatch):
    shares = []

    class InTurn:
        def __init__(self, *_): ...
        def __enter__(self):
            return self

        def __exit__(self, *_): ...
        def map(self, function, settings, parts, devices):
            shares.extend(parts)
            return [function(*one) for one in zip(settings, parts, devices, strict=True)]

    arguments = ("--patterns", "2:4", "--methods", "sr-ste", "mdgf-linear", "--seeds", "0", "1")
    alone = run(small, tmp_path, *arguments)
    monkeypatch.setattr(nm_quality, "ProcessPoolExecutor", InTurn)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert run(small, tmp_path, *arguments, "--processes", "4") == alone
    assert [len(share) for share in shares] == [2, 2, 1, 1]


def test_the_trained_model_is_pruned_to_the_pattern(small, monkeypatch):
    seen = []
    monkeypatch.setattr(nm_quality, "evaluate", lambda model, _: seen.append(model) or (1.0, None))
    for method in Digits.methods:
        nm_quality.train(Digits([small]), Run(method, "1:4", 0), CPU)
    for model in seen:
        for layer in nm_quality.prunable(model, Digits.layers).values():
            assert (layer.weight.view(-1, 4) != 0).sum(1).max() == 1
        assert all((layer.weight != 0).all() for layer in nm_quality.prunable(model, ("q_proj", "classifier")).values())


@pytest.mark.parametrize("is_coupled", [False, True])
def test_coupled_adds_the_term_to_the_gradient_of_pruned_weights(monkeypatch, is_coupled):
    torch.manual_seed(0)
    monkeypatch.setattr(nm_quality, "SHRINKAGE", 0.5)
    model, given = torch.nn.Sequential(torch.nn.Linear(8, 3)), []
    weight, before = model[0].weight, model[0].weight.detach().clone()
    optimizer = torch.optim.AdamW(model.parameters())
    if is_coupled:
        nm_quality.couple(optimizer, {"0": model[0]}, Pattern(2, 4))
    optimizer.register_step_pre_hook(lambda *_: given.append(weight.grad.clone()))
    with nm_sparse(model, "2:4", "sr-ste", num_steps=1) as sparse:
        model(torch.ones(1, 8)).sum().backward()
        optimizer.step()
        sparse.step()
    magnitude = before.abs().view(-1, 4)
    is_pruned = (magnitude < magnitude.topk(2).values[:, -1:]).view_as(before)
    torch.testing.assert_close(given[0], 1 + is_coupled * 0.5 * before * is_pruned)


@pytest.mark.parametrize(
    ("method", "sparse_share"), [("sr-ste", 1.0), (COUPLED, 1.0), ("mdgf-linear", 0.4), ("sdgf-stepwise", 0.4)]
)
def test_flops_are_those_of_the_products(small, method, sparse_share):
    setting = Digits([small])
    model = setting.new_model()
    layers = nm_quality.prunable(model, setting.layers)
    found = nm_quality.flops(model, layers, next(setting.batches(1, 0)), Run(method, "1:4", 0), 20)
    # Rows: 16 patches and a class token for each of 8 images, one for the classifier.
    feed_forward, attention, head = 8 * 17 * 2 * 32 * 128, 8 * 17 * 4 * 32 * 32, 8 * 32 * 10
    dense = feed_forward + attention + head
    assert found["inference"] == pytest.approx((feed_forward / 4 + attention + head) / dense)
    sparse_step = (feed_forward * (1 / 4 + 1 / 4 + 1) + 3 * (attention + head)) / (3 * dense)
    assert found["sparse_share"] == pytest.approx(sparse_share)
    assert found["training"] == pytest.approx(sparse_share * sparse_step + 1 - sparse_share)


def test_the_variance_is_that_of_gradients_over_batches():
    torch.manual_seed(0)
    layer = torch.nn.Linear(3, 2)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return type("Output", (), {"loss": self.layer(x).square().mean()})

    model, batches = Model(), [{"x": torch.randn(4, 3)} for _ in range(5)]
    gradients = []
    for batch in batches:
        (gradient,) = torch.autograd.grad(model(**batch).loss, layer.weight)
        gradients.append(gradient)
    stacked = torch.stack(gradients)
    variance, squared = nm_quality.gradient_noise(model, {"layer": layer}, batches)
    assert variance == pytest.approx(float(stacked.var(0).mean()), rel=1e-4)
    assert squared == pytest.approx(float(stacked.mean(0).square().mean()), rel=1e-4)
    assert layer.weight.grad is None


def test_the_rate_rises_and_falls():
    rates = [nm_quality.rate_at(step, 100) for step in range(100)]
    assert rates[0] == pytest.approx(0.1) and max(rates) == rates[9] == 1 and rates[-1] == pytest.approx(1 / 90)
    assert nm_quality.middles(100) == [5, 15, 25, 35, 45, 55, 65, 75, 85, 95]


def test_the_term_is_counted_over_all_steps(small):
    rates = sum(nm_quality.rate_at(step, 20) for step in range(20)) * Digits.learning_rate
    assert nm_quality.shrinkage(Run("sr-ste", "1:4", 0), Digits([small])) == pytest.approx(2e-4 * rates)
    assert nm_quality.shrinkage(Run("mdgf-linear", "1:4", 0), Digits([small])) == 0


def test_the_corpus_is_cut_into_windows(tmp_path, monkeypatch):
    for name, text in {"books-01": "One two three.", "docs-01": "Four five.", "heldout-books": "Six seven."}.items():
        text = f"{text * 9}\n<|doc|>\n{text * 5}"
        (tmp_path / f"{name}.txt.xz").write_bytes(lzma.compress(text.encode()))
    for name, value in {"context": 16, "batch_size": 3, "num_heldout": 2}.items():
        monkeypatch.setattr(Corpus, name, value)
    setting = Corpus([tmp_path])
    batch = next(setting.batches(1, seed=0))
    assert batch["input_ids"].shape == (3, 16) and torch.equal(batch["input_ids"], batch["labels"])
    assert not torch.equal(batch["input_ids"], next(setting.batches(1, seed=1))["input_ids"])
    assert [each["input_ids"].shape for each in setting.heldout] == [(2, 16)]
    with pytest.raises(FileNotFoundError, match="the folder of the corpus"):
        Corpus([tmp_path / "nothing"])
    model = setting.new_model()
    assert {layer.in_features % 256 for layer in nm_quality.prunable(model, setting.layers).values()} == {0}


def test_a_decoder_learns_notes_of_which_some_are_held_out(model_folder, notes_folder, monkeypatch):
    for name, value in {"num_heldout_notes": 4, "context": 32, "batch_size": 2, "num_steps": 10}.items():
        monkeypatch.setattr(Notes, name, value)
    monkeypatch.setattr(nm_quality, "NOISE_BATCHES", 2)
    setting = Notes([notes_folder], str(model_folder))
    row = nm_quality.train(setting, Run("mdgf-exponential", "1:16", 0), CPU)
    assert row["accuracy"] is None and row["loss"] > 0
    held_out = {tuple(ids) for batch in setting.heldout for ids in batch["input_ids"].tolist()}
    trained = {tuple(ids) for batch in setting.batches(20, 0) for ids in batch["input_ids"].tolist()}
    assert len(held_out) == 4 and not held_out & trained


def test_an_encoder_learns_classes(tmp_path, tokenizer, monkeypatch):
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = BertConfig(vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, **sizes)
    for saved in (tokenizer, BertForSequenceClassification(config)):
        saved.save_pretrained(tmp_path / "bert")
    (tmp_path / "sst2").mkdir()
    texts = "".join(f"{'good' if number % 2 else 'bad'} film {number}\t{number % 2}\n" for number in range(40))
    for name in ("train", "test"):
        (tmp_path / "sst2" / f"{name}.tsv").write_text(f"sentence\tlabel\n{texts}")
    for name, value in {"num_steps": 10, "batch_size": 8}.items():
        monkeypatch.setattr(Sst2, name, value)
    monkeypatch.setattr(nm_quality, "NOISE_BATCHES", 2)
    setting = Sst2([tmp_path], str(tmp_path / "bert"))
    row = nm_quality.train(setting, Run("sdgf-stepwise", "2:4", 0), CPU)
    assert 0 <= row["accuracy"] <= 1
    assert "classifier" not in nm_quality.prunable(setting.new_model(), setting.layers)


def test_a_setting_needs_its_model(capsys):
    with pytest.raises(SystemExit):
        nm_quality.main(["sst2", "."])
    assert "sst2 needs a --model" in capsys.readouterr().err


def test_the_tables_know_the_settings():
    assert tuple(nm_settings.SETTINGS) == nm_tables.SETTINGS
    assert nm_quality.PARTS == nm_tables.PARTS
    assert (DENSE, COUPLED) == (nm_tables.DENSE, nm_tables.COUPLED)
