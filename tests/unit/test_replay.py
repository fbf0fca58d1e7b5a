"""Prepared runs (CUDA graphs, torch.compile) with a stand-in for the preparation."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from blockflow.core.errors import BlockError
from blockflow.core.model import BlockInfo, Contract, TensorSpec
from blockflow.engine import exported
from blockflow.engine.base import EngineOptions
from blockflow.engine.copies import RunCopies
from blockflow.engine.exported import COMPILED_FOR, ExportedEngine
from blockflow.engine.replay import Replay, compiled, graphed
from blockflow.engine.torch_engine import Forward

SPEC = TensorSpec("float32", ("rows", 2))
INFO = BlockInfo("b", "1", "0" * 64, "pt2", Contract(SPEC, SPEC), 0, 0)


class Recorder:
    """Prepares by noting the dims; what it prepares doubles, as the plain function does."""

    def __init__(self, fails: tuple[int, ...] = ()) -> None:
        self.prepared: list[tuple[int, ...]] = []
        self.replays = 0
        self._fails = fails

    def __call__(self, forward: Forward, example: Tensor) -> Forward:
        self.prepared.append(tuple(example.shape))
        if len(example) in self._fails:
            raise RuntimeError("operation not permitted when stream is capturing")

        def replay(x: Tensor) -> Tensor:
            self.replays += 1
            return forward(x)

        return replay


def made(recorder: Recorder, most: int = 3, tries: int = 1) -> Replay:
    return Replay("test", lambda x: x * 2, recorder, lambda x: tuple(x.shape), most, tries)


def test_one_preparation_per_dims() -> None:
    recorder = Recorder()
    run = made(recorder)
    for rows in (1, 3, 1, 3, 1):
        x = torch.randn(rows, 2)
        assert torch.equal(run(x), x * 2)
    assert recorder.prepared == [(1, 2), (3, 2)]
    assert recorder.replays == 5


def test_a_failed_preparation_runs_plainly_and_is_not_tried_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    recorder = Recorder(fails=(2,))
    run = made(recorder)
    with caplog.at_level(logging.WARNING, "blockflow.engine"):
        for _ in range(3):
            assert torch.equal(run(torch.ones(2, 2)), torch.full((2, 2), 2.0))
    assert recorder.prepared == [(2, 2)] and recorder.replays == 0
    assert len(caplog.records) == 1 and "stream is capturing" in caplog.text
    run(torch.ones(1, 2))
    assert recorder.replays == 1


def test_a_failed_preparation_leaves_none_of_its_tensors(caplog: pytest.LogCaptureFixture) -> None:
    """On a GPU they are megabytes; whoever handles the log may keep its records."""
    seen: list[weakref.ref[Tensor]] = []

    def fails(forward: Forward, example: Tensor) -> Forward:
        given = example.clone()
        seen.append(weakref.ref(given))
        raise RuntimeError("operation not permitted when stream is capturing")

    run = Replay("test", lambda x: x * 2, fails, lambda x: tuple(x.shape), 3)
    with caplog.at_level(logging.WARNING, "blockflow.engine"):
        run(torch.ones(2, 2))
    assert caplog.records and [kept() for kept in seen] == [None]


def test_what_may_have_been_chance_is_tried_again() -> None:
    recorder = Recorder(fails=(2,))
    run = made(recorder, tries=3)
    for _ in range(5):
        assert torch.equal(run(torch.ones(2, 2)), torch.full((2, 2), 2.0))
    assert recorder.prepared == [(2, 2)] * 3


def test_the_number_kept_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder()
    run = made(recorder, most=2)
    with caplog.at_level(logging.WARNING, "blockflow.engine"):
        for rows in (1, 2, 3, 4, 3):
            assert run(torch.ones(rows, 2)).shape == (rows, 2)
    assert recorder.prepared == [(1, 2), (2, 2)]
    assert len(caplog.records) == 1 and "2 are kept" in caplog.text


def test_without_a_gpu_both_fall_back() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has one")
    x = torch.ones(2, 2)
    assert torch.equal(graphed(lambda x: x * 2, RunCopies())(x), x * 2)


class Device:
    """What torch's own ``torch.cuda.graph`` calls, with one thread's current stream; capturing is
    ended by ``end``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, end: Callable[[], None]) -> None:
        self.current: object = "own"
        self.pools: list[str] = []
        device = self

        class Stream:
            def wait_stream(self, other: object) -> None: ...

        class Entered:
            def __init__(self, stream: object) -> None:
                self._stream = stream

            def __enter__(self) -> None:
                self._before, device.current = device.current, self._stream

            def __exit__(self, *_: object) -> None:
                device.current = self._before

        class Graph:
            def capture_begin(self, *pool: object, **_: object) -> None:
                assert pool == ((0, 7),)

            def capture_end(self) -> None:
                end()

            def replay(self) -> None: ...

        self.current = Stream()
        cuda = torch.cuda
        for name, value in {
            "Stream": Stream,
            "current_stream": lambda: self.current,
            "set_stream": lambda stream: setattr(self, "current", stream),
            "stream": Entered,
            "synchronize": lambda: None,
            "empty_cache": lambda: None,
            "current_device": lambda: 3,
            "graph_pool_handle": lambda: (0, 7),
            "CUDAGraph": Graph,
        }.items():
            monkeypatch.setattr(cuda, name, value)
        monkeypatch.setattr(cuda.graph, "default_capture_stream", Stream())
        monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: None, raising=False)
        for name in ("end", "release"):
            call = {"end": "_cuda_endAllocateToPool", "release": "_cuda_releasePool"}[name]
            monkeypatch.setattr(torch._C, call, self._told(name), raising=False)

    def _told(self, name: str) -> Callable[..., None]:
        def call(device: int, pool: tuple[int, int]) -> None:
            assert (device, pool) == (3, (0, 7))
            self.pools.append(name)

        return call


