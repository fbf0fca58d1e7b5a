"""One running system, its users, and bad input of every kind to offer to it."""

from __future__ import annotations

import json
import os
import random
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import zmq
from control_rig import echo_repository
from system_rig import served
from warm_rig import Warm

from blockflow.client import Client
from blockflow.control.system import System
from blockflow.core import limits
from blockflow.core.errors import CODES, BlockFlowError
from blockflow.core.model import TensorSpec
from blockflow.core.routing import merge_paths
from blockflow.repository.echo import save_echo
from blockflow.repository.repository import BlockRepository
from blockflow.wire import client as wire
from blockflow.wire.control import ControlMessage
from blockflow.wire.data import Data, Failure, Item, encode_data, encode_failure
from blockflow.wire.tensor import Handle, TensorDesc

X = np.arange(4, dtype=np.float32).reshape(1, 4)
BODY = {"blocks": ["a", "b", "slow"], "tasks": {"t": ["a", "b"], "u": ["a"], "s": ["slow"]}}
ROUNDS = 400
SETTLE_S = 15.0


def wait_until(test: Callable[[], Any], what: str = "it did not come to be") -> None:
    """Poll a fact about other processes, which cannot be waited for otherwise."""
    if not comes_true(test):
        pytest.fail(what)


def comes_true(test: Callable[[], Any]) -> bool:
    """Whether ``test`` becomes true within some time."""
    end = time.monotonic() + SETTLE_S
    while not test():
        if time.monotonic() >= end:
            return False
        time.sleep(0.01)
    return True


@dataclass
class Stage:
    """The running system, its users, and what it consisted of at the beginning."""

    system: System
    http: httpx.Client
    client: Client
    repository: BlockRepository
    processes: dict[str, int] = field(default_factory=dict)
    before: dict[str, Any] = field(default_factory=dict)

    def pids(self) -> dict[str, int]:
        return {w["name"]: w["pid"] for w in self.system.commands.workers()}

    def endpoint(self, name: str) -> str:
        return str(self.system.commands.worker(name)["endpoint"])

    def extra(self, name: str) -> dict[str, Any]:
        """A process's own counters, of its latest sample."""
        incarnation = self.system.commands.worker(name)["incarnation"]
        sample = self.system.manager.kpis.latest(incarnation)
        return sample.extra if sample is not None else {}

    def count(self, name: str, counter: str) -> int:
        extra = self.extra(name)
        return int({**extra, **extra.get("events", {})}.get(counter, 0))

    def serves(self) -> None:
        assert np.array_equal(self.client.infer("t", X, deadline_s=10).value, X)
        assert self.http.get("/v1/health/ready").status_code == 200
        assert self.pids() == self.processes

    def holdings(self) -> dict[str, Any]:
        """What must not grow; descriptors and threads by process."""
        pids = {
            **self.processes,
            "template": self.system.commands.template_pid(),
            "up": os.getpid(),
        }
        return {
            "descriptors": {n: len(os.listdir(f"/proc/{p}/fd")) for n, p in pids.items()},
            "threads": {n: len(os.listdir(f"/proc/{p}/task")) for n, p in pids.items()},
            "processes": children(pids["template"]) | children(os.getpid()),
            "files": sorted(os.listdir(self.system.run_dir)),
        }

    def slots_used(self) -> dict[str, int]:
        status = self.system.status()
        found = [status["dispatcher"], *status["workers"]]
        return {p["name"]: p["process"]["slots_used"] for p in found}


def children(pid: int | None) -> set[int]:
    out: set[int] = set()
    for task in os.listdir(f"/proc/{pid}/task"):
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended since
            out |= {int(p) for p in Path(f"/proc/{pid}/task/{task}/children").read_text().split()}
    return out


def no_more(now: Any, before: Any) -> bool:
    if isinstance(before, dict):
        return all(no_more(now[k], before[k]) for k in before)
    return bool(now <= before) if isinstance(before, int) else bool(now == before)


@contextmanager
def staged(root: Path, warm: Warm) -> Iterator[Stage]:
    """The system in ``root``, as it is before any bad input."""
    repository = echo_repository(root / "blocks", slow={"delay_ms": 300})
    save_echo(repository, "wide", TensorSpec("float32", ("rows", 8)))
    save_echo(repository, "ints", TensorSpec("int64", ("rows", 4)))
    with (
        warm.own_template() as launcher,  # whose descriptors, threads and children are counted
        served(root, BODY, launcher) as system,
        httpx.Client(base_url=system.rest_url, timeout=30) as http,
        Client(system.client_endpoint) as client,
    ):
        system.commands.monitor(20.0)
        made = Stage(system, http, client, repository)
        made.processes = made.pids()
        made.serves()
        client.infer("s", X)
        wait_until(lambda: all(made.extra(n) for n in made.processes))
        made.before = made.holdings()
        yield made


def refused(answer: httpx.Response) -> dict[str, Any]:
    """The typed error of an answer whose status is that of its code."""
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert answer.status_code == CODES[error["code"]].http
    assert error["message"]
    return dict(error)


