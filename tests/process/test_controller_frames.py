"""What goes to many processes is encoded once: of N workers each gets a table of N routes."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from blockflow.control import controller as module
from blockflow.control.controller import Controller
from blockflow.control.events import Received, Send
from blockflow.control.pings import PingBook
from blockflow.core import limits
from blockflow.core.routing import RouteTable
from blockflow.tensormq.janitor import RunDir
from blockflow.tensormq.sockets import connect_dealer, new_context
from blockflow.wire.control import ControlMessage, Hello, Routes, decode_control, encode_control

WAIT_S = 10.0
MANY = range(1, 9)


def test_what_goes_to_many_is_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[ControlMessage] = []

    def counted(message: ControlMessage) -> bytes:
        encoded.append(message)
        return encode_control(message)

    monkeypatch.setattr(module, "encode_control", counted)
    tables = [Routes(RouteTable(1, n).to_dict()) for n in (1, 2)]
    _, pings = PingBook().begin({n: f"w#{n}" for n in MANY}, 0, 1)
    rounds = [[Send(n, table) for n in MANY] for table in tables]
    heard, all_there = set[int](), threading.Event()
    began_ns, stamps = time.monotonic_ns(), list[int]()

    def deliver(event: Received) -> None:
        heard.add(event.incarnation)
        stamps.append(event.read_ns)
        if len(heard) == len(MANY):
            all_there.set()

    context = new_context()
    with RunDir.create() as run:
        controller = Controller(f"ipc://{Path(run.path) / 'control.sock'}", deliver)
        sockets = [
            connect_dealer(context, controller.endpoint, str(n), max_bytes=limits.MAX_CONTROL_BYTES)
            for n in MANY
        ]
        try:
            controller.start()
            for n, socket in zip(MANY, sockets, strict=True):
                controller.admit(n)
                socket.send(encode_control(Hello("worker", f"w#{n}", n, 1, "0")))
            assert all_there.wait(WAIT_S)
            assert stamps == sorted(stamps)  # when each was read
            assert began_ns < stamps[0] and stamps[-1] < time.monotonic_ns()
            for send in (*rounds[0], *pings, *rounds[1]):
                controller.send(send.incarnation, send.message)
            wanted = [tables[0], pings[0].message, tables[1]]
            for socket in sockets:
                for message in wanted:
                    assert socket.poll(int(WAIT_S * 1000))
                    assert decode_control(socket.recv()) == message
            assert encoded == wanted
        finally:
            for socket in sockets:
                socket.close(0)
            controller.close()
            context.term()
