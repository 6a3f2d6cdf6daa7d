# ruff: noqa: E501
"""Small networks, one for every kind of layer and every way a weight can be used."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Lambda(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def pool(x: Tensor) -> Tensor:
    """(n, c, ...) -> (n, c)."""
    return x.flatten(2).mean(-1)


class Reused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.again, self.last = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.again(torch.tanh(self.again(torch.tanh(self.first(x)))))))


class Tied(nn.Module):
    """Two linear layers with one weight and two biases."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.b(torch.tanh(self.a(x)))))


class TiedHead(nn.Module):
    """An embedding and a head with one weight: a language model in small, outputs per position."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.mix = nn.Linear(4, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(self.embed(x))))


class FunctionalHead(TiedHead):
    """The same tie by a function call, which no hook sees."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.mix(self.embed(x))), self.embed.weight)


class DirectParameter(nn.Module):
    """A token of its own in front of the sequence, as vision transformers have it."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 4))
        self.scale = nn.Parameter(torch.ones(()))
        self.mix, self.last = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        return self.last(self.scale * torch.tanh(self.mix(x)).mean(1))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.last = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.attention(x, x, x, need_weights=False)[0].mean(1))


class Transformer(nn.Module):
    """One block of a transformer, written out: three projections of the same input, norms, a residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False), nn.Linear(4, 4)
        self.out, self.first, self.second = nn.Linear(4, 4), nn.LayerNorm(4), nn.RMSNorm(4)
        self.mlp = nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 4))
        self.last = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        x = x + self.out(torch.softmax(self.query(y) @ self.key(y).mT / 2, -1) @ self.value(y))
        return self.last((x + self.mlp(self.second(x))).mean(1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 5, batch_first=True)
        self.last = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.lstm(x)[0][:, -1])


class SequenceFirst(nn.Module):
    """Positions before examples inside, as nn.Transformer has it by default."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x.transpose(0, 1))).mean(0))


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 5, bias=False), nn.Tanh(), nn.Linear(5, 3))


def in_place() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(inplace=True), nn.Linear(5, 3))


def sequence() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), Lambda(lambda x: x.mean(1)), nn.Linear(5, 3))


def per_token() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def convolution(kind: type[nn.Module], *args: object, **options: object) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(kind(*args, **options), nn.Tanh(), Lambda(pool), nn.LazyLinear(3))


def embedding(**options: object) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Embedding(7, 4, **options), nn.Tanh(), Lambda(lambda x: x.mean(1)), nn.Linear(4, 3))  # type: ignore[arg-type]


def normalised(norm: Callable[[], nn.Module], dims: int) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        layer = norm()
        for parameter in layer.parameters():
            nn.init.normal_(parameter)
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            assert layer.running_mean is not None and layer.running_var is not None
            layer.running_mean.normal_()
            layer.running_var.uniform_(0.5, 2)
        end = Lambda(pool) if dims else nn.Identity()
        return nn.Sequential(layer, nn.Tanh(), end, nn.LazyLinear(3))

    return build


def tokens(n: int = 6, length: int = 5) -> Tensor:
    return torch.randint(0, 6, (n, length))


X = torch.randn
VECTORS: Callable[[], Tensor] = lambda: X(6, 4)  # noqa: E731
SEQUENCES: Callable[[], Tensor] = lambda: X(6, 5, 4)  # noqa: E731

NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "linear": (linear, VECTORS),
    "in-place relu": (in_place, VECTORS),
    "sequence": (sequence, SEQUENCES),
    "four dimensions": (lambda: nn.Sequential(nn.Linear(4, 5), Lambda(lambda x: x.tanh().mean((1, 2))), nn.Linear(5, 3)), lambda: X(6, 2, 3, 4)),
    "conv1d": (convolution(nn.Conv1d, 4, 6, 3, stride=2, padding=1), lambda: X(6, 4, 9)),
    "conv1d groups": (convolution(nn.Conv1d, 4, 6, 3, groups=2, dilation=2), lambda: X(6, 4, 9)),
    "conv2d": (convolution(nn.Conv2d, 2, 3, 3, padding=1), lambda: X(6, 2, 6, 5)),
    "conv2d stride dilation": (convolution(nn.Conv2d, 2, 3, (3, 2), stride=(2, 1), dilation=(1, 2), padding=(2, 1), bias=False), lambda: X(6, 2, 6, 7)),
    "conv2d same circular": (convolution(nn.Conv2d, 2, 3, 3, padding="same", padding_mode="circular"), lambda: X(6, 2, 5, 5)),
    "conv2d reflect": (convolution(nn.Conv2d, 2, 3, 3, padding=1, padding_mode="reflect"), lambda: X(6, 2, 5, 5)),
    "conv2d depthwise": (convolution(nn.Conv2d, 4, 8, 3, groups=4), lambda: X(6, 4, 5, 5)),
    "conv3d": (convolution(nn.Conv3d, 2, 4, 2, groups=2, padding=1), lambda: X(6, 2, 3, 4, 3)),
    "embedding": (embedding(), tokens),
    "embedding padding": (embedding(padding_idx=0), tokens),
    "embedding sparse": (embedding(sparse=True), tokens),
    "layer norm": (normalised(lambda: nn.LayerNorm(4), 0), VECTORS),
    "layer norm sequence": (normalised(lambda: nn.LayerNorm(4), 2), SEQUENCES),
    "layer norm no bias": (normalised(lambda: nn.LayerNorm(4, bias=False), 0), VECTORS),
    "rms norm": (normalised(lambda: nn.RMSNorm(4), 2), SEQUENCES),
    "group norm": (normalised(lambda: nn.GroupNorm(2, 4), 2), lambda: X(6, 4, 3, 3)),
    "batch norm 1d": (normalised(lambda: nn.BatchNorm1d(4), 0), VECTORS),
    "batch norm 2d": (normalised(lambda: nn.BatchNorm2d(4), 2), lambda: X(6, 4, 3, 3)),
    "transposed convolution": (convolution(nn.ConvTranspose2d, 2, 3, 3, stride=2), lambda: X(6, 2, 4, 4)),
    "reused module": (Reused, VECTORS),
    "tied weight": (Tied, VECTORS),
    "direct parameter": (DirectParameter, SEQUENCES),
    "attention": (Attention, SEQUENCES),
    "transformer": (Transformer, SEQUENCES),
    "lstm": (Recurrent, SEQUENCES),
    "sequence first": (SequenceFirst, SEQUENCES),
    "sequence first, as many positions as examples": (SequenceFirst, lambda: X(6, 6, 4)),
}  # fmt: skip


def build(name: str, seed: int = 0) -> tuple[nn.Module, Tensor, Tensor]:
    """A network in float64, eight-ish inputs, and targets of three classes."""
    torch.manual_seed(seed)
    make, inputs = NETWORKS[name]
    x, model = inputs(), make()
    model(x)  # lazy layers find their size
    return model.double(), x.double() if x.is_floating_point() else x, torch.randint(0, 3, (len(x),))
