"""Results written straight into the slot: the same numbers, for every operator that can."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from blockflow.core.errors import ExportError
from blockflow.core.model import TensorSpec
from blockflow.engine import lean as lean_module
from blockflow.engine.base import EngineOptions
from blockflow.engine.lean import lean, writer
from blockflow.engine.registry import create_engine
from blockflow.engine.workshop import EngineWorkshop
from blockflow.repository.export import export_model
from blockflow.repository.repository import BlockRepository
from blockflow.repository.sources import LoadedModel


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


# --- memory that has several names --------------------------------------------------------------


def view_is_changed_after_it(y: Tensor, x: Tensor) -> Tensor:
    first = y[:, :1]
    y += x
    first *= 10
    return y


def input_of_the_sum_is_changed_before_the_relu(y: Tensor, x: Tensor) -> Tensor:
    doubled = y * 2
    total = doubled + y
    doubled.zero_()
    return torch.relu(total)


def view_is_changed_between_sum_and_relu(y: Tensor, x: Tensor) -> Tensor:
    part = y[:, :3]
    total = y * x
    part += 1
    return total.relu_()


def changed_before_all_of_it(y: Tensor, x: Tensor) -> Tensor:
    y[:, :1].zero_()
    return torch.relu(y + x)


CHANGED = {
    "the result by a view": view_is_changed_after_it,
    "what is summed": input_of_the_sum_is_changed_before_the_relu,
    "what is multiplied, by a view": view_is_changed_between_sum_and_relu,
    "what is summed, earlier": changed_before_all_of_it,
}


@pytest.mark.parametrize("name", CHANGED)
def test_what_is_written_by_another_name_is_in_the_slot_too(name: str, tmp_path: Path) -> None:
    model = Net(CHANGED[name]).eval()
    repository = BlockRepository(tmp_path)
    loaded = LoadedModel(model, "net", TensorSpec("float32", ("rows", 6)))
    export_model(loaded, repository, names=("net",))
    engine = create_engine(repository.info("net"), EngineOptions())
    with repository.artifact("net") as path:
        engine.load(path)
    x = torch.randn(3, 6)
    with torch.no_grad():
        expected = model(x.clone())
    plain, out = engine.run(x), engine.run(x, torch.full((3, 6), 7.0))
    torch.testing.assert_close(plain, expected)
    torch.testing.assert_close(out, expected)
    engine.close()


@pytest.mark.parametrize("name", CHANGED)
def test_a_write_after_the_last_operator_is_no_such_form(name: str) -> None:
    into = writer(exported(Net(CHANGED[name])))
    assert (into is None) == (CHANGED[name] is view_is_changed_after_it)


def test_an_export_looks_at_what_is_written_into_the_slot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever else may be wrong there: a worker's results come that way."""
    monkeypatch.setattr(lean_module, "_is_written_after", lambda *_: False)
    model = Net(view_is_changed_after_it).eval()
    loaded = LoadedModel(model, "net", TensorSpec("float32", ("rows", 6)))
    repository = BlockRepository(tmp_path)
    serving = partial(EngineWorkshop().runners, None)
    with pytest.raises(ExportError) as e:
        export_model(loaded, repository, names=("net",), serving=serving)
    assert e.value.code == "EXPORT_MISMATCH"
    assert "the engine that is to run the block differs" in e.value.message
