"""A rig around real workers: a Controller's ROUTER, a Dispatcher's return socket, a launcher."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import zmq

from blockflow.core.launchspec import StageSpec, WorkerLaunch
from blockflow.core.model import BlockInfo, TensorSpec
from blockflow.core.routing import DISPATCHER_STAGE, PathTree, RouteTable, StageRoute, merge_paths
from blockflow.launch.base import Child, Launcher
from blockflow.launch.preload import modules_of
from blockflow.repository.echo import save_echo
from blockflow.repository.repository import BlockRepository
from blockflow.tensormq.arena import Arena
from blockflow.tensormq.atwork import AtWorkReader
from blockflow.tensormq.channel import Producer
from blockflow.tensormq.inline import InlineProducer
from blockflow.tensormq.push import PushCache
from blockflow.tensormq.shm import ShmConsumer, ShmProducer
from blockflow.tensormq.sockets import bind_pull, new_context
from blockflow.tensormq.views import as_numpy
from blockflow.wire.control import (
    ControlMessage,
    Ready,
    Routes,
    RoutesApplied,
    Stop,
    decode_control,
    encode_control,
)
from blockflow.wire.data import Data, Failure, Item, decode_data_plane, encode_data
from blockflow.wire.tensor import TensorDesc

ENTRY = "blockflow.worker.main:run"
WAIT_S = 30.0
DISPATCHER = 1

M = TypeVar("M", bound=ControlMessage)


class Rig:
    """One instance's folder with what a worker speaks to.

    Args:
        folder: empty, private; short enough for socket paths.
        launcher: of the workers.
        repository: of the blocks.
    """

    def __init__(self, folder: Path, launcher: Launcher, repository: Path) -> None:
        self.folder = folder
        self.launcher = launcher
        self.repository = repository
        self.context = new_context()
        control = f"ipc://{folder}/control.sock"
        self.router = self.context.socket(zmq.ROUTER)
        self.router.setsockopt(zmq.LINGER, 500)
        self.router.bind(control)
        self.controller = control
        self.pull, self.endpoint = bind_pull(self.context, "ipc", folder, DISPATCHER)
        self.push = PushCache(self.context, zmq.Poller())
        self.shm: Producer = ShmProducer(Arena.create(folder, DISPATCHER, 64 << 20, 64))
        self.inline: Producer = InlineProducer()
        self.consumer = ShmConsumer(folder)
        self.children: dict[int, Child] = {}
        self.routes: dict[int, StageRoute] = {
            DISPATCHER_STAGE: StageRoute(
                DISPATCHER_STAGE, "", "dispatcher", DISPATCHER, self.endpoint, "tensormq"
            )
        }
        self.version = 0
        self.inbox: list[tuple[int, ControlMessage]] = []

    # --- workers ---------------------------------------------------------------------------------

    def launch(
        self,
        incarnation: int,
        blocks: Mapping[int, BlockInfo],
        *,
        mode: str = "tensormq",
        transport: str = "ipc",
        **more: Any,
    ) -> Child:
        """Start a worker; ``blocks`` by stage number, ``more`` overrides fields of its launch.

        ``stage`` in ``more`` holds fields of every StageSpec.
        """
        stage = more.pop("stage", {})
        fields: dict[str, Any] = {
            "name": f"w{incarnation}",
            "incarnation": incarnation,
            "stages": tuple(StageSpec(n, info, **stage) for n, info in blocks.items()),
            "repository": str(self.repository),
            "run_dir": str(self.folder),
            "controller": self.controller,
            "transport": transport,
            "mode": mode,
            "device": "cpu",
            "threads": 1,
            "cores": tuple(sorted(os.sched_getaffinity(0))),
            "arena_bytes": 32 << 20,
            "slots": 16,
            "monitor_hz": 0.0,
        }
        spec = WorkerLaunch(**{**fields, **more})
        spec = replace(spec, modules=modules_of(spec.loaders))
        child = self.launcher.launch(ENTRY, spec.to_dict(), spec.name)
        self.children[incarnation] = child
        return child

    def start(self, incarnation: int, blocks: Mapping[int, BlockInfo], **more: Any) -> Ready:
        """Launch, await Ready, and add its stages to the routes (see :meth:`publish`)."""
        self.launch(incarnation, blocks, **more)
        return self.await_ready(incarnation, blocks, more.get("mode", "tensormq"))

    def await_ready(
        self, incarnation: int, blocks: Mapping[int, BlockInfo], mode: str = "tensormq"
    ) -> Ready:
        """Of one that was launched: its stages belong to the routes from then on."""
        ready = self.expect(Ready, incarnation)
        for number, info in blocks.items():
            self.routes[number] = StageRoute(
                number, info.name, f"w{incarnation}", incarnation, ready.endpoint, mode
            )
        return ready

    def publish(self) -> None:
        """Send the routes to every worker and await that they are applied."""
        self.version += 1
        table = RouteTable(1, self.version, dict(self.routes)).to_dict()
        alive = [i for i, child in self.children.items() if child.poll() is None]
        for incarnation in alive:
            self.tell(incarnation, Routes(table))
        for incarnation in alive:
            assert self.expect(RoutesApplied, incarnation).version == self.version

    def stop(self, incarnation: int) -> int | None:
        self.tell(incarnation, Stop())
        return self.children[incarnation].wait(WAIT_S)

    def tell(self, incarnation: int, message: ControlMessage) -> None:
        self.router.send_multipart([str(incarnation).encode(), encode_control(message)])

    def expect(self, kind: type[M], incarnation: int, timeout_s: float = WAIT_S) -> M:
        """The next message of a kind from a worker; others are kept."""
        end = time.monotonic() + timeout_s
        while True:
            for i, (sender, message) in enumerate(self.inbox):
                if sender == incarnation and isinstance(message, kind):
                    del self.inbox[i]
                    return message
            left = end - time.monotonic()
            assert left > 0, f"no {kind.__name__} from {incarnation}; have {self.inbox}"
            if self.router.poll(left * 1000):
                identity, body = self.router.recv_multipart()
                self.inbox.append((int(identity), decode_control(body)))

    # --- tensors ---------------------------------------------------------------------------------

    def send(
        self,
        x: np.ndarray[Any, Any],
        *paths: Sequence[int],
        rows: Sequence[int] | None = None,
        remaining_ms: int = 10_000,
        dtype: str | None = None,
        inline: bool = False,
    ) -> list[bytes]:
        """Send a tensor along ``paths``; ``rows`` parts it into items. Returns the request ids."""
        tree, _ = merge_paths(paths)
        items = tuple(
            Item(os.urandom(16), 1, 1, tree, 0, n, remaining_ms) for n in rows or [len(x)]
        )
        self.post(x, items, tree, dtype or str(x.dtype), inline)
        return [i.request_id for i in items]

    def post(
        self,
        x: np.ndarray[Any, Any],
        items: tuple[Item, ...],
        tree: PathTree,
        dtype: str,
        inline: bool,
    ) -> None:
        route = self.routes[tree.nodes[0].stage]
        producer = self.inline if inline or route.mode == "zeromq" else self.shm
        out = producer.reserve(dtype, x.shape)
        assert out is not None
        as_numpy(out.memory, dtype, x.shape)[...] = x
        payload = producer.publish(out, [route.incarnation])[0]
        header = encode_data(Data(DISPATCHER, time.monotonic_ns(), payload.desc, items))
        frames = [header] if payload.frame is None else [header, payload.frame]
        self.send_raw(route.endpoint, frames)

    def send_raw(self, endpoint: str, frames: Sequence[Any]) -> None:
        """Send, and see to it that the message leaves (a new connection takes a moment)."""
        assert self.push.send(endpoint, frames)
        end = time.monotonic() + WAIT_S
        while self.push.pending():
            assert time.monotonic() < end, f"nobody listens at {endpoint}"
            zmq.select([], self.push.sockets_waiting(), [], 0.01)
            self.push.flush()

    def receive(self, timeout_s: float = WAIT_S) -> Data | Failure:
        """The next message of the return socket; its tensor is still to be opened."""
        return self.receive_full(timeout_s)[0]

    def receive_full(self, timeout_s: float = WAIT_S) -> tuple[Data | Failure, Any, int]:
        end = time.monotonic() + timeout_s
        while not self.pull.poll(2):  # what had to wait for its connection leaves meanwhile
            self.push.flush()
            assert time.monotonic() < end, "nothing came back"
        frames = self.pull.recv_multipart()
        now = time.monotonic_ns()
        return decode_data_plane(frames[0]), (frames[1] if len(frames) > 1 else None), now

    def result(self, timeout_s: float = WAIT_S) -> tuple[Data, np.ndarray[Any, Any]]:
        """The next result, copied out and released."""
        message, frame, _ = self.receive_full(timeout_s)
        assert isinstance(message, Data), message
        return message, self.read(message.tensor, frame)

    def read(self, desc: TensorDesc, frame: Any) -> np.ndarray[Any, Any]:
        buffer = self.consumer.open(desc, frame)
        value = as_numpy(buffer.memory, desc.dtype, desc.dims, desc.strides).copy()
        buffer.release()
        return value

    def failure(self, timeout_s: float = WAIT_S) -> Failure:
        message = self.receive(timeout_s)
        assert isinstance(message, Failure), message
        return message

    def leavings(self, incarnation: int) -> list[str]:
        """Files of a worker in the run directory."""
        return sorted(p.name for p in self.folder.iterdir() if str(incarnation) in p.name)

    def close(self) -> None:
        for child in self.children.values():
            child.kill()
            child.wait(5.0)
            child.close()
        self.push.close()
        self.consumer.close()
        self.shm.close()
        self.pull.close(0)
        self.router.close(0)
        self.context.destroy(linger=0)


@contextmanager
def rig_in(folder: Path, launcher: Launcher, repository: Path) -> Iterator[Rig]:
    rig = Rig(folder, launcher, repository)
    try:
        yield rig
    finally:
        rig.close()


def private_folder(name: str) -> Path:
    """A new run directory below the session's run root; socket paths in it stay short."""
    root = Path(os.environ["BLOCKFLOW_RUN_ROOT"])
    return Path(tempfile.mkdtemp(prefix=name, dir=root))