def update(stage: Stage, body: Any) -> dict[str, Any]:
    return refused(stage.http.post("/v1/system-update", json=body))


# --- requests ------------------------------------------------------------------------------------

BAD_TENSORS: list[tuple[str, Any, str, tuple[str, ...]]] = [
    ("t", X.astype(np.float64), "CONTRACT_MISMATCH", ("float64", "float32")),
    ("t", X.astype(np.int64), "CONTRACT_MISMATCH", ("int64", "float32")),
    ("t", X[0], "CONTRACT_MISMATCH", ("[4]", "[rows, 4]")),
    ("t", X[None], "CONTRACT_MISMATCH", ("[1, 1, 4]", "[rows, 4]")),
    ("t", np.zeros((1, 5), np.float32), "CONTRACT_MISMATCH", ("[1, 5]", "[rows, 4]")),
    ("t", np.zeros((0, 4), np.float32), "EMPTY_INPUT", ("0",)),
    ("t", np.full((1, 4), np.nan, np.float32), "NON_FINITE_INPUT", ("[0, 0]",)),
    ("t", np.array([[0, 0, 0, -np.inf]], np.float32), "NON_FINITE_INPUT", ("[0, 3]",)),
    ("t", np.zeros((33, 4), np.float32), "TOO_LARGE", ("33", "32")),
    ("nobody", X, "UNKNOWN_TASK", ("nobody",)),
]


class RawClient:
    """A DEALER without the SDK's checks."""

    def __init__(self, endpoint: str) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.sndhwm = 100_000
        self.socket.connect(endpoint)

    def send(self, *frames: bytes) -> None:
        self.socket.send_multipart(frames)

    def answer(self) -> wire.ToClient:
        assert self.socket.poll(10_000), "no answer"
        return wire.decode_to_client(self.socket.recv_multipart()[0])

    def code(self) -> str:
        reply = self.answer()
        assert isinstance(reply, wire.Reply)
        (result,) = reply.results
        return result.error.code if result.error is not None else "OK"

    def answers(self) -> int:
        """Answers that are there by now; all are well-formed."""
        n = 0
        while self.socket.poll(0):
            wire.decode_to_client(self.socket.recv_multipart()[0])
            n += 1
        return n

    def close(self) -> None:
        self._context.destroy(0)


def request_of(task: str = "t", rid: bytes = b"r" * 16, dims: tuple[int, ...] = (1, 4)) -> bytes:
    return wire.encode_to_dispatcher(wire.Request(rid, (task,), 5000, TensorDesc("float32", dims)))


# --- malformed frames ----------------------------------------------------------------------------


def rubbish(valid: Sequence[bytes], seed: int) -> Iterator[list[bytes]]:
    """Random frames, and the valid message with bytes altered, cut, inserted or frames repeated."""
    chance = random.Random(seed)
    for n in range(ROUNDS):
        if n % 3 == 0:
            yield [chance.randbytes(chance.randrange(200)) for _ in range(chance.randrange(1, 6))]
            continue
        frames = [bytearray(f) for f in valid]
        # Only in the header: elements that differ are no rubbish but other elements.
        header, at = frames[0], chance.randrange(len(frames[0]))
        match chance.randrange(4):
            case 0:
                header[at] = chance.randrange(256)
            case 1:
                del header[at:]
            case 2:
                header[at:at] = chance.randbytes(chance.randrange(1, 9))
            case _:
                frames += frames
        yield [bytes(f) for f in frames]


def push(endpoint: str, messages: Iterator[list[bytes]]) -> None:
    with zmq.Context() as context, context.socket(zmq.PUSH) as sock:
        sock.linger = 10_000
        sock.sndtimeo = 10_000
        sock.connect(endpoint)
        for frames in messages:
            sock.send_multipart(frames)


def item(stage_number: int = 1) -> Item:
    return Item(os.urandom(16), 1, 1, merge_paths([[stage_number]])[0], 0, 1, 10_000)


def lies(own: int) -> list[list[bytes]]:
    """Well-formed messages that lie: of handles, senders, requests and stages."""
    handles = [Handle(own, 0, 0, 9, 0), Handle(own, 60_000, 0, 1, 0), Handle(4711, 0, 0, 1, 0)]
    messages = [
        [encode_data(Data(s, 1, TensorDesc("float32", (1, 4), h), (item(n),)))]
        for h in handles
        for s in (own, 4711)
        for n in (1, 60_000)
    ]
    error = BlockFlowError("INTERNAL", "x" * 100)
    return [*messages, [encode_failure(Failure(4711, 1, error, (item(),)))]]


@dataclass(frozen=True, slots=True)
class Rubbish(ControlMessage):
    """What a broken control plane would send: the frame as it is."""

    frame: bytes = b""


