"""Bad input of every kind at one running system: a typed error, it serves on, nothing leaks.

One system serves all cases of this module. After each case a good request must be answered by the
very processes that were there before; at the end there are no slots in use, no requests in flight,
and no more processes, descriptors, threads or files than at the beginning.
"""

from __future__ import annotations

import json
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import zmq
from control_rig import echo_repository

from blockflow.client import Client
from blockflow.control.system import System
from blockflow.core import limits
from blockflow.core.errors import CODES, BlockFlowError
from blockflow.core.model import TensorSpec
from blockflow.core.routing import merge_paths
from blockflow.launch.local import TemplateLauncher
from blockflow.repository.echo import save_echo
from blockflow.repository.repository import BlockRepository
from blockflow.wire import client as wire
from blockflow.wire.codec import encode
from blockflow.wire.control import ControlMessage, Hello, Ready, Stats, encode_control
from blockflow.wire.data import Data, Failure, Item, encode_data, encode_failure
from blockflow.wire.tensor import Handle, TensorDesc

X = np.arange(4, dtype=np.float32).reshape(1, 4)
BODY = {"blocks": ["a", "b", "slow"], "tasks": {"t": ["a", "b"], "u": ["a"], "s": ["slow"]}}
ROUNDS = 400
SETTLE_S = 15.0
JSON_TYPE = {"Content-Type": "application/json"}


def wait_until(
    test: Callable[[], Any], what: str | Callable[[], str] = "it did not come to be"
) -> None:
    """Poll a fact about other processes, which cannot be waited for otherwise."""
    end = time.monotonic() + SETTLE_S
    while not test():
        if time.monotonic() >= end:
            pytest.fail(what() if callable(what) else what)
        time.sleep(0.01)


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
        out |= {int(p) for p in Path(f"/proc/{pid}/task/{task}/children").read_text().split()}
    return out


def no_more(now: Any, before: Any) -> bool:
    if isinstance(before, dict):
        return all(no_more(now[k], before[k]) for k in before)
    return bool(now <= before) if isinstance(before, int) else bool(now == before)


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    root = tmp_path_factory.mktemp("bad")
    repository = echo_repository(root / "blocks", slow={"delay_ms": 300})
    save_echo(repository, "wide", TensorSpec("float32", ("rows", 8)))
    save_echo(repository, "ints", TensorSpec("int64", ("rows", 4)))
    with (
        closing(TemplateLauncher()) as launcher,
        System(
            repository=root / "blocks",
            state_dir=root / "state",
            rest_port=0,
            client_port=0,
            launcher=launcher,
        ) as system,
        httpx.Client(base_url=system.rest_url, timeout=30) as http,
        Client(system.client_endpoint) as client,
    ):
        system.apply(BODY)
        system.commands.monitor(20.0)
        made = Stage(system, http, client, repository)
        made.processes = made.pids()
        made.serves()
        client.infer("s", X)
        wait_until(lambda: all(made.extra(n) for n in made.processes))
        made.before = made.holdings()
        yield made


@pytest.fixture(autouse=True)
def serves_on(stage: Stage) -> Iterator[None]:
    epoch = stage.http.get("/v1/epoch").json()["epoch"]
    yield
    stage.serves()
    assert stage.http.get("/v1/epoch").json()["epoch"] == epoch


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


@pytest.mark.parametrize(("task", "x", "code", "words"), BAD_TENSORS)
def test_a_tensor_that_does_not_fit(
    stage: Stage, task: str, x: Any, code: str, words: Sequence[str]
) -> None:
    with pytest.raises(BlockFlowError) as e:
        stage.client.infer(task, x, deadline_s=10)
    assert e.value.code == code
    assert all(w in str(e.value) for w in words), str(e.value)


