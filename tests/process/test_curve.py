"""CURVE between real processes: who has an authorised key gets in, nobody else does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import zmq
from control_rig import echo_repository
from system_rig import served
from up_rig import refused
from warm_rig import Warm
from zmq.utils.monitor import recv_monitor_message

from blockflow.bench.fuzz.sockets import ClientTarget, HandshakeTarget
from blockflow.cli.exits import ExitCode
from blockflow.cli.main import main
from blockflow.client import Client
from blockflow.control.settings import ControlSettings
from blockflow.control.system import System
from blockflow.core.errors import BlockFlowError
from blockflow.launch.base import Launcher
from blockflow.monitor.rest import RestClient
from blockflow.tensormq.curve import LINK_FILE, Gatekeeper, as_client
from blockflow.tensormq.keys import (
    ClientKeys,
    KeyPair,
    Keyring,
    client_keys,
    read_key_file,
    write_key_file,
)
from blockflow.tensormq.sockets import new_context

X = np.arange(4, dtype=np.float32).reshape(1, 4)
CHAIN = {"blocks": ["a", "b"], "tasks": {"t": ["a", "b"]}, "transport": "tcp"}
WAIT_S = 20.0
NO_KEY = ("UNAUTHORIZED", "NOT_RUNNING")
FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


@dataclass
class Secured:
    """A system with keys whose workers talk by tcp, and the files of one authorised client."""

    system: System
    ring: Keyring
    folder: Path

    @property
    def tcp(self) -> str:
        return self.system.client_endpoint.replace("0.0.0.0", "127.0.0.1")

    def key_file(self, name: str, *, authorised: bool = False) -> Path:
        pair, path = KeyPair.make(), self.folder / f"{name}.key"
        write_key_file(path, pair, self.ring.server().public)
        if authorised:
            self.ring.authorise(name, pair.public)
        return path


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory, launcher: Launcher) -> Iterator[Secured]:
    root = tmp_path_factory.mktemp("secured")
    echo_repository(root / "blocks")
    ring = Keyring(root / "keys")
    ring.create()
    settings = ControlSettings(
        repository=root / "blocks",
        state_dir=root / "state",
        client_host="0.0.0.0",
        rest_port=0,
        client_port=0,
        keys=ring.folder,
    )
    with System(settings, launcher=launcher) as system:
        system.apply(CHAIN)
        yield Secured(system, ring, root)


def shakes_hands(endpoint: str, kind: int, keys: ClientKeys | None) -> bool:
    """Whether a connection to ``endpoint`` gets past the handshake; waits for ZeroMQ's word."""
    with zmq.Context() as context, context.socket(kind) as sock:
        sock.linger = 0
        monitor = sock.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | FAILED)
        if keys is not None:
            as_client(keys)(sock)
        sock.connect(endpoint)
        try:
            assert monitor.poll(WAIT_S * 1000), "nothing happened"
            return bool(recv_monitor_message(monitor)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED)
        finally:
            sock.disable_monitor()
            monitor.close(0)


def outcome(address: str, **kw: Any) -> str:
    """OK, or the code that a call ends with."""
    with Client(address, connect_timeout_s=WAIT_S, **kw) as client:
        try:
            assert np.array_equal(client.infer("t", X, deadline_s=WAIT_S).value, X)
        except BlockFlowError as e:
            return e.code
    return "OK"


def test_an_authorised_client_is_served(secured: Secured) -> None:
    assert secured.tcp.startswith("tcp://127.0.0.1:")
    assert outcome(secured.tcp, client_keys=secured.key_file("alice", authorised=True)) == "OK"


def test_malformed_frames_before_and_behind_the_handshake(secured: Secured) -> None:
    host, _, port = secured.tcp.removeprefix("tcp://").rpartition(":")
    key_file = secured.key_file("fuzzer", authorised=True)
    pids = {w["name"]: w["pid"] for w in secured.system.commands.workers()}
    keys = as_client(client_keys(key_file))
    targets = [
        HandshakeTarget(host, int(port), 20),
        ClientTarget(secured.tcp, 20, "clients, CURVE", keys),
    ]
    for target in targets:
        with closing(target):
            for frame in target.mutator.frames(200):
                target.send(frame)
    assert outcome(secured.tcp, client_keys=key_file) == "OK"
    assert pids == {w["name"]: w["pid"] for w in secured.system.commands.workers()}


def test_on_the_unix_socket_no_key_is_needed(secured: Secured) -> None:
    ipc = next(e for e in secured.system.client_endpoints if e.startswith("ipc://"))
    assert outcome(ipc) == "OK"
    assert outcome(ipc, client_keys=secured.key_file("needless")) == "OK"


def test_a_stranger_is_told(secured: Secured) -> None:
    keys = secured.key_file("stranger")
    with Client(secured.tcp, connect_timeout_s=WAIT_S, client_keys=keys) as client:
        with pytest.raises(BlockFlowError) as e:
            client.infer("t", X)
        assert e.value.code == "UNAUTHORIZED"
        assert "client_keys" in e.value.hint


def test_without_a_key_there_is_no_way_in(secured: Secured) -> None:
    """ZeroMQ may close before it has said why: then it looks like no Dispatcher at all."""
    with Client(secured.tcp, connect_timeout_s=0.5) as client:
        with pytest.raises(BlockFlowError) as e:
            client.infer("t", X)
        assert e.value.code in NO_KEY
        assert client.counters().connects == 0


def test_a_client_does_not_talk_to_another_server(secured: Secured) -> None:
    own = KeyPair.make()
    secured.ring.authorise("carol", own.public)
    right = ClientKeys(own, secured.ring.server().public)
    assert shakes_hands(secured.tcp, zmq.DEALER, right)
    assert not shakes_hands(secured.tcp, zmq.DEALER, ClientKeys(own, KeyPair.make().public))


