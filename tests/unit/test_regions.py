"""What a model does between its named blocks is in one of them, as its graph tells."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
from tests.unfold_rig import TOKENS, WORDS, Decoder, Padded

repo = export_rig.repo

MAPS = TensorSpec("float32", ("rows", 3, 4, 4))
BLOCKS = {"t": "trunk", "one": "a", "two": "b"}

Way = Callable[[Any, Tensor], Any]


class Maps(nn.Module):
    """float32[rows, 3, 4, 4] -> a trunk of maps, heads on vectors; ``way`` is the forward."""

    def __init__(self, way: Way) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Conv2d(3, 8, 3, padding=1)
        self.neck, self.drop = nn.Linear(8, 8), nn.Dropout()
        self.a, self.b = nn.Linear(8, 3), nn.Linear(8, 2)
        self.maps, self.pairs = nn.Conv2d(8, 2, 1), nn.Bilinear(8, 8, 2)
        self.way = way

    def forward(self, x: Tensor) -> Any:
        return self.way(self, x)


def exported(
    repo: BlockRepository, way: Way, blocks: Mapping[str, str] = BLOCKS, format: str = TRACED
) -> ExportReport:
    """The export compares each path with what the model gives at its end."""
    loaded = LoadedModel(Maps(way).eval(), "maps", MAPS)
    return export_tree(loaded, repo, blocks=blocks, format=format)


def refused(repo: BlockRepository, way: Way, blocks: Mapping[str, str] = BLOCKS) -> ExportError:
    with pytest.raises(ExportError) as e:
        exported(repo, way, blocks)
    assert e.value.code == "NOT_SPLITTABLE"
    assert repo.names() == []
    return e.value


def parts(report: ExportReport) -> dict[str, str]:
    return {block.name: block.part for block in report.blocks}


def given(repo: BlockRepository, name: str) -> tuple[int | str, ...]:
    return repo.info(name).contract.output.dims


def pools(m: Any, x: Tensor) -> Any:
    h = m.drop(m.trunk(x / 2).relu_().mean((2, 3)))
    return {"a": m.a(h), "b": m.b(input=h)}


def test_what_all_heads_need_is_in_the_trunk(repo: BlockRepository) -> None:
    report = exported(repo, pools)
    assert set(report.paths) == {("t", "one"), ("t", "two")}
    assert given(repo, "t") == ("rows", 8)
    assert parts(report) == {"t": "..trunk..", "one": "a", "two": "b"}
    assert report.partial == ()


def test_what_one_head_needs_is_in_that_head(repo: BlockRepository) -> None:
    def way(m: Any, x: Tensor) -> Any:
        h = m.trunk(x)
        return m.a(m.neck(h.mean((2, 3)))), m.b(h.amax((2, 3))), m.maps(h)

    report = exported(repo, way, {**BLOCKS, "maps": "maps"})
    assert given(repo, "t") == ("rows", 8, 4, 4)
    assert parts(report) == {"t": "trunk", "one": "..a", "two": "..b", "maps": "maps"}
    neck = 8 * 8 + 8
    assert repo.manifest("one").parameters == neck + 8 * 3 + 3
    assert repo.manifest("two").parameters == 8 * 2 + 2


def test_parameters_are_in_one_block(repo: BlockRepository) -> None:
    def way(m: Any, x: Tensor) -> Any:
        h = m.trunk(x)
        v = m.neck(h.mean((2, 3)))
        return m.a(v), m.b(v), m.maps(h)

    error = refused(repo, way, {**BLOCKS, "maps": "maps"})
    assert error.message == "neck has parameters, and both blocks 'one' and 'two' need it"
    assert "a block of its own" in error.hint
    report = exported(repo, way, {**BLOCKS, "maps": "maps", "neck": "neck"})
    assert ("t", "neck", "two") in report.paths and ("t", "maps") in report.paths


def test_a_tensor_that_goes_in_twice_is_one(repo: BlockRepository) -> None:
    def way(m: Any, x: Tensor) -> Any:
        h = m.trunk(x).mean((2, 3))
        return m.pairs(h, h)

    assert exported(repo, way, {"t": "trunk", "p": "pairs"}).paths == (("t", "p"),)


def test_two_trunks_on_one_input(repo: BlockRepository) -> None:
    def way(m: Any, x: Tensor) -> Any:
        x = (x - 0.5) / 0.25
        return m.a(m.trunk(x).mean((2, 3))), m.b(m.neck(x.flatten(1)[:, :8]))

    report = exported(repo, way, {**BLOCKS, "n": "neck"})
    assert set(report.paths) == {("t", "one"), ("n", "two")}
    assert parts(report) == {"t": "..trunk..", "n": "..neck", "one": "a", "two": "b"}


def test_a_skip_connection_lies_within_one_block(repo: BlockRepository) -> None:
    def way(m: Any, x: Tensor) -> Any:
        v = m.trunk(x).mean((2, 3))
        return m.a(m.neck(v) + v)

    report = exported(repo, way, {"t": "trunk", "n": "neck", "one": "a"})
    assert report.paths == (("t", "n", "one"),)


@pytest.mark.parametrize(
    ("way", "blocks", "message"),
    [
        (
            lambda m, x: (m.a(v := m.trunk(x).mean((2, 3))), m.b(v + x.mean((1, 2, 3))[:, None])),
            BLOCKS,
            "blocks that follow the same block take different tensors of it: 'one' trunk, 'two' "
            "add",
        ),
        (
            lambda m, x: m.a(m.trunk(x).mean((2, 3)) + m.neck(x.flatten(1)[:, :8])),
            {"t": "trunk", "n": "neck", "one": "a"},
            "2 values cross to block 'n': ",
        ),
        (
            lambda m, x: m.pairs(m.trunk(x).mean((2, 3)), m.neck(x.flatten(1)[:, :8])),
            {"t": "trunk", "n": "neck", "p": "pairs"},
            "2 values cross to block 'p': ",
        ),
        (
            lambda m, x: m.a(m.trunk(x).permute(0, 2, 3, 1).reshape(-1, 8)),
            {"t": "trunk", "one": "a"},
            "",
        ),
    ],
)
def test_one_tensor_crosses(
    repo: BlockRepository, way: Way, blocks: dict[str, str], message: str
) -> None:
    assert refused(repo, way, blocks).message.startswith(message)


@pytest.mark.parametrize("last", ["state", "output"])
def test_of_what_a_layer_makes_the_heads_take_one(repo: BlockRepository, last: str) -> None:
    def way(m: Any, x: Tensor) -> Any:
        outputs, (state, _) = m.trunk(x.flatten(2))
        return m.a(state[-1] if last == "state" else outputs[:, -1]), m.b(outputs)

    model = Maps(way)
    model.trunk = nn.LSTM(16, 8, batch_first=True)  # type: ignore[assignment]
    loaded = LoadedModel(model.eval(), "maps", MAPS)
    if last == "output":
        assert export_tree(loaded, repo, blocks=BLOCKS, format=TRACED).paths
        return
    with pytest.raises(ExportError, match="take different tensors") as e:
        export_tree(loaded, repo, blocks=BLOCKS, format=TRACED)
    assert "outputs[:, -1]" in e.value.hint


@dataclass
class Seen:
    maps: Tensor
    means: Tensor


class Looks(nn.Module):
    def forward(self, x: Tensor) -> Seen:
        return Seen(h := x.repeat(1, 3, 1, 1)[:, :8], h.mean((2, 3)))


class Mean(nn.Module):
    def forward(self, seen: Seen) -> Tensor:
        return seen.means + seen.maps.amax((2, 3))


@pytest.mark.parametrize(
    ("way", "two", "message"),
    [
        (lambda m, o: (m.a(o.means), m.b(o.means)), "b", ""),
        (
            lambda m, o: (m.a(o.means), m.maps(o.maps)),
            "maps",
            "take different tensors of it: 'one' trunk.means, 'two' trunk.maps",
        ),
        (lambda m, o: (m.a(o.means), m.neck(o)), "neck", "submodule 'trunk' returns a Seen"),
    ],
)
def test_of_an_object_the_heads_take_one_tensor(
    repo: BlockRepository, way: Way, two: str, message: str
) -> None:
    model = Maps(lambda m, x: way(m, m.trunk(x)))
    model.trunk, model.neck = Looks(), Mean()  # type: ignore[assignment]
    blocks = {"t": "trunk", "one": "a", "two": two}
    loaded = LoadedModel(model.eval(), "maps", MAPS)
    if not message:
        assert parts(export_tree(loaded, repo, blocks=blocks, format=TRACED))["one"] == "a"
        return
    with pytest.raises(ExportError) as e:
        export_tree(loaded, repo, blocks=blocks, format=TRACED)
    assert message in e.value.message and e.value.hint


def test_a_forward_that_nothing_can_follow(repo: BlockRepository) -> None:
    def way(m: Any, x: Tensor) -> Any:
        h = m.trunk(x).mean((2, 3))
        return m.a(h + 1 if h.sum() > 0 else h)

    loaded = LoadedModel(Maps(way).eval(), "maps", MAPS)
    with pytest.raises(ExportError) as e:
        export_tree(loaded, repo, blocks={"t": "trunk", "one": "a"})
    assert e.value.message.startswith("the input of block 'one' is neither the model's input nor")
    assert "cannot be traced" in e.value.message and "nor exported" in e.value.message
    assert "in between" in e.value.hint


class Pair(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.mean((2, 3)), x


def test_a_last_block_gives_one_tensor(repo: BlockRepository) -> None:
    def way(m: Any, x: Tensor) -> Any:
        return m.a(m.pair(m.trunk(x))[0])

    for blocks, wanted in (
        ({"t": "trunk", "p": "pair"}, "submodule 'pair' returns a tuple; a last block gives one"),
        ({"t": "trunk", "p": "pair", "one": "a"}, ""),
    ):
        model = Maps(way)
        model.pair = Pair()
        loaded = LoadedModel(model.eval(), "maps", MAPS)
        if wanted:
            with pytest.raises(ExportError, match=wanted):
                export_tree(loaded, repo, blocks=blocks, format=TRACED)
        else:
            report = export_tree(loaded, repo, blocks=blocks, format=TRACED)
            assert parts(report)["p"] == "pair.."


def test_blocks_do_not_overlap(repo: BlockRepository) -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = Maps(pools)

        def forward(self, x: Tensor) -> Any:
            return self.model(x)["a"]

    loaded = LoadedModel(Inner().eval(), "inner", MAPS)
    with pytest.raises(ExportError, match="blocks 'm' and 'one' overlap"):
        export_tree(loaded, repo, blocks={"m": "model", "one": "model.a"})


class Halved(nn.Module):
    """A statement writes into its result."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        y[:, :4].mul_(0.5)
        return y