def test_one_bad_task_of_several(stage: Stage) -> None:
    several = {"nobody": "UNKNOWN_TASK", "t": "INVALID_REQUEST", "s": "INVALID_REQUEST"}
    for other, code in several.items():  # unknown, twice, of another first block
        with pytest.raises(BlockFlowError) as e:
            stage.client.infer(["t", other], X, deadline_s=10)
        assert e.value.code == code


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


@pytest.fixture(params=[0, 1], ids=["tcp", "ipc"])
def raw(stage: Stage, request: pytest.FixtureRequest) -> Iterator[RawClient]:
    client = RawClient(stage.system.client_endpoints[request.param])
    yield client
    client.close()


def request_of(task: str = "t", rid: bytes = b"r" * 16, dims: tuple[int, ...] = (1, 4)) -> bytes:
    return wire.encode_to_dispatcher(wire.Request(rid, (task,), 5000, TensorDesc("float32", dims)))


def test_a_duplicate_id_is_refused_and_the_first_is_answered(raw: RawClient) -> None:
    raw.send(request_of("s"), X.tobytes())
    raw.send(request_of("t"), X.tobytes())
    assert [raw.code(), raw.code()] == ["DUPLICATE_REQUEST", "OK"]
    raw.send(request_of("t"), X.tobytes())  # the id is free again
    assert raw.code() == "OK"


def test_elements_that_are_not_what_was_announced(raw: RawClient) -> None:
    for frames in ([], [b""], [X.tobytes()[:-1]], [X.tobytes() + b"x"]):
        raw.send(request_of(), *frames)
        assert raw.code() == "MALFORMED_MESSAGE"


