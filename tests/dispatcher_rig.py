"""A Dispatcher in a thread with real sockets, workers that do as a test says, a raw client."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from blockflow.core.errors import BlockFlowError
from blockflow.core.launchspec import DispatcherLaunch
from blockflow.core.model import Contract, TensorSpec
from blockflow.core.routing import RouteTable, StageRoute, TaskRoute
from blockflow.dispatcher.cpu_latency import CpuLatency
from blockflow.dispatcher.server import DispatcherServer
from blockflow.tensormq.agent import Mailbox
from blockflow.tensormq.arena import Arena
from blockflow.tensormq.janitor import RunDir, remove_leavings, run_root
from blockflow.tensormq.push import PushCache
from blockflow.tensormq.shm import ShmConsumer, ShmProducer
from blockflow.tensormq.sockets import bind_pull, connect_dealer, new_context
from blockflow.wire import client as wire
from blockflow.wire.control import ControlMessage, Drained, Routes, RoutesApplied, Stop
from blockflow.wire.data import (
    Data,
    Failure,
    HopTiming,
    Item,
    Withdraw,
    decode_data_plane,
    encode_data,
    encode_failure,
    pack_timings,
)
from blockflow.wire.tensor import TensorDesc

PATIENCE_S = 10.0
CONTRACT = Contract(TensorSpec("float32", ("rows", 4)), TensorSpec("float32", ("rows", 4)))
X = np.arange(8, dtype=np.float32).reshape(2, 4)


def wait_until(condition: Callable[[], Any], timeout_s: float = PATIENCE_S) -> Any:
    """Poll ``condition`` until it is true; fails after the time-out."""
    end = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < end, "condition not met in time"
        time.sleep(0.002)


def launch_spec(run_dir: Path, **changes: Any) -> DispatcherLaunch:
    base = DispatcherLaunch(
        name="dispatcher",
        incarnation=1,
        run_dir=str(run_dir),
        controller=f"ipc://{run_dir}/control.sock",
        client_endpoints=(f"ipc://{run_dir}/clients.sock", "tcp://127.0.0.1:0"),
        transport="ipc",
        cores=(),
        arena_bytes=8 << 20,
        slots=64,
        monitor_hz=0.0,
    )
    return replace(base, **changes)


def task(name: str, path: Sequence[str], **changes: Any) -> TaskRoute:
    return replace(TaskRoute(name, tuple(path), CONTRACT), **changes)


class FakeWorker:
    """Hosts stages; ``behave[block]`` maps an input array to an output array, an error, or None.

    None = swallow the item. The next stage of a path may be here or in another fake worker.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        run_dir: Path,
        incarnation: int,
        stages: Mapping[int, str],
        mode: str = "tensormq",
        transport: str = "ipc",
    ) -> None:
        self.run_dir = run_dir
        self.incarnation = incarnation
        self.stages = stages
        self.mode = mode
        self.behave: dict[str, Callable[[np.ndarray], Any]] = {}
        self.table = RouteTable(0, 0)
        self.replayable = True
        self.seen: list[tuple[int, Item]] = []
        self.withdrawn: list[tuple[bytes, int]] = []
        self.pull, self.endpoint = bind_pull(context, transport, run_dir, incarnation)
        self.push = PushCache(context, zmq.Poller())
        self.consumer = ShmConsumer(run_dir)
        self.producer = ShmProducer(Arena.create(run_dir, incarnation, 8 << 20, 64))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(PATIENCE_S)
        self.push.close()
        self.pull.close(0)
        self.producer.close()
        remove_leavings(self.run_dir, self.incarnation)

    def routes(self) -> list[StageRoute]:
        mine, where = self.incarnation, (self.incarnation, self.endpoint, self.mode)
        return [
            StageRoute(s, b, f"{b}#{mine}", *where, replayable=self.replayable)
            for s, b in self.stages.items()
        ]

    def _run(self) -> None:
        while not self._stop.is_set():
            self.push.flush()
            if not self.pull.poll(1 if self.push.pending() else 20):
                continue
            frames = self.pull.recv_multipart(copy=False)
            received = time.monotonic_ns()
            msg = decode_data_plane(frames[0].buffer)
            if isinstance(msg, Withdraw):
                self.withdrawn += msg.requests
                continue
            assert isinstance(msg, Data)
            source = self.consumer.open(msg.tensor, frames[1] if len(frames) > 1 else None)
            for item in msg.items:
                self.seen.append((item.path.nodes[item.hop].stage, item))
                array = np.frombuffer(source.memory, msg.tensor.dtype).reshape(msg.tensor.dims)
                self._visit(item, array, msg.sent_ns, received)
            source.release()

    def _visit(self, item: Item, array: np.ndarray, sent_ns: int, received: int) -> None:
        node = item.path.nodes[item.hop]
        block = self.stages[node.stage]
        started = time.monotonic_ns()
        out = self.behave.get(block, lambda a: a + 1)(array)
        computed = time.monotonic_ns()
        if out is None:
            return
        if isinstance(out, BlockFlowError):
            failure = Failure(self.incarnation, computed, out, (item,))
            self._send(self.table.stages[0].endpoint, [encode_failure(failure)])
            return
        for hop in item.path.children(item.hop):
            nxt = item.path.nodes[hop].stage
            if nxt in self.stages:
                done = item.timings + pack_timings(
                    [HopTiming(item.hop, 0, 0, 0, computed - started)]
                )
                self._visit(replace(item, hop=hop, timings=done), out, computed, computed)
            else:
                self._forward(item, hop, nxt, out, sent_ns, received, started, computed)
        if node.terminal:
            self._forward(item, item.hop, 0, out, sent_ns, received, started, computed)

    def _forward(
        self,
        item: Item,
        hop: int,
        stage: int,
        out: np.ndarray,
        sent_ns: int,
        received: int,
        started: int,
        computed: int,
    ) -> None:
        route = self.table.stages[stage]
        out = np.ascontiguousarray(out)
        desc, frames = TensorDesc(str(out.dtype), out.shape), [out.tobytes()]
        if route.mode == "tensormq":
            buffer = self.producer.reserve(desc.dtype, desc.dims)
            assert buffer is not None
            buffer.memory[:] = memoryview(out).cast("B")
            desc, frames = self.producer.publish(buffer, (route.incarnation,))[0].desc, []
        now = time.monotonic_ns()
        timing = HopTiming(
            item.hop,
            max(0, received - sent_ns),
            started - received,
            now - computed,
            computed - started,
        )
        moved = replace(item, hop=hop, timings=item.timings + pack_timings([timing]))
        header = encode_data(Data(self.incarnation, now, desc, (moved,)))
        self._send(route.endpoint, [header, *frames])

    def _send(self, endpoint: str, frames: list[Any]) -> None:
        assert self.push.send(endpoint, frames)


