"""Kernels compile ahead in other threads: all of a training, and neither they nor their errors stop it."""

import threading
from contextlib import nullcontext
from threading import Event

import pytest
import torch
from builders import make_llama
from peft import LoraConfig, get_peft_model
from random_cases import DEVICE

from sebp_edge import Recipe
from sebp_edge.engine.sparse.hoist_if_exact import hoist_if_exact, pad_right
from sebp_edge.engine.training import kernels_ahead
from sebp_edge.engine.training.update import Update
from sebp_edge.ops import backend
from sebp_edge.research import ActiveTokens

pytest.importorskip("triton", reason="Triton is not installed on this platform")

CONFIG = make_llama().config


@pytest.fixture
def on_any_device(monkeypatch):
    """Work of threads runs without a GPU, too."""
    monkeypatch.setattr(backend, "has_kernels", lambda device: True)
    if not torch.cuda.is_available():
        monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())


def ahead(launches, monkeypatch):
    monkeypatch.setattr(kernels_ahead, "launches", lambda *_: iter(launches))
    return kernels_ahead.compiling_ahead(CONFIG, Recipe.load("notes"), torch.device(DEVICE), 100)


def test_the_end_waits_for_every_launch(on_any_device, monkeypatch):
    begun, done = Event(), []

    def launch_late(number):
        assert begun.wait(60)
        done.append(number)

    count = 3 * kernels_ahead.THREADS
    with ahead([lambda number=number: launch_late(number) for number in range(count)], monkeypatch):
        assert not done
        begun.set()
    assert sorted(done) == list(range(count))
    assert done[0] == 0


def test_an_error_waits_for_no_launch_and_begins_none(on_any_device, monkeypatch):
    running, may_end, done = Event(), Event(), []

    def launch_first():
        running.set()
        assert may_end.wait(60)
        done.append("first")

    with pytest.raises(KeyboardInterrupt), ahead([launch_first, lambda: done.append("second")], monkeypatch):
        assert running.wait(60)
        raise KeyboardInterrupt
    assert not done
    (thread,) = (each for each in threading.enumerate() if each.name == "sebp-edge kernels ahead")
    assert not thread.daemon  # Python would abort if its end met one in Triton's compiler.
    may_end.set()
    thread.join(60)
    assert done == ["first"]


def test_errors_are_logged_and_stop_neither_other_launches_nor_the_training(on_any_device, monkeypatch, caplog):
    caplog.set_level("INFO")
    done = []
    with ahead([lambda: 1 / 0, lambda: done.append("second"), lambda: [][0]], monkeypatch):
        pass
    assert done == ["second"]
    assert sorted(record.getMessage() for record in caplog.records) == [
        "A kernel was not compiled ahead (IndexError: list index out of range).",
        "A kernel was not compiled ahead (ZeroDivisionError: division by zero).",
    ]


def launched(work, monkeypatch, *, runs=True):
    """The names of the kernels that `work` launches; perhaps they do not run, which takes seconds."""
    from triton.runtime.interpreter import InterpretedFunction

    names, run = set(), InterpretedFunction.run

    def record(kernel, *arguments, **options):
        names.add(kernel.__name__)
        if runs:
            run(kernel, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(InterpretedFunction, "run", record)
        work()
    return names


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are recorded in Triton's interpreter")
def test_every_kernel_of_a_training_is_launched_ahead(kernels, short_attention, fused_modules, monkeypatch):
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    lora = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    model = get_peft_model(make_llama(**sizes), lora).eval()
    config, lines = model.config.get_text_config(), [list(range(5, 14)), list(range(7, 12))]

    def train():
        hoisted, reason = hoist_if_exact(model, lines, 0)
        assert reason is None
        update = Update([each for each in model.parameters() if each.requires_grad], Recipe.load("notes"))
        update.begin(1e-3)
        input_ids, plan = pad_right(lines, 0)
        update.take_gradients(hoisted.row_losses(ActiveTokens.gather(input_ids, plan)).mean())
        update.finish()
        hoisted.remove()

    def launch_all():
        for launch in kernels_ahead.launches(config, 4, torch.device("cpu"), texts_are_short=True):
            launch()

    # Long sequences are rotated, many rows have adapters apart, and torch updates fp32 weights on a CPU.
    trained = launched(train, monkeypatch) | {"_rotate_kernel", "_adamw_kernel", "_lora_up_kernel"}
    # The trial of a small copy, on the CPU, has gates without an adapter.
    assert launched(launch_all, monkeypatch, runs=False) == trained - {"_gated_backward_kernel"}
