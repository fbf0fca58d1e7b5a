"""The engine thread, with an engine that does what the test says."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from blockflow.core.errors import BlockError, SystemError_
from blockflow.core.launchspec import StageSpec
from blockflow.core.model import BlockInfo, Contract, TensorSpec
from blockflow.core.routing import merge_paths
from blockflow.engine.base import Engine, EngineOptions
from blockflow.repository.echo import save_echo
from blockflow.repository.export import export_model
from blockflow.repository.repository import BlockRepository
from blockflow.repository.sources import LoadedModel
from blockflow.tensormq.inline import InlineOutBuffer, InlineProducer
from blockflow.tensormq.views import as_torch
from blockflow.wire.data import PROBE_EPOCH, Item
from blockflow.worker import runner
from blockflow.worker.copies import InputCopies
from blockflow.worker.engines import make_engines
from blockflow.worker.failpoints import ENV, FailPoints
from blockflow.worker.runner import Runner
from blockflow.worker.stage import Stage
from blockflow.worker.ticket import Batch, Source, Ticket

SPEC = TensorSpec("float32", ("rows", 2))
INFO = BlockInfo("double", "1", "0" * 64, "test", Contract(SPEC, SPEC), 0, 0)


class Doubling(Engine):
    """Returns 2x; raises on rows that begin with 13; writes into ``out`` itself if told so."""

    zero_copy = False

    def load(self, artifact: Path) -> None:
        self.calls: list[int] = []

    def run(self, x: Any, out: Any | None = None) -> Any:
        self.calls.append(len(x))
        if (x[:, 0] == 13).any():
            raise BlockError("BLOCK_FAILED", "thirteen")
        if (x[:, 0] == 14).any():
            raise ZeroDivisionError("fourteen")
        if (x[:, 0] == 15).any():
            return x.repeat(2, 1)
        return torch.mul(x, 2, out=out) if out is not None else x * 2

    @property
    def copies_out(self) -> int:
        return 0 if self.zero_copy else 1

    def close(self) -> None:
        pass


class Bench:
    def __init__(self, zero_copy: bool) -> None:
        self.engine = Doubling(INFO, EngineOptions())
        self.engine.zero_copy = zero_copy
        self.engine.load(Path())
        self.stages = {1: Stage(StageSpec(1, INFO), self.engine)}
        self.runner = Runner(self.stages, FailPoints("", Path()))
        self.producer = InlineProducer()

    def compute(
        self, *parts: list[list[float]], slot: bool, shared: bool = False, late: int | None = None
    ) -> Batch:
        """One batch of a ticket per part; ``shared``: all of them lie in one source. The ticket
        with the key ``late`` is past its deadline when its batch begins."""
        rows = [torch.tensor(p, dtype=torch.float32) for p in parts]
        whole = Source("float32", (2,), len(parts), tensor=torch.cat(rows))
        tickets, start = [], 0
        for key, x in enumerate(rows):
            item = Item(os.urandom(16), 1, 1, merge_paths([[1]])[0], 0, len(x), 1000)
            source = whole if shared else Source("float32", (2,), 1, tensor=x)
            deadline = 0 if key == late else 2**62
            at = start if shared else 0
            tickets.append(Ticket(key, item, 1, source, at, 0, 0, 0, deadline, 0))
            start += len(x)
        batch = Batch(1, tuple(tickets))
        if slot:
            batch.out = self.producer.reserve("float32", (start, 2))
        with torch.inference_mode():
            self.runner.compute(batch)
        assert 0 < batch.compute_from_ns <= batch.compute_to_ns
        return batch


@pytest.fixture(params=[False, True], ids=["copies", "writes-out"])
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    one = Bench(request.param)
    yield one
    one.runner.close()


def rows_of(batch: Batch) -> list[list[float]]:
    if batch.out is not None:
        out = as_torch(batch.out.memory, batch.out.dtype, batch.out.dims)
        # to the bit: whatever lies in a row that has failed may be no number
        assert torch.equal(batch.result.view(torch.int32), out.view(torch.int32))
    rows: list[list[float]] = batch.result.tolist()
    return rows


def test_what_the_load_left_goes_before_the_first_forward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine's scratch memory would otherwise lie on pages that are the worker's already."""
    repository = BlockRepository(tmp_path)
    save_echo(repository, "e", SPEC)
    stages = make_engines([StageSpec(1, repository.info("e"))], "cpu", 1)
    done: list[str] = []
    now = [0]

    def takes(what: str, milliseconds: int) -> None:
        done.append(what)
        now[0] += milliseconds * 1_000_000

    engine = stages[1].engine
    monkeypatch.setattr(runner.time, "monotonic_ns", lambda: now[0])
    monkeypatch.setattr(runner, "release_load_memory", lambda: takes("released", 70))
    monkeypatch.setattr(engine, "load", lambda _: takes("loaded", 40))
    monkeypatch.setattr(engine, "warm_up", lambda _: takes("warm", 5))
    found = Runner(stages, FailPoints("", Path())).load(repository)
    assert done == ["loaded", "released", "warm"]
    # The artifact's share is what a bigger one takes longer for: no more than the load itself.
    assert found.error is None and (found.load_ms, found.warm_ms) == (40.0, 5.0)


