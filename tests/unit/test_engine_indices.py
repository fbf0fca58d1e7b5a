"""Which integers lead out of a table the exported graph says, and the engines check."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from blockflow.core.errors import BlockError, ExportError
from blockflow.core.model import BlockInfo, Contract, Padding, TensorSpec
from blockflow.engine.base import Engine, EngineOptions
from blockflow.engine.compiled import CompiledEngine, Package
from blockflow.engine.indices import (
    Indices,
    from_text,
    indices_of,
    refuse_outside,
    span_within,
    to_text,
)
from blockflow.engine.registry import create_engine
from blockflow.engine.workshop import EngineWorkshop
from blockflow.repository.artifact import export_program
from blockflow.repository.convert import convert_block
from blockflow.repository.export import export_model
from blockflow.repository.repository import BlockRepository
from blockflow.repository.sources import LoadedModel
from tests import export_rig

repo = export_rig.repo

WORDS = 50
TOKENS = TensorSpec("int64", ("rows", 4))
FLOATS = TensorSpec("float32", ("rows", 4))
WIDE = TensorSpec("float32", ("rows", "n"))


class Looks(nn.Module):
    """``what(table, x)``, with a table of 50 rows."""

    def __init__(self, what: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.what, self.table = what, nn.Embedding(WORDS, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.what(self.table.weight, x)


def _embed(table: Tensor, x: Tensor) -> Tensor:
    return nn.functional.embedding(x, table)


def _positions(table: Tensor, x: Tensor) -> Tensor:
    return _embed(table, (x != 0).long().cumsum(1))


def _branches(table: Tensor, x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda t, i: t[i], lambda t, i: t[i] * 2, (table, x))


def _shifted(table: Tensor, x: Tensor) -> Tensor:
    """As decoders do it: written through views of what is looked up by."""
    moved = x.new_zeros(x.shape)
    moved[:, 1:] = x[:, :-1]
    moved[:, 0] = 1
    return _embed(table, moved)


def _written(x: Tensor) -> Tensor:
    x.view(-1).add_(5)
    return x


def _filled(x: Tensor, value: int) -> Tensor:
    x[:, :1] = value
    return x


def _kinds(x: Tensor) -> list[Tensor]:
    """Of tokens, as models for pairs of sentences know them."""
    first, later = torch.zeros_like(x), x > 9
    return [
        first,
        torch.full(x.shape, 3),
        first.masked_fill(later, 1),
        torch.where(later, 1, 0),
        _filled(x.new_zeros(x.shape), 1),
    ]


def _counted(x: Tensor) -> Tensor:
    x.view(-1).cumsum_(0)
    return x


def _places(x: Tensor, count: int) -> Tensor:
    return torch.bucketize(x, torch.arange(float(count)))


_IDS = torch.arange(4)[None]
WHOLE = Indices((0, WORDS - 1), "")
FREE = Indices(None, "")
LONG = Indices(None, "embedding")


@pytest.mark.parametrize(
    ("what", "spec", "found"),
    [
        (_embed, TOKENS, WHOLE),
        (lambda t, x: t[x], TOKENS, Indices((-WORDS, WORDS - 1), "")),
        (lambda t, x: t.index_select(0, x.reshape(-1)).view(-1, 32), TOKENS, WHOLE),
        (lambda t, x: _embed(t, x.int()), TOKENS, WHOLE),
        (lambda t, x: t[:8][x] + _embed(t, x), TOKENS, Indices((0, 7), "")),
        (lambda t, x: _embed(t, x) + t.T.gather(1, x[:1].expand(8, 4)).sum(), TOKENS, None),
        (lambda t, x: _embed(t, x * 3 % 50), TOKENS, FREE),
        (lambda t, x: _embed(t, x.clamp(0, 49)), TOKENS, FREE),
        (lambda t, x: _embed(t, x.clamp(0, 49).reshape(-1)).view(-1, 32), TOKENS, FREE),
        (lambda t, x: _embed(t, x % 51), TOKENS, Indices(None, "embedding")),
        (lambda t, x: _embed(t, x.clamp(0, 49) + 1), TOKENS, Indices(None, "embedding")),
        (lambda t, x: _embed(t, x.clamp(min=0)), TOKENS, Indices(None, "embedding")),
        (lambda t, x: _embed(t, x[:, 0]), TOKENS, Indices(None, "embedding")),
        (lambda t, x: _embed(t, x.float().long()), TOKENS, Indices(None, "embedding")),
        (_positions, TOKENS, FREE),
        (_shifted, TOKENS, Indices(None, "embedding")),
        (lambda t, x: _embed(t, _written(x.clone())), TOKENS, Indices(None, "embedding")),
        (lambda t, x: _embed(t, _written(x.clamp(0, 49))), TOKENS, Indices(None, "embedding")),
        (lambda t, x: _written(x + 1) @ _embed(t, x).long(), TOKENS, WHOLE),
        (lambda t, x: _embed(t, (x > 0).logical_or_(x < 9).long()), TOKENS, FREE),
        (lambda t, x: _embed(t, x.sign()), TOKENS, Indices(None, "embedding")),
        (lambda t, x: t[x.sign()], TOKENS, FREE),
        (lambda t, x: _embed(t, _places(x, 49)), FLOATS, FREE),
        (lambda t, x: _embed(t, _places(x, 50)), FLOATS, Indices(None, "embedding")),
        (lambda t, x: _embed(t, x.argmax(1)), FLOATS, FREE),
        (lambda t, x: _embed(t, x.topk(2)[1]), FLOATS, FREE),
        (lambda t, x: _embed(t, x.topk(2)[0].long()), FLOATS, Indices(None, "embedding")),
        # a NaN is not clamped
        (lambda t, x: _embed(t, x.clamp(0, 9).long()), FLOATS, Indices(None, "embedding")),
        (lambda t, x: _embed(t, x.long().clamp(0, 9)), FLOATS, FREE),
        (lambda t, x: _embed(t, (x > 0).long().expand_as(x * 2)), TOKENS, FREE),
        (lambda t, x: _embed(t, torch.zeros(x.shape[0], dtype=torch.int64)), FLOATS, FREE),
        (lambda t, x: _embed(t, _IDS[:, : x.shape[1]].expand(x.shape)), FLOATS, FREE),
        (lambda t, x: _embed(t, x[:, :1].expand(x.shape)), TOKENS, Indices(None, "embedding")),
        (lambda t, x: _embed(t, torch.full(x.shape, 3)), WIDE, FREE),
        # a table may be shorter than the input
        (lambda t, x: _embed(t, torch.full((1,), x.shape[1])) * x[..., None], WIDE, LONG),
        (lambda t, x: _embed(t, x.new_full((1,), x.shape[1]).long()) * x[..., None], WIDE, LONG),
        (_branches, TOKENS, Indices(None, "cond")),
        (lambda t, x: x.float() @ t[:4], TOKENS, FREE),
    ],
)
def test_what_looks_up_by_the_input(
    what: Callable[[Tensor, Tensor], Tensor], spec: TensorSpec, found: Indices | None
) -> None:
    example = torch.zeros(3, 4, dtype=getattr(torch, spec.dtype))
    with torch.no_grad():
        asked = indices_of(export_program(Looks(what).eval(), spec, example))
    if found is None:  # a part of the input counts as computed of it
        assert asked.computed and asked.span == (0, WORDS - 1)
    else:
        assert (asked.span, asked.computed) == (found.span, found.computed)


@pytest.mark.parametrize(
    ("what", "by_length"),
    [
        (_embed, ""),
        (lambda t, x: _embed(t, x.clamp(0, 9)), ""),
        (lambda t, x: _embed(t, x) + _embed(t, torch.arange(x.shape[1])), "embedding"),
        (_positions, "embedding"),
        (lambda t, x: t[x.argmax(1)], "index"),
        (lambda t, x: t[torch.stack((x, -x), 2).argmax(2)] + _embed(t, (x > 0).long()), ""),
        (lambda t, x: t[torch.stack((x, -x), 2).topk(1)[1]], ""),
        (lambda t, x: t[x.topk(1)[1]], "index"),
        (lambda t, x: x[torch.arange(x.shape[0]), x.argmax(1)], ""),  # as long as the input
        (lambda t, x: sum(_embed(t, kind) for kind in _kinds(x)), ""),
        (lambda t, x: _embed(t, _filled(torch.zeros_like(x), x.shape[1])), "embedding"),
        (lambda t, x: _embed(t, _counted(torch.ones_like(x))), "embedding"),
    ],
)
def test_what_looks_up_by_the_inputs_length(
    what: Callable[[Tensor, Tensor], Tensor], by_length: str
) -> None:
    """Which no check of integers bounds."""
    spec, example = TensorSpec("int64", ("rows", "n")), torch.zeros(3, 4, dtype=torch.int64)
    assert indices_of(export_program(Looks(what).eval(), spec, example)).by_length == by_length


def test_what_the_manifest_says_is_for_computed_indices() -> None:
    computed = Indices((-9, 99), "embedding")
    contract = Contract(TOKENS, TOKENS)

    def within(found: Indices, below: int | None, pad: int | None = None) -> object:
        padding = None if pad is None else Padding("length", pad)
        more: dict[str, Any] = {"padding": padding, "int_below": below}
        return span_within(found, BlockInfo("b", "1", "0" * 64, "pt2", contract, 0, 0, **more))

    assert within(computed, 50) == (0, 49) and within(computed, None) == (-9, 99)
    assert within(WHOLE, 2) == WHOLE.span  # the table says it better
    assert within(Indices(None, "index"), 50) == (0, 49) and within(FREE, 50) is None
    assert within(computed, 50, pad=-1) == (-1, 49) and within(computed, 50, pad=50) == (0, 50)


def test_a_file_says_it_in_its_metadata() -> None:
    for span in (None, (0, 49), (-50, 49)):
        assert from_text(to_text(span)) == span
    assert from_text(None) is None and from_text("") is None
    refuse_outside(torch.tensor([-(2**40), 5]), None)
    refuse_outside(torch.empty(2, 0, dtype=torch.int64), (0, 1))
    with pytest.raises(IndexError, match="-3, the block takes 0 to 49"):
        refuse_outside(torch.tensor([49, -3]), (0, 49))
    for odd in (float("nan"), float("inf")):  # becomes an integer in the block
        with pytest.raises(IndexError, match="not finite"):
            refuse_outside(torch.tensor([1.0, odd]), (0, 49))


class Encoder(nn.Module):
    def __init__(self, what: Callable[[Tensor], Tensor] = torch.clone) -> None:
        super().__init__()
        self.what, self.table, self.out = what, nn.Embedding(WORDS, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.table(self.what(x)).sum(1))


def _stored(
    repo: BlockRepository, what: Callable[[Tensor], Tensor], spec: TensorSpec, below: int | None
) -> None:
    model = LoadedModel(Encoder(what).eval(), "t", spec, int_below=below)
    export_model(model, repo, prefix="m")


def _loaded(repo: BlockRepository, engine: str) -> Engine:
    made = create_engine(repo.info("m"), EngineOptions(), engine)
    with repo.artifact("m", variant=made.variant) as path:
        made.load(path)
    made.warm_up()
    return made


def _takes_none_out_of_the_table(made: Engine) -> None:
    fine = torch.tensor([[0, 1, WORDS - 1, 7]])
    before = made.run(fine)
    for wrong in (WORDS, -1, 2**40, -(2**63)):
        with pytest.raises(BlockError) as e:
            made.run(torch.tensor([[3, 4, wrong, 5]]))
        assert e.value.code == "BLOCK_FAILED", wrong
    assert torch.equal(made.run(fine), before)


@pytest.mark.parametrize("engine", ["exported", "onnxruntime", "openvino"])
@pytest.mark.parametrize("computed", [False, True])
def test_no_engine_takes_an_index_out_of_the_table(
    repo: BlockRepository, engine: str, computed: bool
) -> None:
    """``exported`` says how it is to be."""
    native = engine != "exported"
    if native:
        pytest.importorskip("onnxscript")
        pytest.importorskip("onnxruntime" if engine == "onnxruntime" else "openvino")
    _stored(repo, (lambda x: x + 0) if computed else torch.clone, TOKENS, WORDS)
    if native:
        convert_block(repo, "m", "onnx", EngineWorkshop())
    made = _loaded(repo, engine)
    _takes_none_out_of_the_table(made)
    made.close()


class Code:
    """Of the loader of a package, whose code would end this process."""

    def __init__(self, metadata: Mapping[str, str]) -> None:
        self._metadata = metadata

    def get_metadata(self) -> Mapping[str, str]:
        return self._metadata

    def boxed_run(self, inputs: list[Tensor]) -> list[Tensor]:
        (x,) = inputs
        if int(x.min()) < 0 or int(x.max()) >= WORDS:
            raise SystemExit("out of the table")
        return [torch.zeros(len(x), 3)]


def test_machine_code_gets_no_index_out_of_the_table(
    repo: BlockRepository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compilation takes half a minute: here it is only told the bound, and that is read again.
    (tests/contract reads what a compiled package has of that.)"""
    _stored(repo, lambda x: x + 0, TOKENS, WORDS)
    asked: dict[str, Any] = {}

    def package(_program: object, *, package_path: str, inductor_configs: dict[str, Any]) -> None:
        asked.update(inductor_configs)
        Path(package_path).touch()

    monkeypatch.setattr("torch._inductor.aoti_compile_and_package", package)
    monkeypatch.setenv("CXX", sys.executable)
    made = CompiledEngine(repo.info("m"), EngineOptions())
    with repo.artifact("m") as source:
        EngineWorkshop().make("aoti", made.block, source, [], tmp_path / "package")
    assert not asked["aot_inductor.precompile_headers"], "they would lie in a folder of anybody's"
    code = Code(asked["aot_inductor.metadata"])
    monkeypatch.setattr(made, "_load_module", lambda _: Package(code, made.copied))
    made.load(tmp_path / "package")
    _takes_none_out_of_the_table(made)


@pytest.mark.parametrize(
    ("what", "spec", "hint"),
    [
        (lambda x: x * 2 - 2 * x + x, TOKENS, "--int-below"),
        (lambda x: x.clamp(0, 9).long(), FLOATS, "clamp"),
        (lambda x: (x > 0).cumsum(1), TensorSpec("int64", ("rows", "n")), "--range"),
    ],
)
def test_machine_code_needs_a_bound(
    repo: BlockRepository, what: Callable[[Tensor], Tensor], spec: TensorSpec, hint: str
) -> None:
    _stored(repo, what, spec, None)
    with pytest.raises(ExportError) as e:
        convert_block(repo, "m", "aoti", EngineWorkshop())
    assert e.value.code == "EXPORT_FAILED" and hint in e.value.hint
    assert "embedding" in e.value.message and not repo.info("m").variants


def test_a_block_says_what_it_was_exported_for(repo: BlockRepository, tmp_path: Path) -> None:
    _stored(repo, torch.clone, TOKENS, WORDS)
    info = repo.info("m")
    assert info.int_below == WORDS and type(info).from_dict(info.to_dict()) == info
