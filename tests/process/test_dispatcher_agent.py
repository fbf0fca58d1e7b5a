"""The control thread that workers and the Dispatcher share, and its mailbox."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import zmq
from dispatcher_rig import PATIENCE_S, wait_until

from blockflow.launch.process_kpi import ProcessSampler, private_and_shared
from blockflow.tensormq.agent import (
    LIFELINE_ENV,
    ControlAgent,
    Mailbox,
    lifeline_from_environment,
)
from blockflow.tensormq.janitor import RunDir, run_root
from blockflow.tensormq.sockets import bind_router, new_context
from blockflow.wire.control import (
    ControlMessage,
    Drain,
    Drained,
    Ping,
    Pong,
    Stats,
    Stop,
    decode_control,
    encode_control,
)


def test_a_mailbox_wakes_and_keeps_the_order() -> None:
    box: Mailbox[int] = Mailbox()
    poller = zmq.Poller()
    poller.register(box.fileno(), zmq.POLLIN)
    assert not poller.poll(0)
    for n in range(5):
        box.put(n)
    assert len(box) == 5
    assert poller.poll(0)
    assert box.drain() == [0, 1, 2, 3, 4]
    assert not poller.poll(0)
    assert box.drain() == []
    box.close()
    box.put(9)  # nobody is there: no error
    box.close()


def test_a_mailbox_loses_nothing_between_threads() -> None:
    box: Mailbox[tuple[int, int]] = Mailbox()

    def fill(who: int) -> None:
        for n in range(2000):
            box.put((who, n))

    threads = [threading.Thread(target=fill, args=(who,)) for who in range(3)]
    for thread in threads:
        thread.start()
    got: list[tuple[int, int]] = []
    poller = zmq.Poller()
    poller.register(box.fileno(), zmq.POLLIN)
    while len(got) < 6000:
        assert poller.poll(int(PATIENCE_S * 1000))
        got += box.drain()
    for thread in threads:
        thread.join()
    for who in range(3):
        assert [n for w, n in got if w == who] == list(range(2000))
    box.close()


class Line:
    """A Controller's socket and an agent on it."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.context = new_context()
        self.router, _ = bind_router(self.context, [endpoint])
        self.got: list[ControlMessage] = []
        self.agent = ControlAgent(
            endpoint=endpoint,
            incarnation=7,
            on_message=self.handle,
            state=lambda: "running",
            on_orphaned=lambda: None,
            context=self.context,
        )

    def handle(self, msg: ControlMessage) -> None:
        if isinstance(msg, Drain):
            raise RuntimeError("a defect in a handler")
        self.got.append(msg)

    def heard(self) -> Any:
        assert self.router.poll(int(PATIENCE_S * 1000))
        identity, frame = self.router.recv_multipart()
        assert identity == b"7"
        return decode_control(frame)

    def say(self, msg: ControlMessage) -> None:
        self.router.send_multipart([b"7", encode_control(msg)])

    def close(self) -> None:
        self.agent.close()
        self.router.close(0)
        self.context.destroy(linger=0)


@pytest.fixture
def line() -> Iterator[Line]:
    with RunDir.create(run_root()) as run:
        made = Line(f"ipc://{run.path}/control.sock")
        yield made
        made.close()


ASLEEP = """
import signal, sys
import zmq
from blockflow.tensormq.agent import ControlAgent, Mailbox
from blockflow.tensormq.sockets import new_context
from blockflow.wire.control import Drained, Stop

mailbox = Mailbox()
agent = ControlAgent(
    endpoint=sys.argv[1],
    incarnation=7,
    on_message=mailbox.put,
    state=lambda: "running",
    on_orphaned=lambda: None,
    context=new_context(),
)
agent.stop_by_signals()
agent.start()
# Another thread gets it: the main thread is not woken, as by one that comes just before it sleeps.
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
agent.send(Drained(7, 1))
poller = zmq.Poller()
poller.register(mailbox.fileno(), zmq.POLLIN)
assert poller.poll() and mailbox.drain() == [Stop()]
agent.close()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_wakes_a_main_loop_that_does_not_notice_it(line: Line, number: int) -> None:
    child = subprocess.Popen([sys.executable, "-c", ASLEEP, line.endpoint])
    try:
        assert line.heard() == Drained(7, 1)
        child.send_signal(number)
        assert child.wait(PATIENCE_S) == 0
    finally:
        child.kill()
        child.wait()


def test_a_failing_handler_does_not_silence_the_pings(line: Line) -> None:
    line.agent.start()
    line.agent.send(Drained(7, 1))
    assert line.heard() == Drained(7, 1)
    line.say(Drain())
    line.say(Ping(3))
    assert line.heard() == Pong(7, 3, "running")
    line.say(Stop())
    wait_until(lambda: line.got == [Ping(3), Stop()])


def test_a_pong_tells_what_the_main_loop_has_heard(line: Line) -> None:
    line.agent.start()
    line.agent.send(Drained(7, 1))
    assert line.heard() == Drained(7, 1)  # it can be reached from now on
    line.say(Ping(1))
    assert line.heard() == Pong(7, 1, "running", heard=0)
    line.agent.heard(1)
    line.say(Ping(2))
    assert line.heard() == Pong(7, 2, "running", heard=1)


def test_what_is_queued_leaves_at_close(line: Line) -> None:
    line.agent.start()
    for n in range(50):
        line.agent.send(Drained(7, n))
    line.agent.close()
    assert [line.heard().version for _ in range(50)] == list(range(50))
    line.agent.close()


def test_figures_do_not_pile_up_while_the_controller_is_away(line: Line) -> None:
    stats = Stats(7, 0, [], {})
    for _ in range(5000):  # the thread is not running: the extreme of a stuck line
        line.agent.send(stats)
    line.agent.send(Drained(7, 5))
    assert line.agent.dropped >= 3900
    line.agent.start()
    heard = [line.heard() for _ in range(1001)]
    assert heard[-1] == Drained(7, 5)


def test_the_lifeline_is_found_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LIFELINE_ENV, raising=False)
    assert lifeline_from_environment() is None
    monkeypatch.setenv(LIFELINE_ENV, "12")
    assert lifeline_from_environment() == 12
    monkeypatch.setenv(LIFELINE_ENV, "x")
    assert lifeline_from_environment() is None


def test_a_process_samples_itself() -> None:
    sampler = ProcessSampler()
    kpi = sampler.sample(time.monotonic_ns(), arena_bytes=5, slots=2, slots_used=1)
    assert kpi.pid == os.getpid()
    assert 0 < kpi.uss <= kpi.pss <= kpi.rss * 1.1
    assert kpi.threads >= 1
    assert kpi.fds > 0
    assert (kpi.arena_bytes, kpi.slots, kpi.slots_used) == (5, 2, 1)
    assert kpi.gpu_util_percent is None
    assert private_and_shared(2**22 + 1) == (0, 0)  # no such process
