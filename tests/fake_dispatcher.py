"""A Dispatcher's client side in one thread: answers by the task's name, remembers what it was told.

Tasks: ``echo`` gives its input back, ``double`` the input twice (rows), ``fail`` a BLOCK_FAILED,
``silent`` nothing ever, ``held`` an echo once :meth:`FakeDispatcher.release` is called, ``slow`` an
echo after :attr:`FakeDispatcher.delay_s`. With ``share`` it grants memory as a real one does.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import zmq

from blockflow.core.errors import BlockFlowError, make_error
from blockflow.core.model import Contract, TensorSpec
from blockflow.core.routing import TaskRoute
from blockflow.dispatcher.grants import GrantDesk
from blockflow.wire.client import (
    Cancel,
    Describe,
    Description,
    Invitation,
    Invite,
    Reply,
    Request,
    TaskResult,
    Timing,
    decode_to_dispatcher,
    encode_to_client,
)
from blockflow.wire.data import HopTiming

SPEC = TensorSpec("float32", ("rows", 4))
TASKS = ("echo", "double", "fail", "silent", "held", "slow")


class FakeDispatcher:
    def __init__(
        self,
        endpoint: str = "tcp://127.0.0.1:*",
        *,
        deadline_ms: int = 10_000,
        share: bool = True,
    ) -> None:
        self.epoch = 1
        self.delay_s = 0.1
        self.published: Sequence[str] = TASKS
        self.deadline_ms = deadline_ms
        self.requests: list[Request] = []
        self.cancelled: list[bytes] = []
        self.describes = 0
        self.changed = threading.Condition()
        self._held: list[tuple[bytes, Request, Any]] = []
        self._later: list[tuple[float, bytes, Request, Any]] = []
        self._commands: list[tuple[str, Any, threading.Event]] = []
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IPV6, "[" in endpoint)
        self._socket.bind(endpoint)
        self.endpoint: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._folder = Path(tempfile.mkdtemp(prefix="fake-"))
        self.grants = GrantDesk(self._folder / "g1.sock", self._poller)
        if not share:
            self.grants.reason = "this fake does not share"
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fake-dispatcher", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()
        self.grants.close()
        self._context.destroy(linger=0)
        shutil.rmtree(self._folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def release(self) -> None:
        """Answer all held requests."""
        self._tell("release", None)

    def send_raw(self, frames: list[bytes]) -> None:
        """Send these frames to every client seen so far."""
        self._tell("raw", frames)

    def break_side(self) -> None:
        """End all side connections."""
        self._tell("break", None)

    def _tell(self, kind: str, value: Any) -> None:
        """Have the thread do something, and wait until it is done."""
        done = threading.Event()
        self._commands.append((kind, value, done))
        if not done.wait(5):
            raise AssertionError("the fake Dispatcher is stuck")

    def wait_for(self, what: Any, timeout_s: float = 5.0) -> None:
        """Wait until ``what()`` is true of this object's records."""
        with self.changed:
            if not self.changed.wait_for(what, timeout_s):
                raise AssertionError("the fake Dispatcher did not see it in time")

    # --- thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        clients: set[bytes] = set()
        while not self._stopped.is_set():
            events = dict(self._poller.poll(5))
            if self._socket in events:
                identity, *frames = self._socket.recv_multipart()
                clients.add(identity)
                self._handle(identity, frames)
            for source in events:
                if self.grants.watches(source):
                    self.grants.on_event(source, time.monotonic_ns())
            while self._commands:
                kind, value, done = self._commands.pop(0)
                if kind == "release":
                    for who, request, body in self._held:
                        self._answer(who, request, body)
                    self._held.clear()
                elif kind == "break":
                    for who in clients:
                        self.grants.client_gone(who)
                else:
                    for who in clients:
                        self._socket.send_multipart([who, *value])
                done.set()
            now = time.monotonic()
            for entry in [e for e in self._later if e[0] <= now]:
                self._later.remove(entry)
                self._answer(*entry[1:])

    def _handle(self, who: bytes, frames: list[bytes]) -> None:
        msg = decode_to_dispatcher(frames[0])
        with self.changed:
            if isinstance(msg, Describe):
                self.describes += 1
                self._describe(who, msg)
            elif isinstance(msg, Cancel):
                self.cancelled.append(msg.request_id)
            elif isinstance(msg, Invite):
                way = self.grants.invite(who, time.monotonic_ns())
                answer = encode_to_client(Invitation(msg.request_id, *way))
                self._socket.send_multipart([who, answer])
            else:
                self._request(who, msg, frames[1:])
            self.changed.notify_all()

    def _request(self, who: bytes, msg: Request, rest: list[bytes]) -> None:
        self.requests.append(msg)
        try:
            if msg.upload is None:
                (body,) = rest
            else:
                body = bytes(self.grants.upload(who, msg.upload, msg.tensor.nbytes))
        except BlockFlowError as exc:
            results = tuple(TaskResult(t, None, exc) for t in msg.tasks)
            self._send(who, Reply(msg.request_id, self.epoch, results), [])
            return
        if "held" in msg.tasks:
            self._held.append((who, msg, body))
        elif "slow" in msg.tasks:
            self._later.append((time.monotonic() + self.delay_s, who, msg, body))
        elif "silent" not in msg.tasks:
            self._answer(who, msg, body)

    def _describe(self, who: bytes, msg: Describe) -> None:
        tasks = [
            TaskRoute(name, ("b1", "b2"), Contract(SPEC, SPEC), 32, self.deadline_ms).to_dict()
            for name in self.published
        ]
        reply = Description(msg.request_id, self.epoch, tuple(tasks), {"max_inflight": 256})
        self._socket.send_multipart([who, encode_to_client(reply)])

    def _answer(self, who: bytes, request: Request, body: Any) -> None:
        timings = tuple(
            Timing(b, HopTiming(i, 1_000, 2_000_000, 30_000, 4_000_000))
            for i, b in enumerate(("b1", "b2"))
        )
        results, bodies = [], []
        for task in request.tasks:
            error: BlockFlowError | None = None
            if task == "fail":
                error = make_error("BLOCK_FAILED", "it was asked to", where="b2")
            elif task not in self.published:
                error = make_error("UNKNOWN_TASK", f"no task {task!r}", where=task)
            desc = None
            if error is None:
                dims, data = request.tensor.dims, body
                if task == "double":
                    dims, data = (2 * dims[0], *dims[1:]), body + body
                desc = type(request.tensor)(request.tensor.dtype, dims)
                place = self.grants.place(who, memoryview(data))
                if place is None:
                    bodies.append(data)
            else:
                place = None
            results.append(
                TaskResult(task, desc, error, timings, 10_000, 20_000, 12_092_000, place)
            )
        self._send(who, Reply(request.request_id, self.epoch, tuple(results)), bodies)

    def _send(self, who: bytes, reply: Reply, bodies: list[bytes]) -> None:
        self._socket.send_multipart([who, encode_to_client(reply), *bodies])
