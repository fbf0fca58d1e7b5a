"""Whoever is launched is listened to, however long the Controller's thread has been reading."""

from __future__ import annotations

import threading
from pathlib import Path

import zmq

from blockflow.control.controller import Controller
from blockflow.control.events import Received
from blockflow.core import limits
from blockflow.tensormq.janitor import RunDir
from blockflow.tensormq.sockets import connect_dealer, new_context
from blockflow.wire.control import Hello, encode_control
from tests.dispatcher_rig import wait_until

WAIT_S = 10.0


def hello(incarnation: int) -> bytes:
    return encode_control(Hello("worker", f"w#{incarnation}", incarnation, 1, "0"))


def test_a_process_that_starts_while_others_are_heard_is_known() -> None:
    heard: list[int] = []
    reading, go_on, both = threading.Event(), threading.Event(), threading.Event()

    def deliver(event: Received) -> None:
        heard.append(event.incarnation)
        if event.incarnation == 1:
            reading.set()
            go_on.wait(WAIT_S)
        else:
            both.set()

    context = new_context()
    with RunDir.create() as run:
        controller = Controller(f"ipc://{Path(run.path) / 'control.sock'}", deliver)
        controller.start()
        try:
            sockets = [
                connect_dealer(
                    context, controller.endpoint, str(n), max_bytes=limits.MAX_CONTROL_BYTES
                )
                for n in (1, 2)
            ]
            controller.admit(1)
            for odd in ([hello(2)], [b"torn"], [hello(1), b""]):  # one speaks for another, ...
                sockets[0].send_multipart(odd)
            sockets[0].send(hello(1))
            assert reading.wait(WAIT_S)
            # Its thread is at the first one's message: the second one is launched, and quick.
            controller.admit(2)
            sockets[1].send(hello(2))
            wait_until(lambda: controller._socket.get(zmq.EVENTS) & zmq.POLLIN, WAIT_S)
            go_on.set()
            assert both.wait(WAIT_S), controller.counters
            assert heard == [1, 2] and controller.counters.unknown == 0
            assert (controller.counters.received, controller.counters.malformed) == (5, 3)
        finally:
            go_on.set()
            for socket in sockets:
                socket.close(0)
            controller.close()
            context.term()
