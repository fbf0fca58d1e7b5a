"""Padding: what a block promises, whether it holds, and what a worker makes of it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from typer.testing import CliRunner

from blockflow.batching.lengths import within_classes
from blockflow.core.errors import ExportError
from blockflow.core.launchspec import StageSpec
from blockflow.core.model import BlockInfo, Contract, Padding, TensorSpec
from blockflow.core.routing import merge_paths
from blockflow.dispatcher.tensors import TensorDesk
from blockflow.engine.base import Engine, EngineOptions
from blockflow.repository.convert import convert_block
from blockflow.repository.echo import save_echo
from blockflow.repository.export import export_model, export_tree
from blockflow.repository.padding import blank, cut, length_inputs, padded
from blockflow.repository.repository import BlockRepository
from blockflow.repository.sources import LoadedModel, load_model
from blockflow.repository.spec_text import parse_padding
from blockflow.tensormq.arena import Arena
from blockflow.tensormq.channel import Consumer, Producer
from blockflow.tensormq.inline import InlineConsumer, InlineProducer
from blockflow.tensormq.shm import ShmConsumer, ShmProducer
from blockflow.tensormq.views import as_numpy, as_torch
from blockflow.wire.data import Data, Item
from blockflow.wire.tensor import TensorDesc
from blockflow.worker.failpoints import FailPoints
from blockflow.worker.parting import plan_parts
from blockflow.worker.runner import Runner
from blockflow.worker.stage import Stage
from blockflow.worker.ticket import Batch, Source, Ticket

TOKENS = TensorSpec("int64", ("rows", "length"), {"length": (1, 16)})
VECTORS = TensorSpec("float32", ("rows", "length", 2), {"length": (1, 16)})
SMALL = {"layers": 1, "width": 8, "heads": 2, "vocabulary": 16, "max_length": 16}
LENGTH = Padding("length")


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


# --- tensors -------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=50)
@given(
    parts=st.lists(
        st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=4
    ),
    more=st.tuples(st.integers(0, 2), st.integers(0, 2)),
)
def test_what_was_padded_is_cut_back(
    parts: list[tuple[int, int, int]], more: tuple[int, int]
) -> None:
    tensors = [torch.randn(dims) for dims in parts]
    shape = tuple(max(p[i + 1] for p in parts) + more[i] for i in (0, 1))
    whole = padded(tensors, shape, -7)
    assert whole.shape == (sum(p[0] for p in parts), *shape)
    assert (whole == -7).sum() == whole.numel() - sum(t.numel() for t in tensors)
    row = 0
    for t in tensors:
        mine = whole[row : row + len(t)]
        assert torch.equal(cut(mine, t.shape[1:]), t)
        blank(mine, t.shape[1:], 5)
        row += len(t)
    assert not (whole == -7).any()
    assert (whole == 5).sum() == whole.numel() - sum(t.numel() for t in tensors)


def test_the_checks_try_the_ends_and_something_between() -> None:
    def lengths(spec: TensorSpec) -> list[int]:
        return [x.shape[1] for x in length_inputs(spec, LENGTH)]

    assert lengths(TOKENS) == [1, 7, 13]
    assert lengths(TensorSpec("int64", ("rows", "length"))) == [1, 7, 13]
    assert lengths(TensorSpec("int64", ("rows", "length"), {"length": (20, 40)})) == [20]
    assert lengths(TensorSpec("int64", ("rows", "length"), {"length": (4, 4)})) == [4]


# --- export --------------------------------------------------------------------------------------


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
        (ByTheLongest(), "length 1 to 16 beside 2 of other lengths changes"),
        (DividesByZero(), "by nan, allowed is 0.0001"),
    ],
)
def test_a_promise_that_does_not_hold(
    repository: BlockRepository, module: nn.Module, says: str
) -> None:
    with pytest.raises(ExportError) as e:
        export_model(model(module), repository, prefix="liar")
    assert (e.value.code, e.value.where) == ("EXPORT_MISMATCH", "liar")
    assert says in e.value.message and "hold only 0" in e.value.hint
    assert repository.names() == []
    export_model(model(module, None), repository, prefix="liar")
    assert repository.info("liar").padding is None


def test_every_block_that_takes_the_dim_promises_for_itself(repository: BlockRepository) -> None:
    """Behind the first block the value is 0: a worker cuts each result and pads it anew."""
    module = nn.Sequential(Ones(), Sum(), nn.Linear(2, 3))
    report = export_model(model(module), repository, names=["a", "b", "c"], cuts=["1", "2"])
    assert [b.padding_error is None for b in report.blocks] == [False, False, True]
    assert repository.info("a").padding == repository.info("b").padding == LENGTH
    assert repository.info("c").padding is None
    form = repository.manifest("b").padding
    assert form is not None and form.error <= form.tolerance == 1e-4
    with pytest.raises(ExportError, match=r"changes the result"):  # as one block it does not hold
        export_model(model(module), repository, names=["whole"])


class Tree(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.total, self.mean = nn.Identity(), Sum(), MeanOfAll()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.trunk(x)
        return self.total(y), self.mean(y)


def test_the_blocks_of_a_tree_promise_too(repository: BlockRepository) -> None:
    blocks = {"trunk": "trunk", "total": "total"}
    export_tree(model(Tree(), Padding("length", 0)), repository, blocks=blocks)
    assert repository.info("trunk").padding == repository.info("total").padding == LENGTH
    with pytest.raises(ExportError) as e:
        export_tree(model(Tree()), repository, blocks={**blocks, "mean": "mean"})
    assert e.value.where == "mean"


def test_the_zoos_encoders_promise(repository: BlockRepository) -> None:
    """(With a head, and in every format: test_export.py.) Half of the tokens here are padding."""
    loaded = load_model("transformer-tokens", arguments=SMALL, input_spec=TOKENS, int_below=2)
    report = export_model(loaded, repository, prefix="tokens", cuts=["norm"])
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
    assert e.value.code == "EXPORT_MISMATCH" and "run by engine" in e.value.where
    save_echo(repository, "e", VECTORS)
    assert convert_block(repository, "e", "onnx", Workbench(lies)).errors == {"engine": 0}


# --- in the worker -------------------------------------------------------------------------------


class Adds(Engine):
    """x + 1, so that positions of padding do not stay what they were."""

    zero_copy = False

    def load(self, artifact: Path) -> None:
        self.given: list[Tensor] = []

    def run(self, x: Any, out: Any | None = None) -> Any:
        self.given.append(x)
        if (x == 13).any():
            raise ValueError("thirteen")
        return torch.add(x, 1, out=out) if out is not None else x + 1

    @property
    def copies_out(self) -> int:
        return 0 if self.zero_copy else 1

    def close(self) -> None:
        pass


class Bench:
    """Two stages in one worker, both padded along ``length`` (stage 2 with ``second``)."""

    def __init__(self, zero_copy: bool = False, second: float = 0) -> None:
        self.engines = {}
        stages = {}
        for number, value in ((1, -5), (2, second)):
            contract = Contract(VECTORS, VECTORS)
            padding = Padding("length", value)
            info = BlockInfo(f"b{number}", "1", "0" * 64, "test", contract, 0, 0, padding=padding)
            self.engines[number] = engine = Adds(info, EngineOptions())
            engine.zero_copy = zero_copy
            engine.load(Path())
            stages[number] = Stage(StageSpec(number, info), engine)
        self.stages = stages
        self.runner = Runner(stages, FailPoints("", Path()))

    def compute(self, batch: Batch, slot: bool = False) -> Batch:
        stage = self.stages[batch.stage]
        batch.cuts = stage.cuts(batch)
        if slot:
            dims = stage.output_dims("float32", (batch.rows, *batch.shape))
            batch.out = InlineProducer().reserve("float32", dims)
        with torch.inference_mode():
            self.runner.compute(batch)
        stage.meter.given(batch)
        return batch


def ticket(key: int, x: Tensor, path: tuple[int, ...] = (1, 2)) -> Ticket:
    item = Item(os.urandom(16), 1, 1, merge_paths([path])[0], 0, len(x), 1000)
    source = Source("float32", tuple(x.shape[1:]), 1, tensor=x)
    return Ticket(key, item, path[0], source, 0, 0, 0, 0, 10**12, 0)


def mixed(path: tuple[int, ...] = (1, 2)) -> list[Ticket]:
    return [ticket(k, torch.full((r, n, 2), float(k)), path) for k, (r, n) in enumerate(DIMS)]


DIMS = ((1, 3), (2, 5), (1, 3), (1, 1))
"""(rows, length) of a batch's tickets."""


