"""Trees: what the model computes beside its named blocks is noticed, never dropped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from blockflow.core.errors import ExportError
from blockflow.core.model import TensorSpec
from blockflow.repository.artifact import read_artifact
from blockflow.repository.export import export_tree
from blockflow.repository.report import ExportReport
from blockflow.repository.repository import BlockRepository
from blockflow.repository.sources import LoadedModel
from tests import export_rig
from tests.export_rig import TRACED

repo = export_rig.repo

BLOCKS = {"t": "trunk", "one": "a", "two": "b"}


class Heads(nn.Module):
    """Two heads on a trunk; ``way`` is the forward."""

    def __init__(self, way: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 3), nn.Linear(8, 2)
        self.relu = nn.ReLU(inplace=True)
        self.way = way

    def forward(self, x: Tensor) -> Any:
        return self.way(self, x)


def exported(
    repo: BlockRepository, way: Callable[[Any, Tensor], Any], **blocks: str
) -> tuple[Heads, ExportReport]:
    model = Heads(way).eval()
    loaded = LoadedModel(model, "heads", TensorSpec("float32", ("rows", 4)))
    # traced: what is observed of the model is so in every format, and pt2 takes ten times as long
    return model, export_tree(loaded, repo, blocks=blocks or BLOCKS, format=TRACED)


def tree(repo: BlockRepository, way: Callable[[Any, Tensor], Any], **blocks: str) -> Heads:
    return exported(repo, way, **blocks)[0]


def run(repo: BlockRepository, names: Sequence[str], x: Tensor) -> Tensor:
    for name in names:
        with repo.artifact(name) as path:
            x = read_artifact(path, TRACED)(x)
    return x


def refused(repo: BlockRepository, way: Callable[[Any, Tensor], Any], **blocks: str) -> ExportError:
    with pytest.raises(ExportError) as e:
        tree(repo, way, **blocks)
    assert e.value.code == "NOT_SPLITTABLE"
    assert repo.names() == [], "nothing is stored unless all is well"
    return e.value


def clamps(m: Any, x: Tensor) -> Any:
    x.clamp_(0, 1)
    h = m.trunk(x)
    return m.a(h), m.b(h)


def clamps_unseen(m: Any, x: Tensor) -> Any:
    x.data.clamp_(0, 1)  # torch does not count this write
    h = m.trunk(x)
    return m.a(h), m.b(h)


def clamps_what_is_large(m: Any, x: Tensor) -> Any:
    x.clamp_(max=1e6)  # no example is
    h = m.trunk(x)
    return m.a(h), m.b(h)


def rectifies(m: Any, x: Tensor) -> Any:
    h = m.trunk(m.relu(x))
    return m.a(h), m.b(h)


def between(m: Any, x: Tensor) -> Any:
    h = m.trunk(x)
    one = m.a(h)
    h += 1
    return one, m.b(h)


@pytest.mark.parametrize("way", [clamps, clamps_what_is_large, rectifies, between])
@torch.no_grad()
def test_what_is_written_between_blocks_is_in_one(
    repo: BlockRepository, way: Callable[[Any, Tensor], Any]
) -> None:
    model = tree(repo, way)
    for x in (torch.randn(16, 4), torch.randn(16, 4) * 1e8):
        for wanted, path in zip(model(x.clone()), (("t", "one"), ("t", "two")), strict=True):
            torch.testing.assert_close(run(repo, path, x), wanted)


@pytest.mark.parametrize("hidden", [False, True])
def test_blocks_called_under_autocast_are_refused(repo: BlockRepository, hidden: bool) -> None:
    """Alone they would compute with other numbers: that, and no other cause, is told."""

    def under(m: Any, x: Tensor) -> Any:
        if hidden and x.sum() > 1e9:  # nothing traces that
            x = x + 1
        with torch.autocast("cpu", torch.bfloat16):
            y = m.trunk(x)
            return m.a(y), m.b(y)

    error = refused(repo, under, **BLOCKS)
    assert "torch.autocast" in error.message


def test_what_no_trace_holds_is_refused(repo: BlockRepository) -> None:
    with pytest.raises(ExportError) as e:
        tree(repo, clamps_unseen)
    assert e.value.code == "EXPORT_MISMATCH" and repo.names() == []


def test_what_one_block_writes_into_the_tensor_of_another_is_refused(repo: BlockRepository) -> None:
    def way(m: Any, x: Tensor) -> Any:
        return m.a(h := m.trunk(x)), m.b(h)

    model = Heads(way)
    model.a = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 3))  # type: ignore[assignment]
    loaded = LoadedModel(model.eval(), "heads", TensorSpec("float32", ("rows", 4)))
    with pytest.raises(ExportError) as e:
        export_tree(loaded, repo, blocks=BLOCKS, format=TRACED)
    text = "block 'two' reads what a writes into, after it: trunk, a cross to it"
    assert e.value.message == text
    assert e.value.details["crossing"] == ["trunk", "a"]


def test_an_in_place_block_is_followed_by_what_gets_its_tensor(repo: BlockRepository) -> None:
    def way(m: Any, x: Tensor) -> Any:
        h = m.relu(m.trunk(x))
        return m.a(h), m.b(h)

    model = tree(repo, way, t="trunk", one="a", two="b", act="relu")
    x = torch.randn(16, 4)
    with torch.no_grad():
        torch.testing.assert_close(run(repo, ("t", "act", "two"), x), model(x.clone())[1])
    watched = [m for m in model.modules() if m._forward_hooks or m._forward_pre_hooks]
    assert not watched, "the model is the caller's"


@dataclass
class Answer:
    one: Tensor
    more: list[Tensor]


@pytest.mark.parametrize(
    ("end", "partial"),
    [
        (lambda a, b: (a, b), ()),
        (lambda a, b: {"a": a, "rest": [b]}, ()),
        (lambda a, b: Answer(a, [b]), ()),
        (lambda a, b: (a.softmax(-1), b), ("one",)),
        (lambda a, b: a, ("two",)),
        (lambda a, b: (a * 2).sum() + b.sum(), ("one", "two")),
        (lambda a, b: "nothing to compare with", ()),
    ],
)
def test_what_the_model_computes_after_a_last_block_is_told(
    repo: BlockRepository, end: Callable[[Tensor, Tensor], Any], partial: tuple[str, ...]
) -> None:
    def way(m: Any, x: Tensor) -> Any:
        h = m.trunk(x)
        return end(m.a(h), m.b(h))

    _, report = exported(repo, way)
    assert report.partial == partial
    assert report.to_dict()["partial"] == partial


class Called(nn.Module):
    """Of its submodules none is called once."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.heads = nn.Linear(4, 4), nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.unused = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.twice(self.twice(x))
        return self.heads[0](x) + self.heads[1](x)


@pytest.mark.parametrize(
    ("named", "why", "helps"),
    [
        ("nothing", "no submodule", "top-level submodules: twice, heads, unused"),
        ("twice", "runs 2 times per input", "without a name"),
        ("heads", "runs 0 times per input", "NAME=heads.1"),
        ("unused", "runs 0 times per input", "does not call it"),
    ],
)
def test_submodules_that_are_no_blocks(
    repo: BlockRepository, named: str, why: str, helps: str
) -> None:
    loaded = LoadedModel(Called().eval(), "called", TensorSpec("float32", ("rows", 4)))
    with pytest.raises(ExportError, match=why) as e:
        export_tree(loaded, repo, blocks={"x": named})
    assert e.value.code == "NOT_SPLITTABLE" and helps in e.value.hint
    assert repo.names() == []
