"""A client in want of descriptors, threads or memory: it loses a request at most, and says why."""

from __future__ import annotations

import errno
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import zmq
from cgroup_rig import cgroup
from fake_dispatcher import FakeDispatcher

from blockflow.client import Client
from blockflow.client import io as client_io
from blockflow.core.errors import BlockFlowError, SystemError_
from blockflow.tensormq import zmq_threads
from blockflow.tensormq.sockets import new_context

X = np.ones((1, 4), np.float32)
LARGE = np.ones((1, 1 << 18), np.float32)

HELD = """
import os, resource, sys
import numpy as np
from blockflow.client import Client
large = np.ones((1, 1 << 18), np.float32)
def held():
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, most))
    while True:
        try:
            os.dup(0)
        except OSError:
            return
"""


def run(code: str, *arguments: str) -> tuple[int, list[str], str]:
    words = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout.split(), done.stderr


@pytest.mark.parametrize("free", [0, 2, 5])
def test_the_first_large_tensor_needs_no_descriptors(free: int) -> None:
    """What keeps it while it is sent has begun with the client; else libzmq ends the process."""
    code = HELD + (
        "client = Client(sys.argv[1], shared_memory='off')\n"
        "client.infer('echo', large[:, :4].copy())\n"  # what is loaded late takes some, too
        "held()\n"
        f"os.closerange(256 - {free}, 256)\n"
        "for _ in range(3):\n"
        "    print(client.infer('echo', large).task, flush=True)\n"
    )
    with FakeDispatcher() as fake:
        assert run(code, fake.endpoint) == (0, ["echo"] * 3, "")


def test_nor_does_it_in_a_forked_child() -> None:
    """Which has nothing of what its parent's began."""
    code = HELD + (
        "client = Client(sys.argv[1], shared_memory='off')\n"
        "print(client.infer('echo', large).task, flush=True)\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    client = Client(sys.argv[1], shared_memory='off')\n"
        "    client.infer('echo', large[:, :4].copy())\n"
        "    held()\n"
        "    print(client.infer('echo', large).task, flush=True)\n"
        "    client.close()\n"
        "    os._exit(0)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
        "print(client.infer('echo', large).task, flush=True)\n"
    )
    with FakeDispatcher() as fake:
        assert run(code, fake.endpoint) == (0, ["echo", "echo", "0", "echo"], "")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_connection_that_breaks_for_want_of_descriptors_comes_back(host: str) -> None:
    """Neither an attempt nor a look-up has any, and neither is the end of anything."""
    code = HELD + (
        "from blockflow.core.errors import BlockFlowError\n"
        "def limit(soft):\n"
        "    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]\n"
        "    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, most))\n"
        "low = [os.dup(0) for _ in range(32)]\n"
        "client = Client(sys.argv[1], connect_timeout_s=0.5)\n"
        "client.infer('echo', large[:, :4].copy())\n"
        "limit(32)\n"  # all below are taken, and stay so when the connection gives back its own
        "print('held', flush=True)\n"
        "sys.stdin.readline()\n"
        "for _ in range(2):\n"
        "    try:\n"
        "        client.infer('echo', large)\n"
        "    except BlockFlowError as e:\n"
        "        print(e.code, flush=True)\n"
        "limit(256)\n"
        "client.wait_ready(timeout_s=60)\n"
        "print(client.infer('echo', large).task, flush=True)\n"
    )
    with FakeDispatcher() as fake:
        port = fake.endpoint.rpartition(":")[2]
        words = [sys.executable, "-c", code, f"tcp://{host}:{port}"]
        pipe = subprocess.PIPE
        child = subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        assert child.stdout is not None
        assert child.stdout.readline() == "held\n"
    with FakeDispatcher(fake.endpoint):
        output, errors = child.communicate("go\n", timeout=60)
    assert (child.returncode, errors) == (0, "")
    assert output.split() == ["CONNECTION_LOST", "CONNECTION_LOST", "echo"]