NONSENSE: list[dict[str, Any]] = [
    {"k": "routes", "table": {}},
    {"k": "routes", "table": {"version": "x", "stages": [1], "tasks": None}},
    {"k": "set-policy", "stage": 60_000, "policy": {}, "threads": 1, "profile": {}},
    {"k": "set-policy", "stage": 1, "policy": {"policy": "nobody's"}, "threads": 1, "profile": {}},
    {
        "k": "set-policy",
        "stage": 1,
        "policy": {"policy": "none"},
        "threads": 0,
        "profile": {"a": 1},
    },
    {"k": "peer-gone", "incarnation": 2**63},
    {"k": "monitor", "hz": -1.0},
    {"k": "hello", "role": "worker", "name": "", "incarnation": 0, "pid": 0, "release": ""},
]
"""Well-formed messages of a control plane that says nothing of sense."""


def connect(endpoint: str) -> socket.socket:
    """A plain connection, without ZeroMQ."""
    kind, _, address = endpoint.partition("://")
    if kind == "tcp":
        host, _, port = address.rpartition(":")
        sock = socket.create_connection((host, int(port)), 5)
    else:
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(address)
    return sock


# --- updates -------------------------------------------------------------------------------------


def artifact_of(stage: Stage, name: str) -> Path:
    return stage.repository.root / name / stage.repository.manifest(name).artifact


def alter(stage: Stage) -> None:
    path = artifact_of(stage, "c")
    path.write_bytes(path.read_bytes() + b" ")


def cut_short(stage: Stage) -> None:
    path = artifact_of(stage, "c")
    path.write_bytes(path.read_bytes()[:-1])


def swap(stage: Stage) -> None:
    """A whole artifact, but that of another block."""
    artifact_of(stage, "c").write_bytes(artifact_of(stage, "slow").read_bytes())


def manifest(text: bytes | None, **change: Any) -> Callable[[Stage], None]:
    def spoil(stage: Stage) -> None:
        path = stage.repository.root / "c" / "manifest.json"
        path.write_bytes(
            json.dumps({**json.loads(path.read_bytes()), **change}).encode()
            if text is None
            else text
        )

    return spoil


SPOILT: list[tuple[Callable[[Stage], None], str]] = [
    (lambda s: artifact_of(s, "c").unlink(), "ARTIFACT_MISSING"),
    (alter, "DIGEST_MISMATCH"),
    (cut_short, "DIGEST_MISMATCH"),
    (swap, "DIGEST_MISMATCH"),
    (manifest(b""), "CORRUPT_MANIFEST"),
    (manifest(b"{"), "CORRUPT_MANIFEST"),
    (manifest(b"\xff\xfe\0"), "CORRUPT_MANIFEST"),
    (manifest(b"[" * 100_000), "CORRUPT_MANIFEST"),
    (manifest(b" " * 10_000_000), "CORRUPT_MANIFEST"),
    (manifest(None, name="d"), "CORRUPT_MANIFEST"),
    (manifest(None, artifact="../a/x"), "CORRUPT_MANIFEST"),
    (manifest(None, sha256="0" * 63), "CORRUPT_MANIFEST"),
    (manifest(None, contract=None), "CORRUPT_MANIFEST"),
    (manifest(None, surplus=1), "CORRUPT_MANIFEST"),
    (manifest(None, format="pickle"), "UNSUPPORTED_FORMAT"),
]


# --- REST ----------------------------------------------------------------------------------------

BODIES: list[tuple[bytes, str]] = [
    (b"", "BAD_BODY"),
    (b"{", "BAD_BODY"),
    (b"not json", "BAD_BODY"),
    (b"\xff\xfe{}", "BAD_BODY"),
    (b'{"blocks": NaN}', "BAD_BODY"),
    (b'{"blocks": 1e999}', "BAD_BODY"),
    (b"[" * 500_000, "BAD_BODY"),
    (b'{"a":' * 150_000, "BAD_BODY"),
    (b"9" * 100_000, "BAD_BODY"),
    (b" " * (limits.MAX_REST_BODY_BYTES + 1), "BODY_TOO_LARGE"),
    (b"null", "INVALID_TOPOLOGY"),
    (b"[]", "INVALID_TOPOLOGY"),
    (b'"x"', "INVALID_TOPOLOGY"),
    (b'{"blocks": {"a": 1}, "tasks": []}', "INVALID_TOPOLOGY"),
    (b'{"blocks": [1, null, [], true], "tasks": {"t": "a"}}', "INVALID_TOPOLOGY"),
    (b'{"blocks": ["a"], "blocks": ["b"], "tasks": {}}', "INVALID_TOPOLOGY"),
    (b'{"blocks": ["../a", "a/b", "", "\\u0000"], "tasks": {}}', "INVALID_TOPOLOGY"),
    (b'{"blocks": [{"name": "a", "replicas": 1e9}], "tasks": {}}', "INVALID_TOPOLOGY"),
    (b'{"blocks": [{"name": "a", "threads": -1}], "tasks": {}}', "INVALID_TOPOLOGY"),
]

NO_HTTP = [
    b"\x00\xff" * 500 + b"\r\n\r\n",
    b"POST /v1/system-update HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
    b"POST /v1/monitor HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Content-Length: 50\r\n\r\n{",  # and hangs up in the middle
    b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
]