@pytest.mark.parametrize("last", [False, True])
@torch.no_grad()
def test_what_a_submodule_writes_into_its_result_is_in_it(
    repo: BlockRepository, last: bool
) -> None:
    def way(m: Any, x: Tensor) -> Any:
        if x.shape[1] > 1000:  # so that operators are what is known
            raise ValueError("too many")
        v = m.neck(m.trunk(x).mean((2, 3)))
        return v if last else m.a(v + 1)

    model = Maps(way)
    model.neck = Halved()  # type: ignore[assignment]
    loaded = LoadedModel(model.eval(), "maps", MAPS)
    blocks = {"t": "trunk", "n": "neck"} | ({} if last else {"one": "a"})
    report = export_tree(loaded, repo, blocks=blocks)
    assert report.paths == (tuple(blocks),)
    x = y = torch.randn(2, 3, 4, 4)
    for name in blocks:
        with repo.artifact(name) as file:
            y = read_artifact(file, "pt2")(y)
    torch.testing.assert_close(y, model(x))


def test_nothing_is_made_of_what_nobody_uses(repo: BlockRepository) -> None:
    def way(m: Any, x: Tensor) -> Any:
        if x.shape[1] > 1000:
            raise ValueError("too many")
        v = m.trunk(x).mean((2, 3))
        m.neck(v)
        return m.a(v)

    blocks = {"t": "trunk", "n": "neck", "one": "a"}
    model = Maps(way)
    model.neck = Halved()  # type: ignore[assignment]
    with pytest.raises(ExportError) as e:
        export_tree(LoadedModel(model.eval(), "maps", MAPS), repo, blocks=blocks)
    assert e.value.message == "the model uses nothing of what submodule 'neck' gives"


