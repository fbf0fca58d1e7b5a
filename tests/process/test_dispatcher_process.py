"""The Dispatcher as a process of its own: its life with the Controller, its signals, its end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import zmq
from dispatcher_rig import PATIENCE_S, FakeWorker, RawClient, launch_spec, task, wait_until
from warm_rig import Warm

from blockflow.core.errors import SystemError_
from blockflow.core.routing import RouteTable, StageRoute
from blockflow.dispatcher import main
from blockflow.dispatcher.monitor import StatsThread
from blockflow.tensormq.agent import LIFELINE_ENV, ORPHAN_STATUS
from blockflow.tensormq.grants import MIN_TENSOR_BYTES
from blockflow.tensormq.janitor import RunDir, run_root
from blockflow.tensormq.sockets import bind_router, new_context
from blockflow.wire.control import (
    Drained,
    Hello,
    Ping,
    Pong,
    Ready,
    Routes,
    RoutesApplied,
    StartFailed,
    Stop,
    decode_control,
    encode_control,
)

X = np.ones((1, 4), np.float32)
CODE = """
import json, sys
from blockflow.dispatcher.main import run
sys.exit(run(json.loads(sys.argv[1])))
"""
TELLS = """
import json, sys
from blockflow.dispatcher.main import run
from blockflow.launch.preload import BASE_MODULES, preload
preload(m for m in BASE_MODULES if m.split(".")[0] in ("encodings", "msgpack", "numpy", "zmq"))
before = set(sys.modules)
status = run(json.loads(sys.argv[1]))
imported = sorted(set(sys.modules) - before | {"torch"} & set(sys.modules))
sys.exit(status or " ".join(imported) or 0)
"""


class Controller:
    """A ROUTER that says what a test wants to say, and the Dispatcher process it started.

    Args:
        run_dir: the instance's.
        popen: starts a process.
        code: what that runs.
    """

    def __init__(
        self, run_dir: Path, popen: Callable[..., subprocess.Popen[bytes]], code: str = CODE
    ) -> None:
        self.run_dir = run_dir
        self._popen = popen
        self._code = code
        self.context = new_context()
        self.socket, _ = bind_router(self.context, [f"ipc://{run_dir}/control.sock"])
        self.lifeline, self._lifeline_end = os.pipe()
        self.process: subprocess.Popen[bytes] | None = None
        self.worker: FakeWorker | None = None

    def start(self, **changes: Any) -> subprocess.Popen[bytes]:
        import json

        spec = json.dumps(launch_spec(self.run_dir, **changes).to_dict())
        self.process = self._popen(
            [sys.executable, "-c", self._code, spec],
            pass_fds=(self.lifeline,),
            env={**os.environ, LIFELINE_ENV: str(self.lifeline), "PYTHONPATH": os.getcwd()},
            stderr=subprocess.PIPE,
        )
        return self.process

    def expect(self, kind: type, timeout_s: float = PATIENCE_S) -> Any:
        """The next message of ``kind``; others before it are skipped."""
        while True:
            assert self.socket.poll(int(timeout_s * 1000)), f"no {kind.__name__} in time"
            identity, frame = self.socket.recv_multipart()
            assert identity == b"1"
            msg = decode_control(frame)
            if isinstance(msg, kind):
                return msg

    def say(self, msg: Any) -> None:
        self.socket.send_multipart([b"1", encode_control(msg)])

    def serve(self, ready: Ready) -> None:
        """An echo block behind task "t"."""
        self.worker = FakeWorker(self.context, self.run_dir, 11, {1: "e"})
        back = StageRoute(0, "", "dispatcher", 1, ready.endpoint, "tensormq")
        stages = {0: back, 1: self.worker.routes()[0]}
        table = RouteTable(1, 1, stages, {"t": task("t", ["e"], max_rows=65_536)})
        self.worker.table = table
        self.worker.start()
        self.say(Routes(table.to_dict()))
        assert self.expect(RoutesApplied).version == 1
        assert self.expect(Drained).version == 1

    def cut_lifeline(self) -> None:
        if self._lifeline_end >= 0:
            os.close(self._lifeline_end)
            self._lifeline_end = -1

    def ended(self) -> tuple[int, str]:
        """Exit status and log."""
        assert self.process is not None
        _, log = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, log.decode()

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.communicate()
        if self.worker is not None:
            self.worker.close()
        self.cut_lifeline()
        os.close(self.lifeline)
        self.context.destroy(linger=0)  # a client of a test that failed as well


@pytest.fixture
def controller(warm: Warm) -> Iterator[Controller]:
    with RunDir.create(run_root()) as run:
        made = Controller(run.path, warm.popen)
        try:
            yield made
        finally:
            made.close()


def left(run_dir: Path) -> list[str]:
    return sorted(p.name for p in run_dir.iterdir() if p.name not in ("lock", "control.sock"))


def test_a_whole_life(controller: Controller) -> None:
    process = controller.start()
    hello = controller.expect(Hello)
    assert (hello.role, hello.name, hello.incarnation) == ("dispatcher", "dispatcher", 1)
    assert hello.pid == process.pid
    ready = controller.expect(Ready)
    assert ready.endpoint == f"ipc://{controller.run_dir}/d1.sock"
    assert ready.endpoints[1].startswith("tcp://127.0.0.1:")
    assert not ready.endpoints[1].endswith(":0")
    controller.say(Ping(5))
    pong = controller.expect(Pong)
    assert (pong.seq, pong.state) == (5, "running")
    controller.serve(ready)
    for endpoint in ready.endpoints:
        client = RawClient(controller.context, endpoint)
        np.testing.assert_array_equal(client.infer("t", X)[0], X + 1)
        client.close()
    threads = os.listdir(f"/proc/{process.pid}/task")
    client = RawClient(controller.context, ready.endpoints[0])
    large = np.ones((MIN_TENSOR_BYTES // 16, 4), np.float32)
    np.testing.assert_array_equal(client.infer("t", large)[0], large + 1)
    client.close()
    # A large reply needs no further thread: there may be none by then.
    assert os.listdir(f"/proc/{process.pid}/task") == threads
    controller.say(Stop())
    status, log = controller.ended()
    assert (status, log) == (0, "")
    assert controller.worker is not None
    controller.worker.close()
    assert left(controller.run_dir) == []


def test_control_rubbish_is_survived(controller: Controller) -> None:
    controller.start()
    controller.expect(Ready)
    rng = np.random.default_rng(1)
    for _ in range(500):
        controller.socket.send_multipart([b"1", rng.bytes(int(rng.integers(0, 200)))])
    controller.socket.send_multipart([b"1", b"", b"", b""])
    controller.say(Routes({"epoch": "x"}))
    controller.say(Hello("worker", "w", 3, 4, "0"))  # not for a Dispatcher
    controller.say(Ping(6))
    assert controller.expect(Pong).seq == 6
    controller.say(Stop())
    status, log = controller.ended()
    assert status == 0
    assert log.count("control message refused") < 12  # a bounded log
    assert "Traceback" not in log


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_a_stop(controller: Controller, number: int) -> None:
    process = controller.start()
    controller.serve(controller.expect(Ready))
    assert controller.worker is not None
    controller.worker.behave["e"] = lambda _: None
    client = RawClient(controller.context, f"ipc://{controller.run_dir}/clients.sock")
    client.ask("t", X)
    wait_until(lambda: controller.worker is not None and controller.worker.seen)
    process.send_signal(number)
    assert controller.ended()[0] == 0
    assert client.quiet(), "it is the next Dispatcher's to answer"
    client.close()
    controller.worker.close()
    assert left(controller.run_dir) == []


def test_it_does_not_outlive_its_manager(controller: Controller) -> None:
    controller.start()
    controller.expect(Ready)
    there = ["arena-1", "clients.sock", "d1.sock", "g1.sock", "marks-1"]
    assert left(controller.run_dir) == there
    controller.cut_lifeline()
    assert controller.ended()[0] == ORPHAN_STATUS
    assert left(controller.run_dir) == []


def test_a_port_in_use_is_told_and_nothing_is_left(controller: Controller) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        controller.start(
            client_endpoints=(
                f"ipc://{controller.run_dir}/clients.sock",
                f"tcp://127.0.0.1:{port}",
            )
        )
        failed = controller.expect(StartFailed)
        assert failed.error["code"] == "PORT_IN_USE"
        assert str(port) in failed.error["message"]
        assert controller.ended()[0] == 1
    assert left(controller.run_dir) == []


def test_one_that_gets_no_further_thread_has_not_been_ready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its end would be taken for a defect's, and not for the machine's want."""
    told: list[Any] = []
    agent = SimpleNamespace(heard=None, send=told.append, close=lambda: None)
    agent.start = agent.stop_by_signals = agent.close

    def refused(_: StatsThread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(StatsThread, "start", refused)
    monkeypatch.setattr(main, "ControlAgent", lambda **_: agent)
    monkeypatch.setattr(main, "log_to_stderr", lambda name: None)
    with RunDir.create(run_root()) as run:
        assert main.run(launch_spec(run.path).to_dict()) == 1
        assert left(run.path) == []
    assert [type(message) for message in told] == [Hello, StartFailed]
    assert told[1].error["code"] == "NO_SPACE"


def test_it_needs_no_torch_and_imports_nothing_that_templates_have_not() -> None:
    """What it is installed in may have gone when another one is forked."""
    with (
        RunDir.create(run_root()) as run,
        closing(Controller(run.path, subprocess.Popen, TELLS)) as made,
    ):
        made.start()
        ready = made.expect(Ready)
        made.serve(ready)
        client = RawClient(made.context, ready.endpoints[0])
        np.testing.assert_array_equal(client.infer("t", X)[0], X + 1)
        made.say(Stop())
        assert made.ended() == (0, "")


def test_a_silent_controller_stops_nothing(controller: Controller) -> None:
    """Serving goes on while the control plane is away; the agent finds it again."""
    controller.start()
    ready = controller.expect(Ready)
    controller.serve(ready)
    controller.socket.close(0)
    client = RawClient(controller.context, ready.endpoints[0])
    np.testing.assert_array_equal(client.infer("t", X)[0], X + 1)

    def bound() -> bool:
        address = f"ipc://{controller.run_dir}/control.sock"
        try:
            controller.socket, _ = bind_router(controller.context, [address])
        except SystemError_ as exc:
            if exc.code != "PORT_IN_USE":  # the closed one leaves it in ZeroMQ's own time
                raise
            return False
        return True

    assert wait_until(bound)

    def answered() -> bool:
        try:
            controller.say(Ping(9))
        except zmq.ZMQError:  # not connected again yet
            return False
        return controller.expect(Pong).seq == 9

    assert wait_until(answered)
    client.close()
    controller.say(Stop())
    assert controller.ended()[0] == 0
