"""Padding: what a block promises, whether it holds, and which inputs are let in for it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from blockflow.batching.lengths import within_classes
from blockflow.core.errors import ExportError
from blockflow.core.model import BlockInfo, Contract, Padding, TensorSpec
from blockflow.repository.convert import convert_block
from blockflow.repository.echo import save_echo
from blockflow.repository.export import export_model, export_tree
from blockflow.repository.padding import check_padding, length_inputs
from blockflow.repository.repository import BlockRepository
from blockflow.repository.sources import LoadedModel, load_model
from blockflow.repository.spec_text import parse_padding
from tests.export_rig import TRACED  # pt2 takes ten times as long
from tests.padding_rig import LENGTH, VECTORS

TOKENS = TensorSpec("int64", ("rows", "length"), {"length": (1, 16)})
SMALL = {"layers": 1, "width": 8, "heads": 2, "vocabulary": 16, "max_length": 16}


@pytest.fixture
def repository(tmp_path: Path) -> BlockRepository:
    return BlockRepository(tmp_path / "blocks")


# --- the promise ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("padding", "spec", "says"),
    [
        (LENGTH, TOKENS, ""),
        (Padding("length", -3), TOKENS, ""),
        (Padding("length", -1.5), VECTORS, ""),
        (Padding("width"), TOKENS, "dynamic: length"),
        (Padding("rows"), TOKENS, "no dynamic dim"),
        (LENGTH, TensorSpec("float32", ("rows", 4)), "dynamic: none"),
        (Padding("length", 0.5), TOKENS, "no int64"),
        (Padding("length", 2**63), TOKENS, "no int64"),
        (Padding("length", -1), TensorSpec("uint8", ("rows", "length")), "no uint8"),
        (Padding("length", 2), TensorSpec("bool", ("rows", "length")), "no bool"),
        (Padding("length", float("nan")), VECTORS, "not finite"),
        (Padding("length", float("inf")), TOKENS, "not finite"),
    ],
)
def test_what_can_be_promised(padding: Padding, spec: TensorSpec, says: str) -> None:
    found = padding.problem(spec)
    assert says in found and bool(found) is bool(says)


def test_a_block_carries_its_promise() -> None:
    contract = Contract(TOKENS, TensorSpec("float32", ("rows", 3)))
    for padding in (None, Padding("length", -1)):
        info = BlockInfo("b", "1", "0" * 64, "pt2", contract, 1, 4, padding=padding)
        assert BlockInfo.from_dict(json.loads(json.dumps(info.to_dict()))) == info


def test_the_promise_as_text() -> None:
    assert parse_padding("length") == Padding("length", 0)
    assert parse_padding(" length = -1") == Padding("length", -1)
    assert parse_padding("w=0.5") == Padding("w", 0.5)
    for text in ("", "=1", "length=x", "1st=2", "length="):
        with pytest.raises(ValueError):
            parse_padding(text)


# --- export --------------------------------------------------------------------------------------


def test_the_checks_try_the_ends_and_something_between() -> None:
    def lengths(spec: TensorSpec) -> list[int]:
        return [x.shape[1] for x in length_inputs(spec, LENGTH)]

    assert lengths(TOKENS) == [1, 7, 8, 13]
    assert lengths(TensorSpec("int64", ("rows", "length"))) == [1, 7, 8, 13]
    assert lengths(TensorSpec("int64", ("rows", "length"), {"length": (20, 40)})) == [
        20,
        26,
        27,
        32,
    ]
    assert lengths(TensorSpec("int64", ("rows", "length"), {"length": (4, 4)})) == [4]


class MeanOfAll(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(dim=1)


class ByTheLongest(nn.Module):
    """Honest alone; in a batch everybody's result depends on the longest."""

    def forward(self, x: Tensor) -> Tensor:
        there = (x != 0).any(dim=2)
        return x.sum(dim=1) / there.sum(dim=1).amax().clamp(min=1)