def test_an_announced_giant_is_refused_before_it_comes(raw: RawClient) -> None:
    rows = limits.MAX_MESSAGE_BYTES // 16 + 1
    giant = [1, 1, b"r" * 16, ["t"], 5000, [3, [rows, 4]]]
    good = wire.encode_to_dispatcher(wire.Describe(b"d" * 16))
    for header in (encode(giant), b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\x91" * 4000):
        raw.send(header)
    raw.send(good)
    while not isinstance(raw.answer(), wire.Description):
        pass


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


def test_rubbish_at_the_clients_socket(stage: Stage, raw: RawClient) -> None:
    before = stage.count("dispatcher", "malformed_client")
    for frames in rubbish([request_of(), X.tobytes()], seed=1):
        raw.send(*frames)
        raw.answers()
    raw.send(wire.encode_to_dispatcher(wire.Describe(b"d" * 16)))
    while not isinstance(raw.answer(), wire.Description):  # the order is kept: all of it was read
        pass
    wait_until(lambda: stage.count("dispatcher", "malformed_client") - before > ROUNDS / 3)
    assert stage.count("dispatcher", "defects") == 0


def push(endpoint: str, messages: Iterator[list[bytes]]) -> None:
    with zmq.Context() as context, context.socket(zmq.PUSH) as sock:
        sock.linger = 10_000
        sock.sndtimeo = 10_000
        sock.connect(endpoint)
        for frames in messages:
            sock.send_multipart(frames)


def item(stage_number: int = 1) -> Item:
    return Item(os.urandom(16), 1, 1, merge_paths([[stage_number]])[0], 0, 1, 10_000)


@pytest.mark.parametrize("name", ["dispatcher", "a#0"])
def test_rubbish_at_a_data_socket(stage: Stage, name: str) -> None:
    counter = "malformed_data" if name == "dispatcher" else "malformed"
    before = stage.count(name, counter)
    data = Data(999, time.monotonic_ns(), TensorDesc("float32", (1, 4)), (item(),))
    push(stage.endpoint(name), rubbish([encode_data(data), X.tobytes()], seed=2))
    wait_until(lambda: stage.count(name, counter) - before > ROUNDS / 3)
    assert stage.count("dispatcher", "defects") == 0


@pytest.mark.parametrize("name", ["dispatcher", "a#0"])
def test_forged_handles_and_strangers(stage: Stage, name: str) -> None:
    """Well-formed messages that lie: of handles, senders, requests and stages."""
    own = stage.system.commands.worker("dispatcher")["incarnation"]
    handles = [Handle(own, 0, 0, 9, 0), Handle(own, 60_000, 0, 1, 0), Handle(4711, 0, 0, 1, 0)]
    messages = [
        [encode_data(Data(s, 1, TensorDesc("float32", (1, 4), h), (item(n),)))]
        for h in handles
        for s in (own, 4711)
        for n in (1, 60_000)
    ]
    error = BlockFlowError("INTERNAL", "x" * 100)
    messages += [[encode_failure(Failure(4711, 1, error, (item(),)))]]
    in_flight = stage.client.submit("s", X)
    push(stage.endpoint(name), iter(messages))
    assert np.array_equal(in_flight.result(10).value, X)


def test_rubbish_at_the_controllers_socket(stage: Stage) -> None:
    counters = stage.system.manager.controller.counters
    before = counters.malformed + counters.unknown
    victim = stage.system.commands.worker("a#0")["incarnation"]
    sent = 0
    with zmq.Context() as context:
        for identity in (b"4711", b"\x00\xff", b""):  # of an unknown one, of no number, none
            with context.socket(zmq.DEALER) as sock:
                sock.linger = 10_000
                if identity:
                    sock.identity = identity
                sock.connect(stage.system.manager.controller.endpoint)
                messages = [*rubbish([encode_control(Stats(victim, 1, [], {}))], seed=3)]
                messages += [[encode_control(Hello("worker", "a#0", victim, 1, "x"))]]
                messages += [[encode_control(Ready(victim, "ipc:///nowhere"))]]
                for frames in messages:
                    sock.send_multipart(frames)
                    sent += 1
    wait_until(lambda: counters.malformed + counters.unknown - before >= sent)
    assert stage.endpoint("a#0") != "ipc:///nowhere"


@dataclass(frozen=True, slots=True)
class Rubbish(ControlMessage):
    """What a broken control plane would send: the frame as it is."""

    frame: bytes = b""


@pytest.mark.parametrize("name", ["dispatcher", "a#0"])
def test_rubbish_from_the_controller(
    stage: Stage, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "blockflow.control.controller.encode_control",
        lambda m: m.frame if isinstance(m, Rubbish) else encode_control(m),
    )
    controller = stage.system.manager.controller
    incarnation = stage.system.commands.worker(name)["incarnation"]
    valid = encode({"v": 1, "k": "set-policy", "stage": 1, "policy": {"policy": "none"}})
    for frames in rubbish([valid], seed=4):
        controller.send(incarnation, Rubbish(frames[0]))
    nonsense: list[dict[str, Any]] = [
        {"k": "routes", "table": {}},
        {"k": "routes", "table": {"version": "x", "stages": [1], "tasks": None}},
        {"k": "set-policy", "stage": 60_000, "policy": {}},
        {"k": "set-policy", "stage": 1, "policy": {"policy": "nobody's"}},
        {"k": "peer-gone", "incarnation": 2**63},
        {"k": "monitor", "hz": -1.0},
        {"k": "hello", "role": "worker", "name": "", "incarnation": 0, "pid": 0, "release": ""},
    ]
    for message in nonsense:
        controller.send(incarnation, Rubbish(encode({"v": 1, **message})))
    stage.system.commands.monitor(20.0)
    answers = stage.http.post("/v1/ping").json()  # behind all of it in the same queue
    assert answers["ok"], answers


def test_connections_that_speak_no_zeromq(stage: Stage) -> None:
    """Raw bytes, silence and half a greeting on every socket, tcp and ipc."""
    endpoints = [
        *stage.system.client_endpoints,
        stage.system.manager.controller.endpoint,
        *(stage.endpoint(n) for n in stage.processes),
    ]
    greeting = b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\0"
    held = []
    for endpoint in endpoints:
        for text in (b"", b"GET / HTTP/1.1\r\n\r\n", random.Random(5).randbytes(5000), greeting):
            kind, _, address = endpoint.partition("://")
            if kind == "tcp":
                host, _, port = address.rpartition(":")
                sock = socket.create_connection((host, int(port)), 5)
            else:
                sock = socket.socket(socket.AF_UNIX)
                sock.connect(address)
            held.append(sock)
            with suppress(OSError):  # refused already
                sock.sendall(text)
    stage.serves()  # with all of them open
    for sock in held:
        sock.close()


# --- updates -------------------------------------------------------------------------------------


def test_unknown_names_and_fields_all_at_once(stage: Stage) -> None:
    body = {
        "blocks": ["a", "aa", {"name": "b", "replica": 2}],
        "tasks": {"t": ["a", "zz"], "u": []},
        "colour": 1,
    }
    error = update(stage, body)
    assert error["code"] == "INVALID_TOPOLOGY"
    paths = {p["path"]: p for p in error["problems"]}
    assert {"$.colour", "$.blocks[1]", "$.blocks[2].replica", "$.tasks.t[1]", "$.tasks.u"} <= set(
        paths
    )
    assert "UNKNOWN_BLOCK" in paths["$.blocks[1]"]["message"]


@pytest.mark.parametrize(
    ("other", "words"),
    [("wide", ("[rows, 4]", "[rows, 8]")), ("ints", ("float32", "int64"))],
)
def test_contracts_that_do_not_fit_show_both_sides(
    stage: Stage, other: str, words: Sequence[str]
) -> None:
    error = update(stage, {"blocks": ["a", other], "tasks": {"t": ["a", other]}})
    assert error["code"] == "INVALID_TOPOLOGY"
    (problem,) = error["problems"]
    assert problem["path"] == "$.tasks.t[1]"
    assert all(w in problem["message"] for w in (*words, "a", other)), problem


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


@pytest.mark.parametrize(("spoil", "code"), SPOILT)
def test_a_spoilt_block(stage: Stage, spoil: Callable[[Stage], None], code: str) -> None:
    folder = stage.repository.root / "c"
    kept = {p.name: p.read_bytes() for p in folder.iterdir()}
    try:
        spoil(stage)
        error = update(stage, {"blocks": ["a", "c"], "tasks": {"t": ["a", "c"]}})
        assert code in json.dumps(error), error
        assert error["code"] in ("INVALID_TOPOLOGY", "UPDATE_FAILED")
        listed = stage.http.get("/v1/repository")
        assert listed.status_code == 200  # one bad block does not hide the others
        assert {"a", "b"} <= {b["name"] for b in listed.json()["blocks"]}
    finally:
        for name, content in kept.items():
            (folder / name).write_bytes(content)


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


@pytest.mark.parametrize(("body", "code"), BODIES, ids=lambda v: str(v[:24]))
def test_bodies_that_are_no_update(stage: Stage, body: bytes, code: str) -> None:
    answer = stage.http.post("/v1/system-update", content=body, headers=JSON_TYPE)
    assert refused(answer)["code"] == code
    # And in pieces of unknown length.
    answer = stage.http.post("/v1/system-update", content=iter([body]), headers=JSON_TYPE)
    assert refused(answer)["code"] == code


def test_requests_that_make_no_sense(stage: Stage) -> None:
    http = stage.http
    cases = [
        (http.post("/v1/blocks/nobody/drain"), "UNKNOWN_BLOCK"),
        (http.post("/v1/blocks/%2e%2e%2fa/stop"), "UNKNOWN_BLOCK"),
        (http.post("/v1/monitor", json={"on": "yes"}), "BAD_BODY"),
        (http.post("/v1/monitor", json={"on": True, "hz": -1}), "INVALID_REQUEST"),
        (http.post("/v1/kpis/store", json={"file": "../../x.jsonl"}), "INVALID_REQUEST"),
        (http.post("/v1/system-update", content=b"{}"), "UNSUPPORTED_MEDIA"),
        (http.get("/v1/nothing"), "NOT_FOUND"),
        (http.delete("/v1/blocks/a"), "METHOD_NOT_ALLOWED"),
    ]
    for answer, code in cases:
        assert refused(answer)["code"] == code, answer.request.url


def test_connections_that_speak_no_http(stage: Stage) -> None:
    rest = stage.system.rest
    texts = [
        b"\x00\xff" * 500 + b"\r\n\r\n",
        b"POST /v1/system-update HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/monitor HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: 50\r\n\r\n{",  # and hangs up in the middle
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ]
    for text in texts:
        with socket.create_connection((rest.host, rest.port), 5) as s:
            s.settimeout(15)
            try:
                s.sendall(text)
                s.shutdown(socket.SHUT_WR)
                while s.recv(65536):
                    pass
            except OSError:
                pass  # a refused connection may be reset


# --- the machine ---------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["rest_port", "client_port"])
def test_ports_that_this_very_system_has(stage: Stage, which: str, tmp_path: Path) -> None:
    taken = {
        "rest_port": stage.system.rest.port,
        "client_port": int(stage.system.client_endpoint.rpartition(":")[2]),
    }[which]
    ports: dict[str, Any] = {"rest_port": 0, "client_port": 0, which: taken}
    with pytest.raises(BlockFlowError) as e:
        System(repository=tmp_path, state_dir=tmp_path / "state", **ports).start()
    assert e.value.code == "PORT_IN_USE"
    assert str(taken) in e.value.message
    assert e.value.hint


def test_many_bad_ones_at_once_do_not_hold_up_a_good_one(stage: Stage) -> None:
    stop = threading.Event()
    codes: set[str] = set()

    def bad(x: Any) -> None:
        with Client(stage.system.client_endpoint) as client:
            while not stop.is_set():
                try:
                    client.infer("t", x, deadline_s=10)
                except BlockFlowError as e:
                    codes.add(e.code)

    inputs = [X.astype(np.float64), np.full((1, 4), np.nan, np.float32)]
    threads = [threading.Thread(target=bad, args=(x,)) for x in inputs]
    for t in threads:
        t.start()
    try:
        wait_until(lambda: len(codes) == len(inputs))
        for _ in range(50):
            assert np.array_equal(stage.client.infer("t", X, deadline_s=5).value, X)
    finally:
        stop.set()
        for t in threads:
            t.join()
    assert codes == {"CONTRACT_MISMATCH", "NON_FINITE_INPUT"}


def again(stage: Stage) -> None:
    """Once more all that opens connections or maps memory."""
    for endpoint in stage.system.client_endpoints:
        raw = RawClient(endpoint)
        test_rubbish_at_the_clients_socket(stage, raw)
        raw.close()
    for name in ("dispatcher", "a#0"):
        test_rubbish_at_a_data_socket(stage, name)
        test_forged_handles_and_strangers(stage, name)
    test_rubbish_at_the_controllers_socket(stage)
    test_connections_that_speak_no_zeromq(stage)
    test_connections_that_speak_no_http(stage)


def test_nothing_has_leaked(stage: Stage) -> None:
    """The last of this module: judges all that went before.

    Connections and mappings are kept once they are made, so descriptors are judged by a second
    round, which must not add any.
    """
    again(stage)
    settled = stage.holdings()["descriptors"]
    again(stage)
    wait_until(lambda: stage.extra("dispatcher")["inflight"] == 0, "requests are in flight")
    wait_until(lambda: not any(stage.slots_used().values()), "slots are in use")
    assert stage.extra("dispatcher")["backlog_bytes"] == 0
    assert stage.count("dispatcher", "defects") == 0
    left: list[tuple[Any, Any]] = []

    def clean() -> bool:
        now = stage.holdings()
        left[:] = [(now["descriptors"], settled), (now, {**stage.before, "descriptors": {}})]
        return all(no_more(a, b) for a, b in left)

    wait_until(clean, lambda: f"left (now, before): {left}")