def test_authorised_and_revoked_while_all_runs(secured: Secured) -> None:
    """One client: refused, then let in by its next call; after it is revoked, no new connection."""
    file = secured.key_file("dave")
    with Client(secured.tcp, connect_timeout_s=WAIT_S, client_keys=file) as client:
        with pytest.raises(BlockFlowError, match="UNAUTHORIZED"):
            client.infer("t", X)
        secured.ring.authorise("dave", read_key_file(file).public)
        assert succeeds(client)
        secured.ring.revoke("dave")
        assert succeeds(client)  # the connection that stands goes on
    assert outcome(secured.tcp, client_keys=file) == "UNAUTHORIZED"


def succeeds(client: Client) -> bool:
    try:
        client.infer("t", X)
    except BlockFlowError:
        return False
    return True


def test_links_between_workers_are_closed_to_others(secured: Secured) -> None:
    assert_closed_links(secured.system)


def test_links_between_workers_need_no_keys_to_be_closed(
    tmp_path: Path, launcher: Launcher
) -> None:
    echo_repository(tmp_path / "blocks")
    with served(tmp_path, CHAIN, launcher) as system:
        assert outcome(system.client_endpoint) == "OK"
        assert_closed_links(system)


def assert_closed_links(system: System) -> None:
    endpoint = str(system.commands.worker("a#0")["endpoint"])
    assert endpoint.startswith("tcp://")
    assert (system.run_dir / LINK_FILE).stat().st_mode & 0o077 == 0
    link = read_key_file(system.run_dir / LINK_FILE)
    stranger = KeyPair.make()
    assert not shakes_hands(endpoint, zmq.PUSH, None)
    assert not shakes_hands(endpoint, zmq.PUSH, ClientKeys(stranger, link.public))
    assert shakes_hands(endpoint, zmq.PUSH, ClientKeys(link, link.public))


def test_rest_asks_for_the_token_and_commands_have_it(
    secured: Secured, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = secured.system.rest_url
    assert httpx.get(f"{url}/v1/status").status_code == 401
    with pytest.raises(BlockFlowError, match="UNAUTHORIZED"):
        RestClient(url).get("/v1/status")
    monkeypatch.setenv("BLOCKFLOW_TOKEN_FILE", str(secured.ring.token_file))
    assert RestClient(url).get("/v1/status")["ready"] is True
    monkeypatch.setenv("BLOCKFLOW_TOKEN_FILE", str(secured.folder / "none"))
    with pytest.raises(BlockFlowError, match="UNAUTHORIZED"):
        RestClient(url)


def patiently(command: list[str]) -> int:
    """The command's exit status; it connects within two seconds, which a busy machine may miss."""
    end = time.monotonic() + WAIT_S
    while (status := main(command)) == ExitCode.NOT_RUNNING and time.monotonic() < end:
        pass
    return status


def test_infer_takes_a_key_file(
    secured: Secured, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = str(secured.key_file("erin", authorised=True))
    command = ["infer", "t", "--random", "--address", secured.tcp, "--json"]
    assert patiently([*command, "--client-keys", file]) == ExitCode.OK
    monkeypatch.setenv("BLOCKFLOW_CLIENT_KEYS", file)
    assert patiently(command) == ExitCode.OK
    capsys.readouterr()
    monkeypatch.delenv("BLOCKFLOW_CLIENT_KEYS")
    assert main(command) in (ExitCode.BAD_INPUT, ExitCode.NOT_RUNNING)
    assert json.loads(capsys.readouterr().out)["error"]["code"] in NO_KEY


def test_a_gatekeeper_with_a_defect_lets_nobody_in() -> None:
    def defect(key: bytes) -> bool:
        raise RuntimeError(key)

    own, context = KeyPair.make(), new_context()
    keeper = Gatekeeper(context)
    with context.socket(zmq.ROUTER) as sock:
        sock.linger = 0
        keeper.protect("test", own, defect)(sock)
        port = sock.bind_to_random_port("tcp://127.0.0.1")
        keys = ClientKeys(KeyPair.make(), own.public)
        for _ in range(2):  # and its thread goes on
            assert not shakes_hands(f"tcp://127.0.0.1:{port}", zmq.DEALER, keys)
    context.term()
    assert keeper.refused == 2


def test_nobody_at_the_gate_lets_nobody_in() -> None:
    """ZeroMQ's own default would be to let everybody in."""
    own, context = KeyPair.make(), new_context()
    other = zmq.Context()
    protect = Gatekeeper(other).protect("test", own, lambda key: True)  # answers elsewhere
    with context, other, context.socket(zmq.ROUTER) as sock:
        sock.linger = 0
        protect(sock)
        port = sock.bind_to_random_port("tcp://127.0.0.1")
        keys = ClientKeys(KeyPair.make(), own.public)
        assert not shakes_hands(f"tcp://127.0.0.1:{port}", zmq.DEALER, keys)


@pytest.mark.parametrize("option", ["--host", "--client-host"])
def test_the_command_refuses_an_open_address(option: str, tmp_path: Path, warm: Warm) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "BLOCKFLOW_KEYS"}
    ports = ("--port", "0", "--client-port", "0", "--state-dir", str(tmp_path / "state"))
    child = warm.popen(
        [sys.executable, "-m", "blockflow", "up", option, "0.0.0.0", *ports],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
        env=environment,
    )
    _, errors = refused(child)
    assert "without a token and CURVE keys" in errors and "keys init" in errors
    assert not (tmp_path / "state").exists()  # refused before anything was made