@pytest.mark.parametrize("slot", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_a_batch_of_several(bench: Bench, slot: bool, shared: bool) -> None:
    batch = bench.compute([[1, 2]], [[3, 4], [5, 6]], slot=slot, shared=shared)
    assert rows_of(batch) == [[2, 4], [6, 8], [10, 12]]
    assert bench.engine.calls == [3] and not batch.errors
    assert batch.copies == (1 if slot and not bench.engine.zero_copy else 0)
    # rows that lie side by side are a view; others are put together: 3 rows of 2 numbers
    assert bench.runner.copied[1] == (InputCopies() if shared else InputCopies(1, 24))


def test_a_lone_request_is_read_where_it_lies(bench: Bench) -> None:
    for _ in range(3):
        bench.compute([[1, 2], [3, 4]], slot=True)
    assert bench.runner.copied[1] == InputCopies()


def test_an_input_with_strides_is_straightened_and_counted(bench: Bench) -> None:
    """What a block here has left with other strides, or a padded batch's rows, cut back."""
    x = torch.arange(4.0).view(2, 2).t()
    item = Item(os.urandom(16), 1, 1, merge_paths([[1]])[0], 0, 2, 1000)
    source = Source("float32", (2,), 1, tensor=x)
    batch = Batch(1, (Ticket(0, item, 1, source, 0, 0, 0, 0, 2**62, 0),))
    bench.runner.compute(batch)
    assert batch.result.tolist() == [[0, 4], [2, 6]]
    assert bench.runner.copied[1] == InputCopies(1, 16)


def test_what_has_failed_leaves_no_memory_to_the_collector(bench: Bench) -> None:
    """A worker of whole tensors has so many buffers; an idle one collects nothing, and stood still
    when that many requests had failed."""
    gc.disable()
    try:
        for parts in ([[13, 2]],), ([[13, 2]], [[1, 2]], [[13, 4]]):
            batch = bench.compute(*parts, slot=True)
            assert batch.errors and batch.out is not None
            bench.producer.discard(batch.out)
            del batch
            assert bench.producer.outstanding() == 0
    finally:
        gc.enable()


def test_the_readiness_probe_is_not_counted(bench: Bench) -> None:
    rows = [torch.ones(1, 2), torch.ones(2, 2)]
    tickets = []
    for key, x in enumerate(rows):
        item = Item(os.urandom(16), 1, PROBE_EPOCH, merge_paths([[1]])[0], 0, len(x), 1000)
        source = Source("float32", (2,), 1, tensor=x)
        tickets.append(Ticket(key, item, 1, source, 0, 0, 0, 0, 2**62, 0))
    bench.runner.compute(Batch(1, tuple(tickets)))
    assert bench.engine.calls == [3] and bench.runner.copied[1] == InputCopies()


def test_what_an_engine_copies_itself_is_counted() -> None:
    class Copying(Engine):
        copies_out = 0  # type: ignore[assignment]

        def load(self, artifact: Path) -> None: ...

        def run(self, x: Any, out: Any | None = None) -> Any:
            self.copied.inputs, self.copied.outputs = 1, 2
            return torch.mul(x, 2, out=out)

        def close(self) -> None: ...

    bench = Bench(True)
    bench.stages[1] = Stage(StageSpec(1, INFO), Copying(INFO, EngineOptions()))
    batch = bench.compute([[1, 2]], slot=True)
    assert (batch.copies, bench.runner.copied[1]) == (2, InputCopies(1, 8))


def test_a_block_of_views_costs_one_copy(tmp_path: Path) -> None:
    repository = BlockRepository(tmp_path)
    views = torch.nn.Unflatten(1, (1, 2)).eval()
    export_model(LoadedModel(views, "views", SPEC), repository, names=["v"])
    bench = Bench(False)
    stages = make_engines([StageSpec(1, repository.info("v"))], "cpu", 1)
    bench.runner = Runner(stages, FailPoints("", Path()))
    assert bench.runner.load(repository).error is None
    x = torch.tensor([[1.0, 2.0]])
    item = Item(os.urandom(16), 1, 1, merge_paths([[1]])[0], 0, 1, 1000)
    ticket = Ticket(0, item, 1, Source("float32", (2,), 1, tensor=x), 0, 0, 0, 0, 2**62, 0)
    for out in (bench.producer.reserve("float32", (1, 1, 2)), None):
        batch = Batch(1, (ticket,), out=out)
        bench.runner.compute(batch)
        assert batch.result.tolist() == [[[1.0, 2.0]]]
        assert (batch.errors, batch.copies) == ({}, 1)


@pytest.mark.parametrize("slot", [False, True])
@pytest.mark.parametrize(("value", "text"), [(13, "thirteen"), (14, "ZeroDivisionError: fourteen")])
def test_batch_mates_of_a_bad_item_are_served(
    bench: Bench, slot: bool, value: float, text: str
) -> None:
    batch = bench.compute([[1, 2]], [[value, 0]], [[5, 6]], slot=slot)
    assert list(batch.errors) == [1]
    error = batch.errors[1]
    assert error.code == "BLOCK_FAILED" and text in error.message
    rows = rows_of(batch)
    assert rows[0] == [2, 4] and rows[2] == [10, 12]
    assert bench.engine.calls == [3, 1, 1, 1]
    assert batch.forward_ns > batch.compute_from_ns, "a time-out is one forward's"
    assert bench.runner.copied[1] == InputCopies(1, 24)
    assert batch.copies == (0 if slot and bench.engine.zero_copy else 2 if slot else 1)


@pytest.mark.parametrize("slot", [False, True])
def test_alone_it_fails_alone(bench: Bench, slot: bool) -> None:
    batch = bench.compute([[13, 2]], slot=slot)
    assert batch.errors[0].code == "BLOCK_FAILED" and bench.engine.calls == [1]
    assert bench.compute([[1, 1]], slot=slot).errors == {}


def test_all_of_a_batch_fail(bench: Bench) -> None:
    assert set(bench.compute([[13, 0]], [[14, 0]], slot=False).errors) == {0, 1}


def test_what_has_expired_is_not_run_again_alone(bench: Bench) -> None:
    """The batch ran in time; when its bad item is found out, a mate's time is up."""
    batch = bench.compute([[13, 0]], [[1, 2]], [[5, 6]], slot=True, late=1)
    assert {k: e.code for k, e in batch.errors.items()} == {
        0: "BLOCK_FAILED",
        1: "DEADLINE_EXCEEDED",
    }
    assert rows_of(batch)[2] == [10, 12]
    assert bench.engine.calls == [3, 1, 1]


def test_a_result_of_other_dims_is_not_copied(bench: Bench) -> None:
    if not bench.engine.zero_copy:
        assert bench.compute([[15, 2]], slot=True).errors[0].code == "OUTPUT_MISMATCH"


def test_threads_change_for_all_blocks_or_stay(bench: Bench) -> None:
    asked: list[int] = []
    bench.engine.set_threads = asked.append  # type: ignore[method-assign]
    assert bench.runner.threads == 1
    bench.runner.set_threads(3)
    assert (asked, bench.runner.threads) == ([3], 3)

    def cannot(threads: int) -> None:
        raise BlockError("LOAD_FAILED", "the file is gone")

    bench.engine.set_threads = cannot  # type: ignore[method-assign]
    for unwanted in (2, 0):
        bench.runner.set_threads(unwanted)
        assert bench.runner.threads == 3
    assert asked == [3]
    assert rows_of(bench.compute([[1, 2]], slot=False)) == [[2, 4]]


def test_blocks_that_can_change_their_threads_change_back_with_one_that_cannot() -> None:
    """The worker's KPIs, and the plan over all workers, have one number for it."""

    class Threaded(Doubling):
        most, has = 8, 1

        def set_threads(self, threads: int) -> None:
            if threads > self.most:
                raise BlockError("LOAD_FAILED", "the file is gone")
            self.has = threads

    engines = [Threaded(INFO, EngineOptions()) for _ in range(3)]
    engines[1].most = 2
    stages = {n: Stage(StageSpec(n, INFO), e) for n, e in enumerate(engines)}
    found = Runner(stages, FailPoints("", Path()))
    for asked, has in ((2, 2), (4, 2), (1, 1)):
        found.set_threads(asked)
        assert found.threads == has
        assert [e.has for e in engines] == [has] * 3


@pytest.mark.parametrize("tickets", [1, 2])
def test_without_memory_for_the_output_the_requests_fail_and_the_worker_goes_on(
    bench: Bench, tickets: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device the output may be the framework's to allocate."""
    whole = InlineOutBuffer.tensor

    def no_memory(_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(InlineOutBuffer, "tensor", no_memory)
    batch = bench.compute(*([[float(n), 2.0]] for n in range(tickets)), slot=True)
    assert [e.code for e in batch.errors.values()] == ["NO_SPACE"] * tickets
    assert batch.result is None and bench.engine.calls == []
    monkeypatch.setattr(InlineOutBuffer, "tensor", whole)
    assert rows_of(bench.compute([[1, 2]], slot=True)) == [[2, 4]]


def test_without_memory_to_join_what_was_run_alone_all_fail(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(False)

    def no_memory(*_: Any) -> Any:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(runner, "joined", no_memory)
    batch = bench.compute([[1, 2]], [[13, 0]], slot=False)
    texts = {key: error.message for key, error in batch.errors.items()}
    assert texts == {0: "OutOfMemoryError: no memory", 1: "thirteen"}


def test_load_failure_is_an_answer(tmp_path: Path) -> None:
    bench = Bench(False)
    loaded = bench.runner.load(BlockRepository(tmp_path))  # an empty one
    assert loaded.error is not None and loaded.error.code == "UNKNOWN_BLOCK"


# --- failpoints ----------------------------------------------------------------------------------


def test_failpoints_are_read(tmp_path: Path) -> None:
    points = FailPoints("before_forward=raise:a,after_load=raise", tmp_path)
    points.hit("before_forward", "b")
    points.hit("after_output", "a")
    for name, block in (("before_forward", "a"), ("after_load", "x")):
        with pytest.raises(BlockError):
            points.hit(name, block)


@pytest.mark.parametrize("text", ["x", "nowhere=kill", "after_load=explode", "after_load"])
def test_unknown_failpoints_are_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(SystemError_):
        FailPoints(text, tmp_path)


def test_the_option_needs_the_environment(tmp_path: Path) -> None:
    specs = [StageSpec(1, INFO, options={"failpoints": "after_load=raise"})]
    FailPoints.from_environment(tmp_path, specs, {}).hit("after_load", "double")
    armed = FailPoints.from_environment(tmp_path, specs, {ENV: "options"})
    armed.hit("after_load", "other")
    with pytest.raises(BlockError):
        armed.hit("after_load", "double")
