"""Single rows are computed by all threads, with the same results; nothing else is, and models are left as they were."""

import pytest
import torch
from model_families import MODELS
from torch import nn
from torch.nn import functional as F

from sebp_edge.engine.models import single_rows
from sebp_edge.engine.models.decoding import Decoder
from sebp_edge.engine.models.sampling import Sampling
from sebp_edge.engine.models.single_rows import threaded_linears


@pytest.fixture
def threads():
    """Sets torch's number of threads until the end of the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


class Layers(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.device = torch.device("cpu")


@pytest.mark.parametrize("outputs", [256, 257, 1026])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("count", [2, 3])
def test_a_row_gives_the_same(threads, outputs, bias, count):
    threads(count)
    layer = nn.Linear(300, outputs, bias=bias)
    for size in ((300,), (1, 300), (1, 1, 300), (2, 1, 300)):
        x = torch.randn(size)
        expected = layer(x)
        with threaded_linears(Layers(layer)), torch.no_grad():
            assert "forward" in vars(layer)
            torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-5)
            assert layer(x).shape == expected.shape
    assert "forward" not in vars(layer)


def test_other_layers_are_left_alone(threads):
    class Own(nn.Linear):
        pass

    small, half, own, patched = nn.Linear(8, 8), nn.Linear(512, 512).bfloat16(), Own(512, 512), nn.Linear(512, 512)
    patched.forward = lambda x: F.linear(x, patched.weight)
    forward = patched.forward
    model = Layers(small, half, own, patched)
    threads(2)
    with pytest.raises(ZeroDivisionError), threaded_linears(model):
        assert not any("forward" in vars(layer) for layer in (small, half, own)) and patched.forward is forward
        raise ZeroDivisionError
    assert patched.forward is forward
    threads(1)
    with threaded_linears(Layers(plain := nn.Linear(512, 512))):
        assert "forward" not in vars(plain)


# On one core, each product by two threads takes as long as their turns.
@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma2", "phi3"])
def test_texts_are_those_of_one_thread(family, threads, monkeypatch):
    monkeypatch.setattr(single_rows, "MIN_ELEMENTS", 1)
    model, prompts = MODELS[family]().eval(), [[20, 30, 40], list(range(20, 50))]
    found = []
    for count in (1, 2):
        threads(count)
        found.append([Decoder(model).decode([each], [], Sampling(3, temperature=0)) for each in prompts])
    assert found[0] == found[1]