def test_a_client_that_is_made_at_the_exit_sends_copies() -> None:
    """pyzmq keeps nothing any more by then."""
    code = (
        "import atexit, sys\n"
        "def late():\n"
        "    with Client(sys.argv[1], shared_memory='off') as client:\n"
        "        print(client.infer('echo', large).task, flush=True)\n"
        "atexit.register(late)\n" + HELD
    )
    with FakeDispatcher() as fake:
        assert run(code, fake.endpoint) == (0, ["echo"], "")


@pytest.mark.parametrize("free", [0, 4])
def test_a_client_without_threads_does_not_begin(free: int) -> None:
    """Its own, or ZeroMQ's, which else ends the caller's process (SIGABRT)."""
    code = HELD + (
        "from pathlib import Path\n"
        "from blockflow.core.errors import BlockFlowError\n"
        "group = Path(sys.argv[2])\n"
        "(group / 'cgroup.procs').write_text(str(os.getpid()))\n"
        "most = int((group / 'pids.current').read_text()) + int(sys.argv[3])\n"
        "(group / 'pids.max').write_text(str(most))\n"
        "try:\n"
        "    Client(sys.argv[1])\n"
        "except BlockFlowError as e:\n"
        "    print(e.code)\n"
        "(group / 'pids.max').write_text('max')\n"
        "print(Client(sys.argv[1]).infer('echo', large).task)\n"
    )
    with FakeDispatcher() as fake, cgroup("pids", "pids.max", "max") as group:
        done = run(code, fake.endpoint, str(group), str(free))
    assert done == (0, ["NO_SPACE", "echo"], "")


def test_a_client_whose_threads_may_not_be_scheduled_does_not_begin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Under systemd's ``SystemCallFilter=~@resources``, say: ZeroMQ ends the process there."""
    assert zmq_threads._schedule() == 0
    monkeypatch.setattr(zmq_threads, "_schedule", lambda: errno.EPERM)
    for begin in (lambda: Client("tcp://127.0.0.1:9"), new_context):
        with pytest.raises(SystemError_, match="scheduled: Operation not permitted") as e:
            begin()
        assert e.value.code == "INTERNAL" and "@resources" in e.value.hint


@pytest.mark.parametrize("error", [zmq.ZMQError(errno.EMFILE), MemoryError()])
def test_what_cannot_be_sent_for_want_of_room_ends_alone(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    frame_of = client_io.frame_of

    def scarce(body: Any) -> zmq.Frame:
        if body.nbytes == LARGE.nbytes:
            raise error
        return frame_of(body)

    monkeypatch.setattr(client_io, "frame_of", scarce)
    with FakeDispatcher() as fake, Client(fake.endpoint, shared_memory="off") as client:
        client.infer("echo", X)
        pending = [client.submit("echo", x) for x in (X, LARGE, X)]
        with pytest.raises(BlockFlowError, match="no room to send this request") as e:
            pending[1].result()
        assert e.value.code == "NO_SPACE"
        for p in (pending[0], pending[2]):
            assert np.array_equal(p.result().value, X)
        counters = client.counters()
        assert (counters.failed, counters.answered, counters.connects) == (1, 3, 1)


def test_after_its_threads_failure_a_client_repeats_the_reason(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def defect(body: Any) -> zmq.Frame:
        raise ValueError("a defect")

    monkeypatch.setattr(client_io, "frame_of", defect)
    with FakeDispatcher() as fake, Client(fake.endpoint, shared_memory="off") as client:
        for _ in range(3):
            with pytest.raises(BlockFlowError, match=r"thread failed: ValueError.'a defect'") as e:
                client.infer("echo", X)
            assert e.value.code == "INTERNAL"
        with pytest.raises(BlockFlowError, match="a defect"):
            client.tasks()
    assert "the client's thread failed" in caplog.text
