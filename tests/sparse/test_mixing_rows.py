"""Models whose rows mix outside of attention: gradients are the dense ones, or the model is refused, and stay so when a
gate opens that was zero while the model was tried."""

import pytest
import torch
import torch.nn.functional as F
from against_dense import assert_same, loss_and_gradients, padded_batch
from builders import make_llama
from torch import nn

from sebp_edge import sparsify

SIZE = 32


def shift(x):
    return F.pad(x, (0, 0, 1, -1))


class Decay(nn.Module):
    """A state that each row adds to, as in recurrent models."""

    def __init__(self):
        super().__init__()
        self.decay = nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        states = [x[:, 0]]
        for row in x[:, 1:].unbind(1):
            states.append(self.decay.sigmoid() * states[-1] + row)
        return torch.stack(states, dim=1)


class Convolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(SIZE, 1, 3) / 3)

    def forward(self, x):
        return F.conv1d(F.pad(x, (0, 0, 2, 0)).transpose(1, 2), self.kernel, groups=SIZE).transpose(1, 2)


class Transposed(nn.Module):
    """One of torch's modules along the sequence."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return self.module(x.transpose(1, 2)).transpose(1, 2)[:, : x.shape[1]]


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


MIXERS = {
    "shift": lambda: Function(shift),
    "roll": lambda: Function(lambda x: x.roll(1, dims=1)),
    "backward roll": lambda: Function(lambda x: x.roll(-1, dims=1)),
    "sum of earlier rows": lambda: Function(lambda x: x.cumsum(1)),
    "mean over time": lambda: Function(lambda x: x.mean(1, keepdim=True).expand_as(x)),
    "mean over the batch": lambda: Function(lambda x: x.mean(0, keepdim=True).expand_as(x)),
    "norm over time": lambda: Function(lambda x: (x - x.mean(1, keepdim=True)) / (x.std(1, keepdim=True) + 1)),
    "kernel": Convolution,
    "state": Decay,
    "convolution": lambda: Transposed(nn.Conv1d(SIZE, SIZE, 3, padding=2)),
    "pooling": lambda: Transposed(nn.AvgPool1d(3, stride=1, padding=1)),
    "batch norm": lambda: Transposed(nn.BatchNorm1d(SIZE)),
    "recurrence": lambda: nn.GRU(SIZE, SIZE, batch_first=True),
}


class Mixed(nn.Module):
    """What a layer computes, and a share of it that a function mixes; the share is zero or tiny at first."""

    def __init__(self, inner, mixer, gate, where):
        super().__init__()
        self.inner, self.mixer, self.where = inner, mixer, where
        self.gate = nn.Parameter(torch.tensor(float(gate)))

    def mix(self, x):
        mixed = self.mixer(x)
        return x + self.gate * (mixed[0] if isinstance(mixed, tuple) else mixed)

    def forward(self, x):
        return self.inner(self.mix(x)) if self.where == "input" else self.mix(self.inner(x))


class Ratio(Mixed):
    """Mixes each row with another by a ratio that begins at 1, as token shifts do."""

    def mix(self, x):
        return x.lerp(self.mixer(x), 1 - self.gate)


def mixed_llama(mixer, gate, place, where, block=-1, kind=Mixed):
    model = make_llama()
    layer = model.model.layers[block]
    parent, name = {"mlp": (layer, "mlp"), "o_proj": (layer.self_attn, "o_proj"), "norm": (model.model, "norm")}[place]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        setattr(parent, name, kind(getattr(parent, name), mixer(), gate, where))
    return model.train()


def assert_dense_while_the_gate_opens(model, tolerance, **options):
    gate = next(parameter for name, parameter in model.named_parameters() if name.endswith("gate"))
    batch = padded_batch(lengths=(11, 8, 20, 16), prompt=5)
    batch["labels"][:, 9:12] = -100
    dense = []
    with torch.no_grad():
        first = gate.clone()
    for passes in range(2):
        for opening in (0, 0, 0.5):
            with torch.no_grad():
                gate.copy_(first + opening)
            if passes == 0:
                dense.append(loss_and_gradients(model, batch))
    with sparsify(model, **options):
        for opening, expected in zip((0, 0, 0.5), dense, strict=True):
            with torch.no_grad():
                gate.copy_(first + opening)
            assert_same(expected, loss_and_gradients(model, batch), tolerance)


@pytest.mark.parametrize("place", ["mlp", "o_proj", "norm"])
@pytest.mark.parametrize("where", ["input", "output"])
@pytest.mark.parametrize("gate", [0, 1e-6, 1])
@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_it(mixer, gate, place, where):
    for keep in (False, True):
        for dtype, tolerance in ((torch.float64, 1e-4), (torch.float32, 1e-3)):
            model = mixed_llama(MIXERS[mixer], gate, place, where).to(dtype)
            assert_dense_while_the_gate_opens(model, tolerance, keep_logits=keep)
