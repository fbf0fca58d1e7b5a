"""Bad input of every kind at one running system: a typed error, it serves on, nothing leaks.

One system serves all cases of this module. After each case a good request must be answered by the
very processes that were there before; at the end there are no slots in use, no requests in flight,
and no more processes, descriptors, threads or files than at the beginning.
"""

from __future__ import annotations

import json
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from bad_input_rig import (
    BAD_TENSORS,
    BODIES,
    NO_HTTP,
    NONSENSE,
    ROUNDS,
    SPOILT,
    RawClient,
    Rubbish,
    Stage,
    X,
    comes_true,
    connect,
    item,
    lies,
    no_more,
    push,
    refused,
    request_of,
    rubbish,
    staged,
    update,
    wait_until,
)
from warm_rig import Warm

from blockflow.client import Client
from blockflow.control.system import System
from blockflow.core import limits
from blockflow.core.errors import BlockFlowError
from blockflow.wire import client as wire
from blockflow.wire.codec import encode
from blockflow.wire.control import Hello, Ready, SetPolicy, Stats, encode_control
from blockflow.wire.data import Data, encode_data
from blockflow.wire.tensor import TensorDesc

ROUNDS_OF_ALL = 3
JSON_TYPE = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory, warm: Warm) -> Iterator[Stage]:
    with staged(tmp_path_factory.mktemp("bad"), warm) as made:
        yield made


@pytest.fixture(autouse=True)
def serves_on(stage: Stage) -> Iterator[None]:
    epoch = stage.http.get("/v1/epoch").json()["epoch"]
    yield
    stage.serves()
    assert stage.http.get("/v1/epoch").json()["epoch"] == epoch


# --- requests ------------------------------------------------------------------------------------


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


@pytest.fixture(params=[0, 1], ids=["tcp", "ipc"])
def raw(stage: Stage, request: pytest.FixtureRequest) -> Iterator[RawClient]:
    client = RawClient(stage.system.client_endpoints[request.param])
    yield client
    client.close()


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
    messages = lies(stage.system.commands.worker("dispatcher")["incarnation"])
    in_flight = stage.client.submit("s", X)
    push(stage.endpoint(name), iter(messages))
    assert np.array_equal(in_flight.result(10).value, X)


def test_rubbish_at_the_controllers_socket(stage: Stage) -> None:
    counters = stage.system.manager.controller.counters
    before = counters.malformed + counters.unknown
    victim = stage.system.commands.worker("a#0")["incarnation"]
    sent = 0
    with zmq.Context() as context:
        for identity in (b"4711", b"1" * 40, b"\x00\xff", b""):  # unknown, no number, none
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
    valid = encode_control(SetPolicy(1, {"policy": "none"}))
    for frames in rubbish([valid], seed=4):
        controller.send(incarnation, Rubbish(frames[0]))
    for message in NONSENSE:
        sent = encode({"v": limits.PROTOCOL_VERSION, **message})
        controller.send(incarnation, Rubbish(sent))
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
            held.append(connect(endpoint))
            with suppress(OSError):  # refused already
                held[-1].sendall(text)
    stage.serves()  # with all of them open
    for sock in held:
        sock.close()


# --- updates -------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(("body", "code"), BODIES, ids=lambda v: str(v[:24]))
def test_bodies_that_are_no_update(stage: Stage, body: bytes, code: str) -> None:
    answer = stage.http.post("/v1/system-update", content=body, headers=JSON_TYPE)
    assert refused(answer)["code"] == code
    # In pieces of unknown length it is not even looked at.
    answer = stage.http.post("/v1/system-update", content=iter([body]), headers=JSON_TYPE)
    assert refused(answer)["code"] == "INVALID_REQUEST"


def test_connections_that_speak_no_http(stage: Stage) -> None:
    rest = stage.system.rest
    for text in NO_HTTP:
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

    Connections and mappings are kept once they are made, and a broken one is opened again when it
    is needed; and whoever has something to log has a thread for that from then on. So descriptors
    and threads are judged by rounds: what leaks grows with every one of them.
    """
    again(stage)
    left: list[tuple[Any, Any]] = []
    grow = ("descriptors", "threads")

    def clean() -> bool:
        now = stage.holdings()
        left[:] = [(now, {**stage.before, **{name: settled[name] for name in grow}})]
        return all(no_more(a, b) for a, b in left)

    for _ in range(ROUNDS_OF_ALL):
        settled = stage.holdings()
        again(stage)
        wait_until(lambda: stage.extra("dispatcher")["inflight"] == 0, "requests are in flight")
        wait_until(lambda: not any(stage.slots_used().values()), "slots are in use")
        if comes_true(clean):
            break
    else:
        pytest.fail(f"left (now, before): {left}")
    assert stage.extra("dispatcher")["backlog_bytes"] == 0
    assert stage.count("dispatcher", "defects") == 0