@pytest.mark.parametrize("slot", [False, True])
@pytest.mark.parametrize("zero_copy", [False, True])
def test_a_padded_batch(slot: bool, zero_copy: bool) -> None:
    bench = Bench(zero_copy)
    batch = bench.compute(Batch(1, tuple(mixed()), pad_to=(5, 2)), slot)
    (given_,) = bench.engines[1].given
    assert given_.shape == (5, 5, 2) and given_[0, :, 0].tolist() == [0, 0, 0, -5, -5]
    assert batch.cuts == {0: (3, 2), 1: (5, 2), 2: (3, 2), 3: (1, 2)}
    row = 0
    for t in batch.tickets:
        rows = batch.result[row : row + t.rows]
        assert (cut(rows, t.shape) == t.key + 1).all()
        assert not rows[:, t.shape[0] :].any(), "zeros beyond: stage 2 goes on with it"
        row += t.rows
    meter = bench.stages[1].meter
    assert (meter.elements_in, meter.elements_padded) == (50, 50 - 2 * (3 + 10 + 3 + 1))
    if batch.out is not None:
        assert torch.equal(as_torch(batch.out.memory, "float32", (5, 5, 2)), batch.result)


def followers(batch: Batch) -> tuple[Ticket, ...]:
    """As the executor makes them."""
    source = Source("float32", tuple(batch.result.shape[1:]), 4, tensor=batch.result)
    _, stays = plan_parts(batch, {1, 2})
    return tuple(
        Ticket(t.key, t.item, 2, source, start, 0, 0, 0, 10**12, 0, 0, batch.cuts.get(t.key))
        for t, _, start in stays
    )


