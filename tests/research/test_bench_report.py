"""The output of a benchmark: figures, one sentence of advice, and a self-contained plot."""

import csv
import json
import re
import xml.etree.ElementTree as ElementTree

import pytest

from sebp_edge.errors import StorageError
from sebp_edge.research.bench.compare import Measurement
from sebp_edge.research.bench.correctness import Deviation
from sebp_edge.research.bench.plot import draw, write_plot
from sebp_edge.research.bench.result import BenchResult, recommend
from sebp_edge.research.bench.timer import Times, medians
from sebp_edge.research.bench.variants import DENSE, DROP_IN, DYNAMIC, GRAPH, HOISTED, PACKED, VARIANTS

CORRECT = Deviation(1e-6, 2e-6)


def timed(variant, step, peak=None):
    parts = (None, None) if variant is GRAPH else (0.4 * step, 0.5 * step)
    return Measurement(variant, "ok", None, CORRECT, Times(*parts, step, peak))


def make_result(measurements, **changes):
    fields = {
        "model": "tiny <&>",
        "weights": "random",
        "parameters": 8_000_000,
        "method": "lora",
        "dtype": "float32",
        "device": "a GPU",
        "versions": {"torch": "2.13.0"},
        "lengths": [11, 80],
        "loss_tokens": 89,
        "context_length": 512,
        "padding_share": 0.911,
        "measurements": measurements,
    }
    return BenchResult(**fields | changes)


MIXED = [
    Measurement(DENSE, "out of memory"),
    Measurement(DROP_IN, "refused", "its gradients are off by nan, above 1.0e-04", Deviation(1e-6, float("nan"))),
    timed(DYNAMIC, 0.5, 6_500_000_000),
    timed(HOISTED, 0.25, 5_000_000_000),
    timed(GRAPH, 0.02, 5_100_000_000),
]


# ---------------------------------------------------------------------------------------------------- recommendations


@pytest.mark.parametrize(
    ("steps", "sentence"),
    [
        (
            {DENSE: 1.0, DROP_IN: 0.7, DYNAMIC: 0.3, PACKED: 0.2, HOISTED: 0.13},
            "On this machine, hoisted rows take 0.13 of the dense padded step's time and 0.65 of what packing takes, "
            "the fastest without sebp-edge; `sebp-edge adapt` trains that way.",
        ),
        (
            {DENSE: 1.0, PACKED: 0.2, HOISTED: 0.209},
            "On this machine, hoisted rows take 0.21 of the dense padded step's time and 1.04 of what packing takes, "
            "the fastest without sebp-edge; `sebp-edge adapt` trains that way.",
        ),
        (
            {DENSE: 1.0, PACKED: 0.2, HOISTED: 0.25},
            "On this machine, packing takes 0.20 of the dense padded step's time and 0.80 of what hoisted rows take; "
            "put the texts of a batch into one row.",
        ),
        (
            {DENSE: 1.0, DROP_IN: 0.7},
            "On this machine, the drop-in takes 0.70 of the dense padded step's time; "
            "put `sparsify(model)` around your training loop.",
        ),
        (
            {DENSE: 1.0, DROP_IN: 1.3, PACKED: 1.1},
            "On this machine, the dense padded step is the fastest: there is too little padding to gain from.",
        ),
        (
            {GRAPH: 0.0117, HOISTED: 0.1},
            "On this machine, captured graphs take 12 ms per step (the dense padded step does not run); "
            "`sebp-edge adapt` trains that way.",
        ),
        (
            {PACKED: 0.5},
            "On this machine, packing takes 500 ms per step (the dense padded step does not run); "
            "put the texts of a batch into one row.",
        ),
        ({}, "No variant could be timed on this machine; try a smaller model, shorter texts or less padding."),
    ],
    ids=["ours", "as fast", "theirs", "drop-in", "dense", "no dense", "no ours", "nothing"],
)
def test_the_recommendation_is_one_honest_sentence(steps, sentence):
    measurements = [
        timed(variant, steps[variant]) if variant in steps else Measurement(variant, "out of memory")
        for variant in VARIANTS
    ]
    assert recommend(measurements) == sentence


