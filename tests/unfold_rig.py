"""Models whose forward torch.fx cannot trace: transformers as libraries write them, with keyword
arguments, checks of sizes, masks, and objects for results."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from blockflow.core.model import TensorSpec
from blockflow.repository.probe import example_input, probe_bindings

WORDS = 20
WIDTH = 8
TOKENS = TensorSpec("int64", ("rows", "length"), {"length": (1, 16)})
EXAMPLES = tuple(
    example_input(TOKENS, binding, int_below=WORDS, seed=i)
    for i, binding in enumerate(probe_bindings(TOKENS))
)


@dataclass
class Output:
    logits: Tensor
    hidden: Tensor | None = None


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.Linear(WIDTH, 3 * WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *, mask: Tensor, positions: tuple[Tensor, Tensor]) -> Tensor:
        if x.ndim != 3:  # a look at a tensor, which torch.fx cannot trace
            raise ValueError("hidden states are rows, length, width")
        q, k, v = self.attend(x).chunk(3, dim=-1)
        cos, sin = positions
        q = q * cos + q.flip(-1) * sin
        scores = (q @ k.transpose(1, 2)).masked_fill(~mask, float("-inf"))
        return x + self.mix(scores.softmax(-1) @ v)


class Decoder(nn.Module):
    """int64[rows, length] -> one vector per token; nobody looks at what comes later."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.register_buffer("angles", torch.linspace(0.1, 1, WIDTH), persistent=False)

    def mask(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        return torch.ones(length, length, dtype=torch.bool).tril()

    def forward(self, tokens: Tensor, output_hidden: bool = False) -> Output:
        x = self.embed(tokens)
        angles = torch.arange(tokens.shape[1])[:, None] * self.angles
        mask = self.mask(tokens)
        for layer in self.layers:
            x = layer(x, mask=mask, positions=(angles.cos(), angles.sin()))
        return Output(logits=x, hidden=x if output_hidden else None)


class Logits(nn.Module):
    def __init__(self, model: nn.Module | None = None) -> None:
        super().__init__()
        self.model = Decoder() if model is None else model
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.model(tokens).logits)


class Filled(Decoder):
    """Its mask is written step by step, and into a view of it as well."""

    def mask(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        ahead = torch.zeros(length, length, dtype=torch.int64)
        ahead += torch.arange(length)[:, None]
        seen = ahead >= 0
        ahead.t().sub_(torch.arange(length)[:, None])
        seen.logical_and_(ahead >= 0)
        ahead.fill_(-1)
        return seen


class Padded(Decoder):
    """Tokens of number 0 are not seen: its mask is data."""

    def mask(self, tokens: Tensor) -> Tensor:
        return super().mask(tokens) & (tokens != 0)[:, None]


class WrittenWithData(Decoder):
    def mask(self, tokens: Tensor) -> Tensor:
        rows, length = tokens.shape
        mask = torch.ones(rows, length, length, dtype=torch.bool)
        mask.logical_and_((tokens != 0)[:, None]).diagonal(dim1=1, dim2=2).fill_(True)
        return mask


class Halves(nn.Module):
    """float32[rows, length, width]; the numbers of halves and of both are of sizes alone."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim != 3:
            raise ValueError("rows, length, width")
        rows, both = x.shape[0], x.shape[1] * 2
        return self.b(self.a(x)).reshape(rows, both, 2)


class Flat(nn.Module):
    """Between ``a`` and ``c`` rows and length are one dim."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim != 3:
            raise ValueError("rows, length, width")
        y = self.b(self.a(x).reshape(-1, 4)).reshape(x.shape)
        return self.d(self.c(y))


class Pair(Decoder):
    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x = self.embed(tokens)
        return x, -x


class Heads(nn.Module):
    """Two heads on a trunk that cannot be traced."""

    class Trunk(nn.Module):
        def __init__(self, layers: int) -> None:
            super().__init__()
            self.decoder = Decoder(layers)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.decoder(tokens).logits

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.trunk = self.Trunk(layers)
        self.tag = nn.Linear(WIDTH, 3)
        self.word = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS))

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        hidden = self.trunk(tokens)
        return {"tag": self.tag(hidden), "word": self.word(hidden)}
