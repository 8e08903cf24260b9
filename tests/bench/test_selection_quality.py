"""The comparison of ways to choose rows, in small: what is compared is what it says, and its verdict can fail."""

import csv
import json
import lzma
from pathlib import Path

import pytest
import torch
from builders import make_llama

import glue_texts
import quality_curves
import selection_quality
from sebp_edge.rows.selection import DroppedRows


@pytest.fixture
def few_notes(monkeypatch, notes_folder):
    """Two dozen notes are enough: six to judge on, batches of three."""
    for name, value in (("HELD_OUT_NOTES", 6), ("BATCH_SIZE", 3), ("CONTEXT", {"notes": 48})):
        monkeypatch.setattr(selection_quality, name, value)
    return notes_folder


def recorded(folder):
    (table,) = (folder / "results").glob("selection-quality-*.csv")
    return list(csv.DictReader(table.read_text().splitlines()))


def run(model_folder, notes, *more):
    selection_quality.main(["--decoder", str(model_folder), "--notes", str(notes), "--steps", "4", *more])


def test_every_way_is_trained_with_every_seed_and_exact_is_dense(model_folder, few_notes, tmp_path, capsys):
    run(model_folder, few_notes, "--seeds", "0", "1", "--record", str(tmp_path / "results.json"))
    rows = recorded(tmp_path)
    names = ["dense", "exact", "top n", "threshold", "energy", "published"]
    assert [(row["variant"], row["seed"]) for row in rows] == [(name, seed) for seed in "01" for name in names]
    losses = {(row["variant"], row["seed"]): float(row["heldout_loss"]) for row in rows}
    for seed in "01":
        assert losses["exact", seed] == pytest.approx(losses["dense", seed], abs=1e-5)
        assert losses["top n", seed] != losses["dense", seed] != losses["published", seed]
    assert all(0 < float(row["active"]) < float(row["rows"]) for row in rows)
    assert all(float(row["heldout_loss"]) < float(row["heldout_before"]) for row in rows if row["variant"] == "dense")
    assert 0 < float(rows[2]["kept"]) < 1
    assert "exact is at most" in capsys.readouterr().out


def test_exact_that_leaves_the_dense_curve_fails(model_folder, few_notes, monkeypatch):
    variants = selection_quality.variants

    def with_first_rows_as_exact(rows):
        return variants(rows) | {"exact": variants(rows)["published"]}

    monkeypatch.setattr(selection_quality, "variants", with_first_rows_as_exact)
    with pytest.raises(SystemExit, match="further from dense than the seeds are from each other: notes"):
        run(model_folder, few_notes, "--seeds", "0", "1")


def test_too_few_texts_are_refused(model_folder, few_notes):
    with pytest.raises(SystemExit, match="400 steps need 1200 texts, and there are"):
        run(model_folder, few_notes, "--steps", "400")


def test_a_model_needs_its_texts(capsys):
    with pytest.raises(SystemExit):
        selection_quality.main(["--decoder", "tiny"])
    assert "a decoder needs --notes" in capsys.readouterr().err


def test_published_computes_the_first_rows_of_dx_and_no_weights_gradient():
    torch.manual_seed(0)
    layer = torch.nn.Linear(5, 7)
    model = torch.nn.Sequential(layer)
    x = torch.randn(2, 3, 5, requires_grad=True)
    dout = torch.randn(2, 3, 7)
    with selection_quality.published(model, num_rows=4):
        y = model(x)
        y.backward(dout)
    assert torch.equal(y, layer(x))
    expected = (dout @ layer.weight).flatten(0, 1)
    torch.testing.assert_close(x.grad.flatten(0, 1)[:4], expected[:4])
    assert not x.grad.flatten(0, 1)[4:].any() and expected[4:].any()
    assert layer.weight.grad is None
    torch.testing.assert_close(layer.bias.grad, dout.sum((0, 1)))


def test_published_leaves_head_and_model_alone():
    model = make_llama()
    with selection_quality.published(model, num_rows=1):
        assert "forward" not in vars(model.lm_head)
        assert "forward" in vars(model.model.layers[0].mlp.down_proj)
    assert not any("forward" in vars(module) for module in model.modules())


def test_shares_are_over_rows_and_lost_energy_over_layers():
    layers = [DroppedRows(("a",), 2, 20, 10, 5, 0.25, None), DroppedRows(("b",), 2, 20, 30, 5, 0.75, None)]
    assert selection_quality._kept(layers) == {"kept": 0.25, "lost_energy": 0.5}


