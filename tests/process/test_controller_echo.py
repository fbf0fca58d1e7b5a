"""An echo says that messages come through, both ways, and not only that a thread is awake."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from blockflow.control.controller import Controller
from blockflow.control.events import Received
from blockflow.core import limits
from blockflow.tensormq.janitor import RunDir
from blockflow.tensormq.sockets import bind_router, connect_dealer, new_context
from blockflow.wire.control import Hello, Ping, encode_control

WAIT_S = 10.0


class Rig:
    """A Controller, a process of number 1, and all that happens, in order."""

    def __init__(self, folder: Path) -> None:
        self.context = new_context()
        self.seen: list[str] = []
        self.something = threading.Condition()
        self.controller = Controller(f"ipc://{folder / 'control.sock'}", self._deliver)
        self.process = connect_dealer(
            self.context, self.controller.endpoint, "1", max_bytes=limits.MAX_CONTROL_BYTES
        )
        self.controller.admit(1)

    def _deliver(self, event: Received) -> None:
        self.note(f"heard {event.incarnation}")

    def note(self, what: str) -> None:
        with self.something:
            self.seen.append(what)
            self.something.notify_all()

    def wait(self, what: str) -> None:
        with self.something:
            assert self.something.wait_for(lambda: what in self.seen, WAIT_S), self.seen

    def hello(self) -> None:
        self.process.send(encode_control(Hello("worker", "w#1", 1, 1, "0")))
        self.wait("heard 1")

    def close(self) -> None:
        self.process.close(0)
        self.controller.close()
        self.context.term()


@pytest.fixture
def rig() -> Iterator[Rig]:
    with RunDir.create() as run:
        made = Rig(Path(run.path))
        try:
            yield made
        finally:
            made.close()


def test_an_echo_follows_what_was_sent_before_it(rig: Rig) -> None:
    rig.controller.start()
    rig.hello()
    for n in range(300):
        rig.controller.send(1, Ping(n))
    rig.controller.echo(lambda: rig.note("echo"))
    rig.wait("echo")
    # it has left for the process' socket: nothing of it waits for the Controller's side
    for _ in range(300):
        assert rig.process.poll(int(WAIT_S * 1000))
        rig.process.recv_multipart()
    assert rig.controller.counters.received == 1 and rig.controller.counters.unknown == 0


def test_what_does_not_come_back_is_no_echo_until_a_later_one_does(rig: Rig) -> None:
    """As with ZeroMQ's thread off its core: this one sends, hears nobody, and is awake."""
    kept, _ = bind_router(rig.context, [f"{rig.controller.endpoint}.kept"])
    through = rig.controller._own
    rig.controller._own = connect_dealer(
        rig.controller._context, f"{rig.controller.endpoint}.kept", rig.controller._own_name
    )
    rig.controller.start()
    try:
        rig.controller.echo(lambda: rig.note("first"))
        rig.hello()  # the Controller's thread has gone on
        assert kept.poll(int(WAIT_S * 1000))
        assert rig.seen == ["heard 1"]
        rig.controller._own, held = through, rig.controller._own
        held.close(0)
        rig.controller.echo(lambda: rig.note("second"))
        rig.wait("second")
        assert rig.seen == ["heard 1", "first", "second"]
    finally:
        through.close(0)
        kept.close(0)


def test_nobody_else_can_echo(rig: Rig) -> None:
    rig.controller.start()
    other = connect_dealer(rig.context, rig.controller.endpoint, "echo-0")
    other.send(b"1")
    rig.controller.echo(lambda: rig.note("echo"))
    rig.wait("echo")
    rig.hello()
    counters = rig.controller.counters
    other.setsockopt(zmq.LINGER, 0)
    other.close()
    assert rig.seen == ["echo", "heard 1"] and counters.received - counters.malformed <= 1
