"""Stored numbers that a lower precision does not hold: a mask's are bounded, others refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from blockflow.core.errors import BlockError
from blockflow.core.model import BlockInfo, Contract, TensorSpec
from blockflow.engine.base import EngineOptions
from blockflow.engine.exported import ExportedEngine
from blockflow.engine.torch_engine import _fitted

SPEC = TensorSpec("float32", ("rows", 4))
HALF = torch.finfo(torch.float16)
LEAST = torch.finfo(torch.float32).min
INF = float("inf")


@pytest.mark.parametrize(
    ("stored", "dtype", "kept"),
    [
        (torch.full((2, 2), -1e9).triu(1), torch.float16, HALF.min),
        (torch.full((2, 2), LEAST), torch.bfloat16, torch.finfo(torch.bfloat16).min),
        (torch.tensor([-1e9, 0.0]), torch.float16, HALF.min),  # of a vocabulary, say
        (torch.tensor(1e9), torch.float16, HALF.max),
        (torch.tensor([[0.0, -INF]]), torch.float16, -INF),
        (torch.tensor([-1e5, 0.0]), torch.float16, None),
        (torch.tensor([[1e5, 0.0]]), torch.float16, None),
        (torch.tensor([[-1e5, -2e5]]), torch.float16, None),
        (torch.tensor([[-1e5, -1e5]]), torch.float16, HALF.min),
        (torch.tensor([1e5]), torch.bfloat16, float(torch.tensor(1e5).bfloat16())),
    ],
)
def test_numbers_beyond_a_precision(stored: Tensor, dtype: torch.dtype, kept: float | None) -> None:
    made = _fitted(stored, dtype)
    if kept is None:
        assert made is None
    else:
        assert made is not None and made.dtype is dtype and kept in made.flatten().tolist()


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_a_block_of_larger_numbers_is_refused(
    monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    """Its statistics were infinite at fp16, and every answer was the same."""
    norm = nn.BatchNorm1d(4).eval()
    norm.running_var.fill_(1e9)
    block = BlockInfo("b", "1", "0" * 64, "pt2", Contract(SPEC, SPEC), 0, 0)
    made = ExportedEngine(block, EngineOptions(precision=precision))
    monkeypatch.setattr(made, "_load_module", lambda _: norm)
    if precision == "bf16":
        return made.load(Path("unused"))
    with pytest.raises(BlockError, match="numbers up to") as e:
        made.load(Path("unused"))
    assert e.value.code == "UNSUPPORTED_ENGINE" and e.value.details == {"field": "precision"}
    assert "bf16" in e.value.hint