class Tagger(nn.Module):
    """A library's decoder as the trunk of two heads, which it serves as an object."""

    def __init__(self, decoder: type[Decoder] = Decoder, looks: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.decoder, self.looks = decoder(layers=2), looks
        self.tag, self.whole = nn.Linear(8, 3), nn.Linear(8, 2)

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        if self.looks and tokens.shape[1] > 1000:
            raise ValueError("too long")
        hidden = self.decoder(tokens=tokens, output_hidden=True).logits
        return {"tag": self.tag(hidden), "whole": self.whole(hidden[:, -1])}


TAGGER = {"d": "decoder", "tag": "tag", "whole": "whole"}


@pytest.mark.parametrize("looks", [False, True])
@torch.no_grad()
def test_an_object_is_opened_in_the_trunk(repo: BlockRepository, looks: bool) -> None:
    """Once by calls of submodules, once by operators."""
    model = Tagger(looks=looks).eval()
    loaded = LoadedModel(model, "tagger", TOKENS, int_below=WORDS)
    report = export_tree(loaded, repo, blocks=TAGGER, cuts=["decoder.layers.1"])
    assert set(report.paths) == {("d-1", "d-2", "tag"), ("d-1", "d-2", "whole")}
    assert parts(report)["whole"] == "..whole"
    x = torch.randint(1, WORDS, (2, 5))
    found = {"": x}
    for path in report.paths:
        for name, before in zip(path, ("", *path), strict=False):
            if name not in found:
                with repo.artifact(name) as file:
                    found[name] = read_artifact(file, "pt2")(found[before])
        torch.testing.assert_close(found[path[-1]], model(x)[path[-1]])


def test_cuts_of_such_blocks_are_told_why_not(repo: BlockRepository) -> None:
    loaded = LoadedModel(Tagger(Padded, looks=True).eval(), "tagger", TOKENS, int_below=WORDS)
    with pytest.raises(ExportError, match="2 values cross the cut"):
        export_tree(loaded, repo, blocks=TAGGER, cuts=["decoder.layers.1"])