def test_a_batch_that_stays_together_is_not_padded_again() -> None:
    bench = Bench()
    first = bench.compute(Batch(1, tuple(mixed()), pad_to=(5, 2)))
    tickets = followers(first)
    assert [t.shape for t in tickets] == [(3, 2), (5, 2), (3, 2), (1, 2)]
    bench.compute(Batch(2, tickets, pad_to=(5, 2)))
    assert bench.engines[2].given[0].data_ptr() == first.result.data_ptr(), "no copy"


def test_a_block_with_another_value_gets_its_own() -> None:
    bench = Bench(second=9)
    tickets = followers(bench.compute(Batch(1, tuple(mixed()), pad_to=(5, 2))))
    bench.compute(Batch(2, tickets, pad_to=(5, 2)))
    assert bench.engines[2].given[0][0, :, 0].tolist() == [1, 1, 1, 9, 9]


def test_a_part_of_a_padded_batch_is_cut() -> None:
    """It goes on alone, with its like, or with another's longer rows."""
    bench = Bench()
    a, b, c, d = followers(bench.compute(Batch(1, tuple(mixed()), pad_to=(5, 2))))
    for tickets, pad_to, shape in (
        ((a,), (), (1, 3, 2)),
        ((b,), (), (2, 5, 2)),
        ((a, c), (), (2, 3, 2)),
        ((c, d), (3, 2), (2, 3, 2)),
        ((d, b), (5, 2), (3, 5, 2)),
        ((a, ticket(9, torch.ones(1, 7, 2), (2,))), (7, 2), (2, 7, 2)),
    ):
        bench.compute(Batch(2, tickets, pad_to=pad_to))
        x = bench.engines[2].given[-1]
        assert x.shape == shape and x.is_contiguous()
        row = 0
        for t in tickets:
            mine = x[row : row + t.rows]
            assert (cut(mine, t.shape) == (1 if t.key == 9 else t.key + 1)).all()
            assert not mine[:, t.shape[0] :].any()
            row += t.rows


@pytest.mark.parametrize("slot", [False, True])
def test_a_bad_item_of_a_padded_batch_fails_alone(slot: bool) -> None:
    bench = Bench()
    tickets = [*mixed(), ticket(4, torch.full((1, 4, 2), 13.0))]
    batch = bench.compute(Batch(1, tuple(tickets), pad_to=(5, 2)), slot)
    assert list(batch.errors) == [4] and "thirteen" in batch.errors[4].message
    row = 0
    for t in tickets[:4]:
        assert (cut(batch.result[row : row + t.rows], t.shape) == t.key + 1).all()
        row += t.rows


def test_an_output_without_the_dim_is_not_cut() -> None:
    contract = Contract(VECTORS, TensorSpec("float32", ("rows", 3)))
    info = BlockInfo("h", "1", "0" * 64, "test", contract, 0, 0, padding=LENGTH)
    stage = Stage(StageSpec(1, info), Adds(info, EngineOptions()))
    assert stage.cuts(Batch(1, tuple(mixed()), pad_to=(5, 2))) == {}


def test_rows_of_one_length_are_one_message() -> None:
    tickets = sorted(mixed((1, 7)), key=lambda t: t.shape)
    batch = Bench().compute(Batch(1, tuple(tickets), pad_to=(5, 2)))
    parts, stays = plan_parts(batch, {1})
    assert stays == []
    assert [(p.start, p.stop, p.shape, len(p.members)) for p in parts] == [
        (0, 1, (1, 2), 1),
        (1, 3, (3, 2), 2),
        (3, 5, (5, 2), 1),
    ]


class NoGrants:
    def place(self, client: bytes, part: memoryview) -> None:
        """No client has memory here."""


@pytest.mark.parametrize("by_slot", [False, True])
def test_the_dispatcher_makes_a_cut_result_contiguous(tmp_path: Path, by_slot: bool) -> None:
    """Clients get elements in row-major order, whatever the batch was padded to."""
    producer: Producer
    consumer: Consumer
    if by_slot:
        producer = ShmProducer(Arena.create(tmp_path, 11, 1 << 16, 4))
        consumer = ShmConsumer(tmp_path)
    else:
        producer, consumer = InlineProducer(), InlineConsumer()
    out = producer.reserve("float32", (3, 4, 2))
    assert out is not None
    whole = as_numpy(out.memory, "float32", (3, 4, 2))
    whole[...] = np.arange(24).reshape(3, 4, 2)
    (payload,) = producer.publish(out, [1])
    part = payload.rows(0, 3, (3, 2))
    assert part.desc.strides is not None
    desk = TensorDesk(InlineProducer(), consumer, NoGrants())  # type: ignore[arg-type]
    message = Data(11, 0, part.desc, ())
    buffer = desk.open(message, part.frame)
    result = desk.cut(buffer, 1, 2, b"client")
    buffer.release()
    assert result.tensor == TensorDesc("float32", (2, 3, 2))
    assert np.frombuffer(result.frame, np.float32).tolist() == whole[1:, :3].ravel().tolist()
    consumer.close()
    producer.close()


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
