"""Results written straight into the slot: the same numbers, for every operator that can."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from blockflow.engine.lean import lean, writer


class Net(nn.Module):
    """A linear layer and whatever ``end`` makes of its result and the input."""

    def __init__(self, end: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.end = end

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.layer(x), x)


def exported(model: nn.Module, rows: int = 3) -> nn.Module:
    example = (torch.randn(rows, 6),)
    dynamic = ({0: torch.export.Dim("rows", min=1, max=64)},)
    program = torch.export.export(model.eval(), example, dynamic_shapes=dynamic)
    return lean(program.module(check_guards=False))


WRITTEN = {
    "linear": lambda y, x: y,
    "relu": lambda y, x: torch.relu(y),
    "relu in place": lambda y, x: y.relu_(),
    "residual": lambda y, x: torch.relu(y + x),
    "residual in place": lambda y, x: y.add_(x).relu_(),
    "sum used twice": lambda y, x: torch.relu((z := y + x) + z),
    "add": lambda y, x: y + x,
    "add scaled": lambda y, x: torch.add(y, x, alpha=2),
    "mul": lambda y, x: y * x,
    "gelu": lambda y, x: nn.functional.gelu(y),
    "sigmoid": lambda y, x: torch.sigmoid(y),
    "tanh": lambda y, x: torch.tanh(y),
    "cat": lambda y, x: torch.cat([y, x], 1),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_written_results_are_the_same(name: str) -> None:
    plain = exported(Net(WRITTEN[name]))
    into = writer(plain)
    assert into is not None
    for rows in (1, 3, 8):
        x = torch.randn(rows, 6)
        kept = x.clone()
        with torch.inference_mode():
            y = plain(x)
            out = torch.full_like(y, 7.0)
            place = out.data_ptr()
            into(x, out)
        assert torch.equal(out, y)
        assert out.data_ptr() == place
        assert torch.equal(x, kept)


@pytest.mark.parametrize("name", ["relu", "residual"])
def test_not_a_number_stays_one(name: str) -> None:
    into = writer(exported(Net(WRITTEN[name])))
    assert into is not None
    x, out = torch.full((2, 6), float("nan")), torch.zeros(2, 6)
    with torch.inference_mode():
        into(x, out)
    assert out.isnan().all()


@pytest.mark.parametrize(
    "end", [lambda y, x: torch.softmax(y, 1), lambda y, x: y.reshape(-1, 3, 2)], ids=["op", "view"]
)
def test_other_ends_have_no_such_form(end: Callable[[Tensor, Tensor], Tensor]) -> None:
    assert writer(exported(Net(end))) is None


def test_weights_are_shared() -> None:
    plain = exported(Net(WRITTEN["relu"]))
    into = writer(plain)
    assert into is not None
    assert {t.data_ptr() for t in plain.buffers()} == {t.data_ptr() for t in into.buffers()}
