"""The model of steps on cards that nobody measured: its counts are those of real models, its sums are plain."""

import csv

import pytest
import torch
from builders import SIZES, make_llama
from peft import LoraConfig, get_peft_model
from torch.utils.flop_counter import FlopCounterMode

import consumer_model
from consumer_model import BF16, CARDS, H100, LLAMA_3B, NF4, RANK, Card, Shape, Work

TINY = Shape("tiny", SIZES["vocab_size"], SIZES["hidden_size"], SIZES["intermediate_size"], 2, 4, 2, 8)


def adapted():
    config = LoraConfig(r=RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(make_llama(attn_implementation="eager"), config)


@pytest.mark.parametrize("lengths", [[7], [1], [31, 31, 31]])
def test_flops_are_those_of_a_real_step(lengths):
    model = adapted()
    input_ids = torch.randint(3, TINY.vocabulary, (len(lengths), lengths[0]))
    with FlopCounterMode(display=False) as counter:
        # Each row's own sum, so that one token is enough.
        model(input_ids=input_ids).logits.square().sum().backward()
    found = {str(name): flops for name, flops in counter.get_flop_counts()["Global"].items()}
    tokens, squares = sum(lengths), sum(length**2 for length in lengths)
    works = consumer_model.parts(TINY, tokens, squares, BF16)
    scores = consumer_model.attention(TINY, tokens, squares)
    assert found["aten.mm"] == sum(work.flops for work in works) - TINY.layers * sum(work.flops for work in scores)
    # Two half products are one. Eager attention, which keeps its scores, computes whole ones: two, and four backward.
    eager = TINY.layers * 6 * scores[0].flops
    # Angles of the rotary embedding, where they are computed by a product.
    assert found["aten.bmm"] - eager in (0, tokens * TINY.head_size)
    assert scores[1].flops == 2.5 * scores[0].flops


def test_weights_are_those_of_a_real_model():
    model = adapted()
    norms = sum(parameter.numel() for name, parameter in model.named_parameters() if "norm" in name)
    everything = sum(parameter.numel() for parameter in model.parameters())
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert TINY.adapter_weights == trained
    assert TINY.linear_weights + TINY.head_weights + norms + trained == everything
    assert LLAMA_3B.linear_weights + LLAMA_3B.head_weights == 3_212_749_824 - (2 * 28 + 1) * 3072


def test_bytes_of_a_linear_layer_are_its_rows_weights_and_adapters():
    forward, backward = consumer_model.linear(5, 10, [20, 30], BF16, input_gradient=True)
    adapters = 4 * (2 * RANK * 10 + RANK * 50)
    assert forward.bytes == 2 * 5 * (10 + 50) + 2 * 10 * 50 + adapters
    assert backward.bytes == 2 * 5 * (10 + 50 + 10) + 2 * 10 * 50 + 2 * adapters
    assert backward.flops == forward.flops + 2 * 5 * RANK * (2 * 10 + 50)
    without = consumer_model.linear(5, 10, [20, 30], BF16, input_gradient=False)[1]
    assert backward.flops - without.flops == 2 * 5 * 10 * (50 + 2 * RANK)


def test_a_base_in_4_bits_is_read_written_and_read_again():
    (whole, _), (quantised, _) = (
        consumer_model.linear(5, 64, [64], weight_bytes, input_gradient=True) for weight_bytes in (BF16, NF4)
    )
    assert quantised.bytes - whole.bytes == pytest.approx(64 * 64 * (NF4 + 2 + 2 - 2))


def test_a_part_takes_the_longer_of_its_two_times():
    card = Card("any", 1e9, bandwidth=10.0, rate=100.0)
    assert Work(flops=200, bytes=5).seconds(card) == 2
    assert Work(flops=20, bytes=50).seconds(card) == 5


def test_one_text_reads_all_weights_twice_and_little_else():
    slow_memory = H100._replace(rate=1e30)
    seconds = consumer_model.counted(LLAMA_3B, [80], slow_memory, BF16)
    weights = 2 * BF16 * (LLAMA_3B.linear_weights + LLAMA_3B.head_weights)
    assert 1.0 < seconds * H100.bandwidth / weights < 1.3


def test_micro_batches_compute_the_same_and_read_the_weights_again():
    one, four = (consumer_model.counted(LLAMA_3B, [100] * 40, H100._replace(bandwidth=1e30), BF16, n) for n in (1, 4))
    assert four == pytest.approx(one)
    one, four = (consumer_model.counted(LLAMA_3B, [1] * 40, H100._replace(rate=1e30), BF16, n) for n in (1, 4))
    weights = BF16 * (LLAMA_3B.linear_weights + LLAMA_3B.head_weights)
    assert four - one == pytest.approx(3 * 2 * weights / H100.bandwidth, rel=0.1)


def test_a_3b_base_is_in_4_bits_on_8_gb_only_and_a_larger_one_is_refused():
    bases = {card.name: next(iter(consumer_model.predict(LLAMA_3B, card, 0.0)))["base"] for card in CARDS}
    assert bases == {"RTX 4060": "4 bits", "RTX 3090": "bf16", "RTX 4090": "bf16"}
    larger = Shape("larger", 128256, 8192, 28672, 80, 64, 8, 128)
    with pytest.raises(ValueError, match="larger does not fit into the memory of the RTX 4060, not even in 4 bits"):
        list(consumer_model.predict(larger, CARDS[0], 0.0))


def test_a_peer_is_never_faster_than_its_host_nor_than_its_gpu():
    for row in consumer_model.predict(LLAMA_3B, CARDS[0], 4e-4):
        host = 1e3 * consumer_model.HOST[0] * row["micro_batches"]
        assert row["packed_over_ours_quick_host"] == pytest.approx(max(1, host / row["ours_ms"]))
        assert row["dynamic_over_ours_quick_host"] >= row["packed_over_ours_quick_host"]
        assert row["packed_over_ours_slow_host"] >= row["packed_over_ours_quick_host"]


def test_the_fit_gives_back_what_was_measured_and_the_table_is_kept(tmp_path, capsys):
    fixed = consumer_model.fitted(H100, 0.0177)
    first = next(iter(consumer_model.predict(LLAMA_3B, H100, fixed)))
    assert first["ours_ms"] == pytest.approx(17.7)
    consumer_model.main(["--csv", str(tmp_path / "deep" / "model.csv")])
    with (tmp_path / "deep" / "model.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 4 * len(consumer_model.SHAPES) * (1 + len(CARDS))
    assert float(rows[0]["ours_ms"]) == pytest.approx(consumer_model.MEASURED[80], abs=0.05)
    assert "Modelled, not measured" in capsys.readouterr().out


def test_figures_that_the_model_cannot_be_held_against_are_refused(tmp_path, capsys):
    for wrong in (["--on", "H200"], ["--measured", "212=20"], ["--measured", "80=17", "81=18"]):
        with pytest.raises(SystemExit):
            consumer_model.main([*wrong, "--csv", str(tmp_path / "model.csv")])
    said = capsys.readouterr().err
    assert "only the H100's figures are built in" in said
    assert said.count("steps of 80, 212, 836, 3727 tokens are modelled; 80 must be measured") == 2
    assert not list(tmp_path.iterdir())
