"""Ordinary models at bf16 and fp16: their conversions to float32 meet weights that were lowered."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from blockflow.core.errors import BlockError
from blockflow.core.model import TensorSpec
from blockflow.engine import exported, sharing
from blockflow.engine.base import Engine, EngineOptions
from blockflow.engine.targets import UnknownProgram
from blockflow.repository.repository import BlockRepository
from blockflow.repository.sources import LoadedModel, load_model
from blockflow.tensormq.weights import WeightFiles
from tests import engine_rig
from tests.engine_rig import CASES, Stored, at

pytestmark = pytest.mark.contract
threads = engine_rig.threads

TOLERANCE = {"bf16": 0.02, "fp16": 0.003}
"""Of the largest value of the result (docs/engines.md)."""


class RMSNorm(nn.Module):
    """As transformers' LlamaRMSNorm: computed in float32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, h: Tensor) -> Tensor:
        dtype = h.dtype
        h = h.to(torch.float32)
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * h.to(dtype)


def norm() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), RMSNorm(16), nn.Linear(16, 16))


class Softmax(nn.Module):
    """In float32, as in GPT's attention."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.softmax(x, -1, dtype=torch.float32))


class Mask(nn.Module):
    """A mean over what is there."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        mask = (x.abs().sum(-1, keepdim=True) > 0).float()
        return self.layer((x * mask).sum(1) / mask.sum(1).clamp(min=1))


class MaskLike(Mask):
    def forward(self, x: Tensor) -> Tensor:
        mask = (x.abs().sum(-1, keepdim=True) > 0).to(x.dtype)
        return self.layer((x * mask).sum(1) / mask.sum(1).clamp(min=1))


class Positions(Mask):
    def forward(self, x: Tensor) -> Tensor:
        at = torch.arange(x.shape[1], dtype=torch.float32)[:, None] * torch.linspace(0, 1, 8)
        return self.layer(x + at.sin()).mean(1)


class Pixels(Mask):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.float() / 255)


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.to(torch.float32).div(255.0))


class Recurrent(nn.Module):
    """Its first state is made in the dtype of the trace."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(8, 6, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]


class Fills(nn.Module):
    """-1e9 is no number of fp16."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.layer(x).masked_fill(x > 0, -1e9).softmax(-1))