class DividesByZero(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / x.norm(dim=(1, 2), keepdim=True) * (x[:, -1:] / x[:, -1:])


class Sum(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sum(dim=1)


class Ones(nn.Module):
    """Leaves the positions of padding at something else than zero."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 1


def model(module: nn.Module, padding: Padding | None = LENGTH, **more: Any) -> LoadedModel:
    return LoadedModel(module.eval(), "test", VECTORS, padding=padding, **more)


@pytest.mark.parametrize(
    ("module", "says"),
    [
        (MeanOfAll(), "padding length 1 to 7 changes the result by"),
        (ByTheLongest(), "length 1 to 16 beside 3 of other lengths changes"),
        (DividesByZero(), "by nan, allowed is 0.0001"),
    ],
)
def test_a_promise_that_does_not_hold(
    repository: BlockRepository, module: nn.Module, says: str
) -> None:
    with pytest.raises(ExportError) as e:
        export_model(model(module), repository, prefix="liar", format=TRACED)
    assert (e.value.code, e.value.where) == ("EXPORT_MISMATCH", "liar")
    assert says in e.value.message and "hold only 0" in e.value.hint
    assert repository.names() == []
    export_model(model(module, None), repository, prefix="liar", format=TRACED)
    assert repository.info("liar").padding is None


@pytest.mark.parametrize("off", [(0.3, 0.1), (0.1, 0.3)])
def test_the_largest_difference_is_told(off: tuple[float, float]) -> None:
    spec = TensorSpec("float32", ("rows", "length"), {"length": (1, 4)})
    xs = [torch.ones(2, n) for n in (2, 3)]
    pairs = [(x, x + by) for x, by in zip(xs, off, strict=True)]

    def differ(a: Tensor, b: Tensor) -> float:
        return float((a - b).abs().max())

    contract = Contract(spec, spec)
    worst = check_padding(lambda x: x, contract, LENGTH, pairs, differ, 0.5, "b")
    assert worst == pytest.approx(0.3)
    with pytest.raises(ExportError, match=r"changes the result by 0\.3, allowed is 0\.2"):
        check_padding(lambda x: x, contract, LENGTH, pairs, differ, 0.2, "b")


def test_every_block_that_takes_the_dim_promises_for_itself(repository: BlockRepository) -> None:
    """Behind the first block the value is 0: a worker cuts each result and pads it anew."""
    module = nn.Sequential(Ones(), Sum(), nn.Linear(2, 3))
    first = Padding("length", -1)
    report = export_model(model(module, first), repository, names=["a", "b", "c"], cuts=["1", "2"])
    assert [b.padding_error is None for b in report.blocks] == [False, False, True]
    assert (repository.info("a").padding, repository.info("b").padding) == (first, LENGTH)
    assert repository.info("c").padding is None
    form = repository.manifest("b").padding
    assert form is not None and form.error <= form.tolerance == 1e-4
    with pytest.raises(ExportError, match=r"changes the result"):  # as one block it does not hold
        export_model(model(module), repository, names=["whole"], format=TRACED)


class Tree(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.total, self.mean = nn.Identity(), Sum(), MeanOfAll()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.trunk(x)
        return self.total(y), self.mean(y)


def test_the_blocks_of_a_tree_promise_too(repository: BlockRepository) -> None:
    blocks = {"trunk": "trunk", "total": "total"}
    first = Padding("length", 3)
    export_tree(model(Tree(), first), repository, blocks=blocks, format=TRACED)
    assert (repository.info("trunk").padding, repository.info("total").padding) == (first, LENGTH)
    with pytest.raises(ExportError) as e:
        export_tree(model(Tree()), repository, blocks={**blocks, "mean": "mean"}, format=TRACED)
    assert e.value.where == "mean"


def test_the_zoos_encoders_promise(repository: BlockRepository) -> None:
    """(With a head, and in every format: test_export.py.) Half of the tokens here are padding."""
    loaded = load_model("transformer-tokens", arguments=SMALL, input_spec=TOKENS, int_below=2)
    report = export_model(loaded, repository, prefix="tokens", cuts=["norm"], format=TRACED)
    errors = [b.padding_error for b in report.blocks]
    assert all(e is not None and e <= 1e-5 for e in errors), errors
    fixed = TensorSpec("int64", ("rows", 5))
    assert load_model("transformer", arguments=SMALL, input_spec=fixed).padding is None
    with pytest.raises(ExportError) as e:
        load_model("transformer", arguments=SMALL, input_spec=TOKENS, padding=Padding("width"))
    assert e.value.code == "EXPORT_FAILED" and "dynamic: length" in e.value.message


def test_the_command_takes_a_promise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "a_padded_model.py").write_text(
        "from torch import nn\n\n\nclass Sum(nn.Module):\n"
        "    def forward(self, x):\n        return x.sum(dim=1)\n"
    )
    import typer

    from blockflow.cli.export import export

    app = typer.Typer()
    app.command("export")(export)
    args = ["a_padded_model:Sum", "--input", "float32[rows,length]", "--range", "length=1..9"]
    result = CliRunner().invoke(app, [*args, "--padding", "length"])
    assert result.exit_code == 0, result.output
    assert "may be padded: Sum" in result.stdout
    assert BlockRepository(tmp_path / "blocks").info("Sum").padding == LENGTH
    for text, code in (("none", 0), ("length=1", 2), ("width", 2), ("length=x", 2)):
        result = CliRunner().invoke(app, [*args, "--version", text[:1], "--padding", text])
        assert result.exit_code == code, result.output
    assert BlockRepository(tmp_path / "blocks").info("Sum").padding is None


# --- variants ------------------------------------------------------------------------------------


class Workbench:
    """The artifact gives its input back; so does the variant, if it is honest."""

    def __init__(self, variant: Callable[[Tensor], Tensor]) -> None:
        self._variant = variant

    def make(self, kind: str, block: BlockInfo, source: Path, samples: Any, target: Path) -> None:
        target.write_bytes(b"variant")

    @contextmanager
    def runners(
        self, kind: str | None, block: BlockInfo, file: Path
    ) -> Iterator[Mapping[str, Callable[[Tensor], Tensor]]]:
        yield {"reference": lambda x: x} if kind is None else {"engine": self._variant}


def test_a_variant_has_to_keep_the_promise(repository: BlockRepository) -> None:
    def lies(x: Tensor) -> Tensor:
        """Right for what is not padded: random floats are never 0."""
        return x + 0.1 * (x == 0).any()

    save_echo(repository, "e", VECTORS, padding=LENGTH)
    assert convert_block(repository, "e", "onnx", Workbench(lambda x: x)).errors == {"engine": 0}
    with pytest.raises(ExportError) as e:
        convert_block(repository, "e", "onnx", Workbench(lies))
    assert e.value.code == "EXPORT_MISMATCH" and "engine does not keep" in e.value.message
    save_echo(repository, "e", VECTORS)
    assert convert_block(repository, "e", "onnx", Workbench(lies)).errors == {"engine": 0}


# --- at the door ---------------------------------------------------------------------------------


def block(name: str, taken: str, gives: str, padding: str | None) -> BlockInfo:
    spec = TensorSpec("float32", ("rows", taken), {taken: (1, 512)})
    out = TensorSpec("float32", ("rows", gives) if gives == taken else ("rows", 4))
    promise = None if padding is None else Padding(padding)
    return BlockInfo(name, "1", "0" * 64, "pt2", Contract(spec, out), 0, 0, padding=promise)


def test_no_input_is_longer_than_the_last_class() -> None:
    infos = {
        "a": block("a", "length", "length", "length"),
        "b": block("b", "n", "n", "n"),
        "c": block("c", "m", "4", None),
    }
    whole = Contract(infos["a"].contract.input, TensorSpec("float32", ("rows", "length")))

    def longest(**policies: Mapping[str, Any]) -> int:
        given_ = {name: policies.get(name, {"policy": "none"}) for name in infos}
        got = within_classes(whole, [["a", "b", "c"]], infos, given_)
        assert (
            got.output.ranges.get("length", got.input.ranges["length"])
            == (got.input.ranges["length"])
        )
        return got.input.ranges["length"][1]

    def classes(*lengths: int) -> dict[str, Any]:
        return {"policy": "window", "classes": list(lengths)}

    assert longest() == 512
    assert longest(a=classes(8, 64)) == 64
    assert longest(a=classes(8, 1024)) == 512
    assert longest(a=classes(8, 64), b=classes(32)) == 32, "whatever a block calls the dim"
    assert longest(b=classes(32)) == 32
    assert longest(c=classes(16)) == 512, "without a promise classes count for nothing"