@contextmanager
def rigs_of(launcher: Launcher) -> Iterator[Callable[[], AbstractContextManager[Rig]]]:
    """Yields a function that makes a rig; all of them have the same repository."""
    repository = private_folder("repo")

    @contextmanager
    def make() -> Iterator[Rig]:
        folder = private_folder("rig")
        try:
            with rig_in(folder, launcher, repository) as rig:
                yield rig
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    try:
        yield make
    finally:
        shutil.rmtree(repository, ignore_errors=True)


def echo(rig: Rig, name: str, dims: Sequence[int | str] = (4,), **settings: Any) -> BlockInfo:
    """Store an echo block ``float32[rows, *dims]``."""
    spec = TensorSpec("float32", ("rows", *dims))
    return save_echo(BlockRepository(rig.repository), name, spec, settings=settings)


def answers(rig: Rig, expected: Mapping[bytes, float]) -> None:
    """Each request's own result comes once, in any order, whatever it shared a batch with."""
    left = dict(expected)
    while left:
        message, value = rig.result()
        row = 0
        for item in message.items:
            assert (value[row : row + item.rows] == left.pop(item.request_id)).all()
            row += item.rows


def at_work(rig: Rig, *stages: int) -> None:
    """Wait until forwards of exactly these stages are under way in worker 11."""
    reader = AtWorkReader.open(rig.folder, 11)
    assert reader is not None
    end = time.monotonic() + WAIT_S
    while (found := sorted(w.stage for w in reader.read())) != sorted(stages):
        assert time.monotonic() < end, f"under way: {found}"
        time.sleep(0.002)


@pytest.fixture
def rig(worker_rigs: Callable[[], AbstractContextManager[Rig]]) -> Iterator[Rig]:
    """A rig of the template that the folder's files share (its conftest.py starts that)."""
    with worker_rigs() as one:
        yield one


def some(rows: int = 2, *dims: int, first: float = 0.0) -> np.ndarray[Any, Any]:
    x = np.random.default_rng(rows).standard_normal((rows, *(dims or (4,)))).astype(np.float32)
    x[0].flat[0] = first
    return x