def test_encoders_are_trained_on_tasks(tmp_path, tokenizer, monkeypatch):
    from transformers import BertConfig, BertForSequenceClassification

    tokenizer.save_pretrained(tmp_path / "bert")
    config = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    BertForSequenceClassification(
        BertConfig(vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, **config)
    ).save_pretrained(tmp_path / "bert")
    folder = tmp_path / "glue" / "sst2"
    folder.mkdir(parents=True)
    rows = "".join(f"{'good' if number % 2 else 'bad'} film {number}\t{number % 2}\n" for number in range(40))
    (folder / "train.tsv").write_text(f"sentence\tlabel\n{rows}")
    (folder / "test.tsv").write_text(f"sentence\tlabel\n{rows}")
    monkeypatch.setattr(selection_quality, "ENCODER_RATE", 3e-3)
    arguments = ["--encoder", str(tmp_path / "bert"), "--glue", str(tmp_path / "glue"), "--tasks", "sst2"]
    arguments += ["--steps", "3", "--seeds", "0", "1", "--record", str(tmp_path / "results.json")]
    selection_quality.main(arguments)
    found = recorded(tmp_path)
    assert len(found) == 12 and all(0 <= float(row["accuracy"]) <= 1 for row in found)
    dense, exact, *_, published = (float(row["heldout_loss"]) for row in found[:6])
    assert exact == pytest.approx(dense, abs=1e-5)
    assert len({dense, published, float(found[0]["heldout_before"])}) == 3


def test_tasks_are_read_as_they_are_published(tmp_path):
    def write(name, text):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(lzma.compress(text.encode()) if path.suffix == ".xz" else text.encode())

    write("cola/in_domain_train.tsv.xz", 'x\t1\t\tHe said "no.\nx\t0\t*\tHe no said.\n')
    write("cola/in_domain_dev.tsv", "x\t1\t\tYes.\n")
    write("mrpc/msr-para-train.tsv", "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n1\t5\t6\tone\tuno\n")
    write("mrpc/msr-para-val.tsv", "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\n0\t5\t6\tone\ttwo\n")
    pair = {"text_a": "It rains.", "text_b": "It is wet.", "label": "entailment"}
    write("rte/full_train_part1.json.xz", json.dumps({"0": pair}))
    write("rte/dev.tsv", "index\tsentence1\tsentence2\tlabel\n3\tA.\tB.\tnot_entailment\n")
    cola, mrpc, rte = (glue_texts.read_task(tmp_path, name) for name in ("cola", "mrpc", "rte"))
    assert cola.train == [(('He said "no.',), 1), (("He no said.",), 0)] and cola.heldout == [(("Yes.",), 1)]
    assert mrpc.train == [(("one", "uno"), 1)] and mrpc.heldout == [(("one", "two"), 0)]
    assert rte.train == [(("It rains.", "It is wet."), 1)] and rte.heldout == [(("A.", "B."), 0)]
    with pytest.raises(FileNotFoundError, match=r"no full_train_\*\.json"):
        glue_texts.read_task(tmp_path / "cola", "rte")


def test_curves_are_drawn_with_the_worst_on_top(tmp_path):
    from xml.etree import ElementTree

    table = ["model,texts,variant,seed," + ",".join(f"train_{part}" for part in range(10))]
    for variant, offset in (("dense", 0.0), ("exact", 0.0), ("published", 1.0)):
        table += [
            f"m,a < b,{variant},{seed}," + ",".join(str(3 + offset - part / 10) for part in range(10)) for seed in "01"
        ]
    (tmp_path / "quality.csv").write_text("\n".join(table))
    quality_curves.main([str(tmp_path / "quality.csv"), str(tmp_path / "curves.svg")])
    drawing = ElementTree.parse(tmp_path / "curves.svg").getroot()
    dense, published, top_n, threshold, exact = drawing.iter("{http://www.w3.org/2000/svg}polyline")
    assert dense.get("points") == exact.get("points") and top_n.get("points") == threshold.get("points") == ""
    heights = [[float(point.split(",")[1]) for point in line.get("points").split()] for line in (dense, published)]
    # An SVG's y grows downwards.
    assert all(low > high for low, high in zip(*heights, strict=True)) and min(heights[1]) == quality_curves.TOP


def test_the_shown_curves_are_the_results():
    results = Path(quality_curves.__file__).parent / "results"
    tables = [results / f"selection-quality-{model}.csv" for model in ("stories260k", "tiny", "minilm-l6")]
    drawn = quality_curves.draw(quality_curves.read(tables))
    assert drawn == (results / "selection-quality.svg").read_text(encoding="utf-8")