class Puts(nn.Module):
    """Written is a tensor of float32, with values of the lower precision."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        whole = torch.zeros(x.shape[0], 8)
        whole.index_copy_(1, torch.tensor([0, 2, 5, 7]), self.layer(x)[:, :4])
        return self.layer(whole)


class Decoder(nn.Module):
    """One layer of a Llama: positions and norms in float32, a mask of float32's least number."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.table = nn.Embedding(50, width)
        self.norm, self.end = RMSNorm(width), RMSNorm(width)
        self.qkv, self.mix = nn.Linear(width, 3 * width, False), nn.Linear(width, 50, False)
        self.register_buffer("speed", torch.logspace(0, -2, width // heads // 2))

    def forward(self, tokens: Tensor) -> Tensor:
        rows, length = tokens.shape
        x = self.table(tokens)
        # as far on as positions get that others have: the frequencies must not be rounded
        at = torch.arange(length).float()[:, None] + 4000
        angles = at * self.speed[None].float()
        cos, sin = (torch.cat((f, f), -1).to(x.dtype) for f in (angles.cos(), angles.sin()))

        def turned(y: Tensor) -> Tensor:
            one, two = y.chunk(2, -1)
            return y * cos + torch.cat((-two, one), -1) * sin

        parts = self.qkv(self.norm(x)).view(rows, length, 3, self.heads, -1)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        least = torch.finfo(x.dtype).min
        mask = torch.full((length, length), least, dtype=x.dtype).triu(1)
        mask = mask.masked_fill((tokens == 0)[:, None, None], least)
        mixed = functional.scaled_dot_product_attention(turned(q), turned(k), v, attn_mask=mask)
        return self.mix(self.end(x + mixed.transpose(1, 2).reshape(rows, length, -1)))


class Blends(Fills):
    """No kernel takes two dtypes, and autocast does not look at it."""

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.lerp(self.layer(x), torch.ones(8), 0.25))


class Unknown(Fills):
    """No kernel computes it below float32; autocast knows."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.special.zeta(self.layer(x).abs() + 2, x.abs() + 1)


FLAT = TensorSpec("float32", ("rows", 8))
WIDE = TensorSpec("float32", ("rows", 16))
LONG = TensorSpec("float32", ("rows", "length", 8), {"length": (1, 32)})
BYTES = TensorSpec("uint8", ("rows", 8))
IMAGES = TensorSpec("uint8", ("rows", 3, 8, 8))
TOKENS = TensorSpec("int64", ("rows", "length"), {"length": (1, 32)})
Make = Callable[[], nn.Module]
MODELS: dict[str, tuple[Make, TensorSpec]] = {
    "norm": (norm, WIDE),
    "softmax": (Softmax, WIDE),
    "mask": (Mask, LONG),
    "mask-like": (MaskLike, LONG),
    "positions": (Positions, LONG),
    "bytes": (Pixels, BYTES),
    "pixels": (Pixels, FLAT),
    "images": (Images, IMAGES),
    "transformer": (lambda: source("transformer").module, TOKENS),
}
FURTHER: dict[str, tuple[Make, TensorSpec]] = {
    "decoder": (Decoder, TOKENS),
    "recurrent": (Recurrent, TensorSpec("float32", ("rows", 5, 8))),
    "fills": (Fills, FLAT),
    "puts": (Puts, FLAT),
    "blends": (Blends, FLAT),
}
"""For who rewrites graphs; autocast does not help all of them."""


@cache
def source(name: str) -> LoadedModel:
    torch.manual_seed(0)
    if name == "transformer":
        return load_model("transformer", arguments={"layers": 2, "width": 96})
    make, spec = (MODELS | FURTHER | {"unknown": (Unknown, FLAT)})[name]
    return LoadedModel(make().eval().requires_grad_(False), name, spec)


def stored(shelf: BlockRepository, case: str, name: str) -> Stored:
    return CASES[case].stored(shelf, f"precisions-{name}", partial(source, name))


def loaded(block: Stored, precision: str, **options: Any) -> Engine:
    return block.load(block.create(EngineOptions(precision=precision, **options)))


def batch(block: Stored, rows: int, length: int) -> Tensor:
    spec = block.info.contract.input
    dims = spec.resolve({"rows": rows, "length": length})
    torch.manual_seed(rows)
    most = {"int64": 50, "uint8": 256}
    if spec.dtype in most:
        return torch.randint(1, most[spec.dtype], dims, dtype=getattr(torch, spec.dtype))
    return torch.randn(dims)


def error(y: Tensor, name: str, x: Tensor) -> float:
    with torch.no_grad():
        wanted = source(name).module(x)
    assert y.dtype == wanted.dtype and y.isfinite().all()
    return float((y - wanted).abs().max() / wanted.abs().max())


def assert_fits(block: Stored, name: str, precision: str, **options: Any) -> Engine:
    made = loaded(block, precision, **options)
    made.warm_up()
    for rows, length in ((1, 1), (3, 17), (8, 32)):
        x = batch(block, rows, length)
        y = made.run(x)
        assert error(y, name, x) < TOLERANCE[precision]
        out = torch.empty_like(y)
        assert made.run(x, out) is out
        torch.testing.assert_close(out, y)
    return made


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("case", "precision"), at("bf16", "fp16"))
def test_models_that_convert(shelf: BlockRepository, case: str, precision: str, name: str) -> None:
    assert_fits(stored(shelf, case, name), name, precision)


@pytest.mark.parametrize("name", FURTHER)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_models_that_autocast_would_not_mend(
    shelf: BlockRepository, precision: str, name: str
) -> None:
    assert_fits(stored(shelf, "pt2", name), name, precision)


@pytest.mark.parametrize("name", ["norm", "images", "decoder"])
def test_the_same_however_it_is_read_and_held(
    shelf: BlockRepository,
    name: str,
    tmp_path: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    block = stored(shelf, "pt2", name)
    made = assert_fits(block, name, "bf16")
    assert_fits(block, name, "bf16", extra={"memory_format": "channels_last"})
    x = batch(block, 3, 5)
    monkeypatch.setattr(sharing, "LEAST_BYTES", 1)
    weights = WeightFiles(tmp_path)
    for _ in range(2):
        assert torch.equal(loaded(block, "bf16", weights=weights).run(x), made.run(x))

    def unknown(_file: Any) -> None:
        raise UnknownProgram("the way onto a device")

    monkeypatch.setattr(exported, "read_program", unknown)
    assert torch.equal(loaded(block, "bf16").run(x), made.run(x))


@pytest.mark.parametrize(("case", "precision"), at("bf16", "fp16"))
def test_a_precision_that_does_not_fit_a_block_is_said(
    shelf: BlockRepository, case: str, precision: str
) -> None:
    name = "unknown" if case == "pt2" else "blends"
    block = stored(shelf, case, name)
    with pytest.raises(BlockError) as e:
        loaded(block, precision)
    assert e.value.code == "UNSUPPORTED_ENGINE" and e.value.details["field"] == "precision"
    assert e.value.where == block.info.name and precision in e.value.message
    assert "does not fit" in e.value.hint and "fp32" in e.value.hint
    # what converts reads exported programs alone
    assert ("openvino" in e.value.hint) == (case == "pt2")
    x = torch.randn(3, 8)
    torch.testing.assert_close(loaded(block, "fp32").run(x), source(name).module(x))


@pytest.mark.parametrize(("case", "precision"), at("bf16"))
def test_a_computation_that_fails_later_hints_at_the_precision(
    shelf: BlockRepository, case: str, precision: str
) -> None:
    made = loaded(stored(shelf, case, "transformer"), precision)
    with pytest.raises(BlockError) as e:
        made.run(torch.full((2, 3), 10**6))
    assert e.value.code == "BLOCK_FAILED" and "does not fit" in e.value.hint