class RawClient:
    """A DEALER that speaks the client protocol byte by byte."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, hwm: int = 1000
    ) -> None:
        self.socket = connect_dealer(context, endpoint, hwm=hwm)
        self._count = itertools.count(1)
        self._mine = id(self).to_bytes(8, "big")

    def new_id(self) -> bytes:
        return self._mine + next(self._count).to_bytes(8, "big")

    def ask(
        self,
        tasks: str | Sequence[str],
        array: np.ndarray,
        *,
        rid: bytes | None = None,
        deadline_ms: int = 10_000,
        tries: int = 0,
    ) -> bytes:
        """Send a request; returns its id."""
        rid = rid or self.new_id()
        names = (tasks,) if isinstance(tasks, str) else tuple(tasks)
        desc = TensorDesc(str(array.dtype), array.shape)
        header = wire.encode_to_dispatcher(wire.Request(rid, names, deadline_ms, desc, None, tries))
        self.socket.send_multipart([header, array.tobytes()])
        return rid

    def send(self, *frames: bytes) -> None:
        assert self.socket.poll(int(PATIENCE_S * 1000), zmq.POLLOUT), "nobody takes it"
        self.socket.send_multipart(list(frames))

    def answer(self, timeout_s: float = PATIENCE_S) -> tuple[Any, list[bytes]]:
        """The next message: decoded, and its frames."""
        assert self.socket.poll(int(timeout_s * 1000)), "no answer in time"
        header, *frames = self.socket.recv_multipart()
        return wire.decode_to_client(header), frames

    def quiet(self, milliseconds: int = 50) -> bool:
        return not self.socket.poll(milliseconds)

    def infer(self, tasks: str | Sequence[str], array: np.ndarray, **kw: Any) -> list[Any]:
        """One call; per task the output array or the error."""
        rid = self.ask(tasks, array, **kw)
        reply, frames = self.answer()
        while reply.request_id == wire.UNASKED:  # the tasks have changed meanwhile
            reply, frames = self.answer()
        assert reply.request_id == rid
        left = iter(frames)
        return [
            r.error
            if r.error is not None
            else np.frombuffer(next(left), r.tensor.dtype).reshape(r.tensor.dims)
            for r in reply.results
        ]

    def close(self) -> None:
        self.socket.close(0)


class Rig:
    """Dispatcher thread, workers, clients, and the Controller's voice."""

    def __init__(
        self, run_dir: Path, cpu_latency: CpuLatency | None = None, **changes: Any
    ) -> None:
        self.run_dir = run_dir
        self.context = new_context()
        self.mailbox: Mailbox[Any] = Mailbox()
        self.told: list[ControlMessage] = []
        self.launch = launch_spec(run_dir, **changes)
        speak = self.mailbox, self.told.append
        self.server = DispatcherServer(self.launch, self.context, *speak, cpu_latency=cpu_latency)
        self.exchange = self.server.exchange
        self.workers: list[FakeWorker] = []
        self.clients: list[RawClient] = []
        self.version = 0
        self.server.begin()
        self._thread = threading.Thread(target=self.server.run, daemon=True)
        self._thread.start()

    def worker(self, incarnation: int, stages: Mapping[int, str], **kw: Any) -> FakeWorker:
        worker = FakeWorker(self.context, self.run_dir, incarnation, stages, **kw)
        self.workers.append(worker)
        worker.start()
        return worker

    def client(self, which: int = 0, hwm: int = 1000) -> RawClient:
        client = RawClient(self.context, self.server.client_endpoints[which], hwm)
        self.clients.append(client)
        return client

    def publish(
        self,
        *tasks: TaskRoute,
        workers: Sequence[FakeWorker] | None = None,
        mode: str = "tensormq",
        down: Mapping[str, str] | None = None,
    ) -> RouteTable:
        """New routes to the workers, then to the Dispatcher; returns when it has applied them."""
        self.version += 1
        routes = [
            StageRoute(0, "", "dispatcher", self.launch.incarnation, self.server.endpoint, mode)
        ]
        for worker in self.workers if workers is None else workers:
            routes += worker.routes()
        table = RouteTable(
            self.version,
            self.version,
            {r.stage: r for r in routes},
            {t.name: t for t in tasks},
            (),
            down or {},
        )
        for worker in self.workers:
            worker.table = table
        self.mailbox.put(Routes(table.to_dict()))
        wait_until(lambda: RoutesApplied(self.launch.incarnation, self.version) in self.told)
        return table

    def drained(self, version: int) -> bool:
        return Drained(self.launch.incarnation, version) in self.told

    def idle(self) -> bool:
        """Nothing is in flight and no slot is in use."""
        producer = self.server._desk._producer
        producer.sweep()
        return len(self.exchange.table) == 0 and producer.outstanding() == 0

    def stop(self) -> None:
        self.mailbox.put(Stop())
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()

    def close(self) -> None:
        self.stop()
        for part in (*self.clients, *self.workers):
            part.close()
        self.server.close()
        self.mailbox.close()
        self.context.destroy(linger=0)


@contextmanager
def rig(tmp_root: Path, **changes: Any) -> Iterator[Rig]:
    """A running :class:`Rig`; checks on the way out that nothing is left in the run directory."""
    with RunDir.create(tmp_root) as run:
        made = Rig(run.path, **changes)
        try:
            yield made
        finally:
            made.close()
        left = sorted(p.name for p in run.path.iterdir())
        assert left == ["lock"], left


@pytest.fixture
def make() -> Iterator[Callable[..., Rig]]:
    """Rigs that are closed, and checked for leavings, at the end."""
    opened: list[Any] = []

    def factory(**changes: Any) -> Rig:
        context = rig(run_root(), **changes)
        opened.append(context)
        return context.__enter__()

    yield factory
    while opened:
        opened.pop().__exit__(None, None, None)


@pytest.fixture
def up(make: Callable[..., Rig]) -> Rig:
    """Trunk in one worker, heads a and b in another; tasks ta, tb, and other (b alone)."""
    r = make()
    r.worker(11, {1: "trunk"})
    r.worker(12, {2: "a", 3: "b"})
    r.publish(task("ta", ["trunk", "a"]), task("tb", ["trunk", "b"]), task("other", ["b"]))
    return r


def swallow(_: np.ndarray) -> None:
    return None
