"""A small transformer encoder (Vaswani et al. 2017, pre-norm) with a variable sequence length.

Every length between 1 and ``max_length`` runs through the same artifact. Token 0 is padding: it is
no token, and what stands in its place counts for nothing. Behind the embedding such a position is
exactly zero in every element, and stays so: each block reads from its own input who is there. So
one tensor travels between blocks, no mask beside it, and the encoder may be cut anywhere.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


def present(x: Tensor) -> Tensor:
    """float32[rows, length, width] -> float32[rows, length, 1]: 0 where all is 0, else 1."""
    return (x != 0).any(dim=-1, keepdim=True).to(x.dtype)


def key_mask(there: Tensor) -> Tensor:
    """:func:`present` -> float32[rows, 1, 1, length], to be added to attention's scores.

    The weight of an absent key is then exactly 0. The number is finite, so that a row without any
    token gives numbers, too.
    """
    return ((there - 1) * 1e4).transpose(1, 2).unsqueeze(1)


class Embedding(nn.Module):
    """int64[rows, length] -> float32[rows, length, width]: tokens plus learned positions, zeros for
    token 0."""

    def __init__(self, vocabulary: int, width: int, max_length: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(0.02 * torch.randn(max_length, width))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position[: tokens.size(1)]
        return x * (tokens != 0).unsqueeze(-1).to(x.dtype)


class Layer(nn.Module):
    """Self-attention and a two-layer perceptron, each behind a norm and beside a skip. Positions of
    zeros are not attended to and stay zeros."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.grow = nn.Linear(width, 4 * width)
        self.shrink = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        there = present(x)
        query, key, value = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        attended = functional.scaled_dot_product_attention(
            query.unflatten(-1, [self.heads, -1]).transpose(1, 2),
            key.unflatten(-1, [self.heads, -1]).transpose(1, 2),
            value.unflatten(-1, [self.heads, -1]).transpose(1, 2),
            attn_mask=key_mask(there),
        )
        x = x + self.project(attended.transpose(1, 2).flatten(2)) * there
        return x + self.shrink(functional.gelu(self.grow(self.norm2(x)))) * there


class ClassHead(nn.Module):
    """float32[rows, length, width] -> logits float32[rows, classes], from the mean of the tokens
    that are there."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.fc = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        there = present(x)
        total = (self.norm(x) * there).sum(dim=1)
        return self.fc(total / there.sum(dim=1).clamp(min=1))


class TransformerEncoder(nn.Module):
    """int64[rows, length] -> logits float32[rows, classes]."""

    def __init__(
        self,
        layers: int = 6,
        width: int = 384,
        heads: int = 6,
        vocabulary: int = 4096,
        max_length: int = 512,
        classes: int = 16,
    ) -> None:
        super().__init__()
        self.embedding = Embedding(vocabulary, width, max_length)
        self.layers = nn.Sequential(*(Layer(width, heads) for _ in range(layers)))
        self.head = ClassHead(width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.embedding(tokens)))


class TokenEncoder(nn.Module):
    """int64[rows, length] -> float32[rows, length, width]: the encoder without a head."""

    def __init__(
        self,
        layers: int = 6,
        width: int = 384,
        heads: int = 6,
        vocabulary: int = 4096,
        max_length: int = 512,
    ) -> None:
        super().__init__()
        self.embedding = Embedding(vocabulary, width, max_length)
        self.layers = nn.Sequential(*(Layer(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.norm(self.layers(self.embedding(tokens)))