def test_what_cannot_be_captured_leaves_the_stream_and_the_pool(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch.cuda.graph itself leaves both where capture_end raises."""

    def invalid() -> None:
        raise RuntimeError("operation failed due to a previous error during capture")

    device = Device(monkeypatch, invalid)
    own, ran = device.current, []

    def forward(x: Tensor) -> Tensor:
        ran.append(device.current)
        return x * 2

    run = graphed(forward, RunCopies())
    for _ in range(5):
        assert torch.equal(run(torch.ones(2, 2)), torch.full((2, 2), 2.0))
        assert ran[-1] is own and device.current is own
    assert device.pools == ["end", "release"] * 3, "once for each try"


def test_a_pool_that_its_graph_has_got_is_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The capture was over when something failed: torch says so when it is to end it."""

    def invalid() -> None:
        raise RuntimeError("out of memory")

    def over(*_: object) -> None:
        raise RuntimeError("endAllocatePool: not currently recording to mempool_id")

    device = Device(monkeypatch, invalid)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", over, raising=False)
    own = device.current
    run = graphed(lambda x: x * 2, RunCopies())
    assert torch.equal(run(torch.ones(2, 2)), torch.full((2, 2), 2.0))
    assert device.current is own and device.pools == []


def test_what_is_captured_keeps_its_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch, lambda: None)
    own = device.current
    graphed(lambda x: x * 2, RunCopies())(torch.ones(2, 2))
    assert device.current is own and device.pools == []


def test_compile_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: object, **_kw: object) -> Forward:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(torch, "compile", refuse)
    x = torch.ones(2, 2)
    assert torch.equal(compiled(nn.Identity())(x), x)


def test_the_engine_uses_what_its_options_say(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[str] = []

    def stand_in(what: str) -> object:
        return lambda forward, *_: (used.append(what), forward)[1]

    for what in ("graphed", "compiled"):
        monkeypatch.setattr(exported, what, stand_in(what))

    def functions(**use: bool) -> object:
        engine = ExportedEngine(INFO, EngineOptions(device="cuda:0", extra=use))
        return engine._functions(nn.Identity())[1]

    assert functions(cuda_graph=True) is None  # the result is in the graph's memory: one copy
    assert functions(compile=True) is None
    assert functions(compile=True, cuda_graph=True) is None
    assert used == ["graphed", "compiled", "compiled", "graphed"]


def test_on_a_cpu_they_are_refused() -> None:
    engine = ExportedEngine(INFO, EngineOptions(extra={"compile": True}))
    with pytest.raises(ValueError, match="CUDA"):
        engine._functions(nn.Identity())
    assert engine.copies_out == 1
    with pytest.raises(BlockError):
        engine.run(torch.zeros(1, 2))


def test_what_is_compiled_is_warmed_for_all_rows(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A request would wait for the compiler; one that there is no memory for does no harm."""
    ran: list[int] = []

    def run(x: Tensor, out: Tensor | None = None) -> Tensor:
        ran.append(len(x))
        if len(x) > 2:
            raise BlockError("BLOCK_FAILED", "out of memory")
        return x

    for extra, expected in (({}, [1]), ({"compile": True}, [*COMPILED_FOR])):
        engine = ExportedEngine(INFO, EngineOptions(extra=extra))
        monkeypatch.setattr(engine, "run", run)
        ran.clear()
        engine.warm_up()
        assert ran == expected
    assert "32 rows were not tried" in caplog.text


def test_the_warmed_rows_are_those_that_are_compiled_for() -> None:
    """By torch's own account, with a compiler that only counts."""
    graphs: list[int] = []

    def count(graph: torch.fx.GraphModule, example: list[Tensor]) -> Forward:
        graphs.append(len(example))
        return graph.forward

    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    run = torch.compile(net.eval(), dynamic=True, backend=count)
    with torch.inference_mode():
        for rows in COMPILED_FOR:
            run(torch.zeros(rows, 3, 16, 16))
        before = len(graphs)
        for rows in (1, 2, 3, 5, 8, 16, 17, 32, 64, 100):
            run(torch.zeros(rows, 3, 16, 16))
    assert 1 < before == len(graphs)