# ------------------------------------------------------------------------------------------------------------ figures


def test_medians_are_of_each_part_and_the_peak_is_the_highest():
    found = medians([Times(1.0, 5.0, 9.0, 7), Times(2.0, 4.0, 8.0, 9), Times(3.0, 3.0, 7.0, 8)])
    assert found == Times(2.0, 4.0, 8.0, 9)
    assert medians([Times(None, None, 9.0, None)]) == Times(None, None, 9.0, None)


def test_the_figures_are_json_for_every_status():
    record = json.loads(json.dumps(make_result(MIXED).to_dict(), allow_nan=False))
    assert record["tokens"] == 91
    assert [row["status"] for row in record["variants"]] == ["out of memory", "refused", "ok", "ok", "ok"]
    assert record["variants"][1]["gradient_error"] is None
    assert record["variants"][1]["reason"] == "its gradients are off by nan, above 1.0e-04"
    dynamic, graph = record["variants"][2], record["variants"][4]
    assert (dynamic["forward_ms"], dynamic["backward_ms"], dynamic["step_ms"]) == (200.0, 250.0, 500.0)
    assert (dynamic["tokens_per_second"], dynamic["peak_bytes"]) == (182.0, 6_500_000_000)
    assert (graph["forward_ms"], graph["backward_ms"], graph["step_ms"]) == (None, None, 20.0)


def test_the_csv_has_a_line_for_each_variant(tmp_path):
    make_result(MIXED).write_csv(tmp_path / "b.csv")
    with (tmp_path / "b.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["variant"] for row in rows] == [one.variant.name for one in MIXED]
    assert {row["model"] for row in rows} == {"tiny <&>"}
    assert (rows[0]["step_ms"], rows[2]["step_ms"], rows[2]["examples"]) == ("", "500.0", "2")


def test_a_failed_write_is_one_sentence(tmp_path):
    for write in (make_result(MIXED).write_csv, lambda path: write_plot(make_result(MIXED), path)):
        with pytest.raises(StorageError, match=r"cannot be written: Is a directory\."):
            write(tmp_path)


# --------------------------------------------------------------------------------------------------------------- plot


def shapes(svg, kind):
    return ElementTree.fromstring(svg).iter(f"{{http://www.w3.org/2000/svg}}{kind}")


def test_the_plot_is_a_self_contained_svg_for_light_and_dark_pages():
    svg = draw(make_result(MIXED))
    words = " ".join(text.text for text in shapes(svg, "text"))
    assert "tiny <&>" in words
    for one in MIXED:
        assert one.variant.name in words
    for expected in (
        "500.0 ms",
        "20.0 ms",
        "6.5 GB",
        "out of memory",
        "refused",
        "91 % padding",
        "Peak GPU memory of torch's allocator",
    ):
        assert expected in words
    assert "prefers-color-scheme: dark" in svg
    assert not re.search(r"href|@import|url\(|<script", svg)
    used = set(re.findall(r"var\(--(\w+)\)", svg))
    light, dark = svg.split("@media")
    for scheme in (light, dark):
        assert used <= set(re.findall(r"--(\w+):", scheme))


def test_bars_are_in_proportion_to_the_times_and_stay_on_the_page():
    svg = draw(make_result([timed(DENSE, 1.0), timed(HOISTED, 0.25)]))
    bars = [rect for rect in shapes(svg, "rect") if rect.get("height") == "18"]
    widths = [float(rect.get("width")) for rect in bars]
    assert sum(widths[3:]) / sum(widths[:3]) == pytest.approx(0.25, abs=0.01)
    assert widths[0] / sum(widths[:3]) == pytest.approx(0.4, abs=0.01)
    page = ElementTree.fromstring(svg)
    for shape in (*shapes(svg, "rect"), *shapes(svg, "text")):
        assert float(shape.get("x", 0)) <= float(page.get("width"))
        assert float(shape.get("y", 0)) <= float(page.get("height"))
    assert "Peak" not in svg


def test_a_plot_without_any_time_says_so():
    words = [text.text for text in shapes(draw(make_result([Measurement(DENSE, "out of memory")])), "text")]
    assert "out of memory" in words
