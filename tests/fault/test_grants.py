"""Clients that die, stop or flood while they hold granted memory: all of it comes back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from dispatcher_rig import Rig, rig, task, wait_until

from blockflow.client import Client
from blockflow.core.model import Contract, TensorSpec
from blockflow.tensormq.janitor import run_root

SPEC = TensorSpec("float32", ("rows", 256))
X = np.ones((512, 256), np.float32)
HOLDER = """
import sys, threading
import numpy as np
from blockflow.client import Client
x = np.ones((512, 256), np.float32)
client = Client(sys.argv[1])
while not client.shared_memory.result_slots:
    client.infer("t", x)
kept = [client.infer("t", x, results="view") for _ in range(5)]
pending = [client.submit("never", x) for _ in range(5)]
client.infer("t", x)
print(client.counters().slot_uploads, flush=True)
if len(sys.argv) > 2:  # until it is killed
    while True:
        client.infer("t", x)
threading.Event().wait()
"""


@pytest.fixture
def up() -> Iterator[Rig]:
    with rig(run_root(), arena_bytes=32 << 20) as r:
        worker = r.worker(11, {1: "e", 2: "never"})
        worker.behave["e"] = lambda a: a
        worker.behave["never"] = lambda a: None
        kw = {"contract": Contract(SPEC, SPEC), "max_rows": 4096}
        r.publish(replace(task("t", ["e"]), **kw), replace(task("never", ["never"]), **kw))
        yield r


def start(up: Rig, which: int, *args: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", HOLDER, up.server.client_endpoints[which], *args]
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)
    assert process.stdout is not None
    assert int(process.stdout.readline()) > 0
    return process


def granted(up: Rig) -> int:
    """Bytes that the Dispatcher has mapped for clients, by its book and by the kernel's."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    spans = [m.split()[0].split("-") for m in maps if "blockflow-grant" in m]
    mapped = sum(int(b, 16) - int(a, 16) for a, b in spans)
    book = up.server._grants.gauges()["bytes"]
    assert isinstance(book, int)
    return max(mapped, book)


@pytest.mark.parametrize("busy", [(), ("busy",)], ids=["idle", "sending"])
@pytest.mark.parametrize("which", [0, 1], ids=["ipc", "tcp"])
def test_a_killed_client_leaves_nothing(up: Rig, which: int, busy: tuple[str, ...]) -> None:
    with Client(up.server.client_endpoints[which]) as client:
        client.infer("t", X)  # all sockets between Dispatcher and worker are open now
        client.submit("never", X).cancel()
    wait_until(lambda: granted(up) == 0)
    before = len(os.listdir("/proc/self/fd"))
    with start(up, which, *busy) as process:
        assert granted(up) > 0
        assert up.server._grants.gauges()["clients"] == 1
        process.kill()
    wait_until(lambda: granted(up) == 0)
    assert up.server._grants.gauges()["clients"] == 0
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before)
    with Client(up.server.client_endpoints[which]) as client:
        for _ in range(3):
            assert np.array_equal(client.infer("t", X).value, X)


def test_a_stopped_client_holds_up_nobody(up: Rig) -> None:
    with start(up, 0, "busy") as process:
        os.kill(process.pid, signal.SIGSTOP)
        try:
            with Client(up.server.client_endpoints[0]) as client:
                for i in range(30):
                    assert np.array_equal(client.infer("t", X + i).value, X + i)
                assert client.counters().slot_results > 0
            assert 0 < granted(up) < 200 << 20
        finally:
            process.kill()
    wait_until(lambda: granted(up) == 0)


def test_clients_that_come_and_go_leave_the_book_flat(up: Rig) -> None:
    for i in range(25):
        with Client(up.server.client_endpoints[i % 2]) as client:
            for _ in range(4):
                assert np.array_equal(client.infer("t", X).value, X)
    wait_until(lambda: granted(up) == 0)
    gauges = up.server._grants.gauges()
    assert gauges == {"clients": 0, "segments": 0, "bytes": 0, "events": {}}
    assert len(up.server._grants._sides) == 0
