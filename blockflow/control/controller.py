"""Controller: the star's centre (thesis, section 3.5): delivers control messages to all processes.

One thread owns the ROUTER; everything else reaches it through a mailbox, and what it hears goes to
``deliver``. It also sends to itself, the way that all messages take: what does not come back is
kept by ZeroMQ's own thread, whose core may have been taken away while everybody else runs. A frame
that is no message, or whose sender is not who it says, is counted and dropped: nothing that arrives
can end this thread.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import zmq

from blockflow.control.events import Received
from blockflow.core import limits
from blockflow.core.errors import WireError
from blockflow.core.text import worth_a_line
from blockflow.tensormq.agent import Mailbox
from blockflow.tensormq.sockets import bind_router, connect_dealer, new_context
from blockflow.wire.control import ControlMessage, decode_control, encode_control

log = logging.getLogger("blockflow.control")


@dataclass(slots=True)
class ControllerCounters:
    """What was not delivered, and why. Read from other threads: plain integers that only grow."""

    received: int = 0
    malformed: int = 0
    unknown: int = 0
    unreachable: int = 0
    refused: int = 0


@dataclass(frozen=True, slots=True)
class _Forget:
    incarnation: int


@dataclass(frozen=True, slots=True)
class _Deliver:
    incarnation: int
    message: ControlMessage


@dataclass(frozen=True, slots=True)
class _Echo:
    done: Callable[[], None]


class Controller:
    """The ROUTER and its thread.

    Args:
        endpoint: where it binds, ``ipc://<run dir>/control.sock``.
        deliver: takes each message of an admitted process; called in the Controller's thread, so it
            only hands on.

    Raises:
        SystemError_: PORT_IN_USE.
    """

    def __init__(self, endpoint: str, deliver: Callable[[Received], None]) -> None:
        self.endpoint = endpoint
        self.counters = ControllerCounters()
        self._deliver = deliver
        self._context = new_context()
        try:
            self._socket, _ = bind_router(
                self._context, [endpoint], max_bytes=limits.MAX_CONTROL_BYTES
            )
        except BaseException:
            self._context.term()
            raise
        self._own_name = b"echo-" + secrets.token_hex(16).encode()  # of no process: no number
        self._own = connect_dealer(self._context, endpoint, self._own_name)
        self._echoes: deque[tuple[int, Callable[[], None]]] = deque()
        self._echoed = 0
        self._inbox: Mailbox[_Forget | _Deliver | _Echo | None] = Mailbox()
        self._admitted: set[int] = set()
        self._framed: tuple[ControlMessage, bytes] | None = None
        self._thread = threading.Thread(target=self._run, name="bf-controller", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def admit(self, incarnation: int) -> None:
        """Listen to this process from now on; before it is launched.

        At once, and not by the mailbox: with many processes the Controller's thread may be reading
        what they have sent for longer than it takes to start one, and would know this one's Hello
        for nobody's.
        """
        self._admitted.add(incarnation)

    def forget(self, incarnation: int) -> None:
        """The process is dead: what still arrives in its name is dropped."""
        self._inbox.put(_Forget(incarnation))

    def send(self, incarnation: int, message: ControlMessage) -> None:
        """Queue a message; never blocks. A process that is not there is counted, not an error: its
        death is about to be known anyway."""
        self._inbox.put(_Deliver(incarnation, message))

    def echo(self, done: Callable[[], None]) -> None:
        """Call ``done``, in the Controller's thread, once what was queued before has gone out to
        the processes' sockets and what had arrived by then was delivered: neither this thread nor
        ZeroMQ's keeps anybody waiting."""
        self._inbox.put(_Echo(done))

    def close(self) -> None:
        """Send what is queued and end the thread. Idempotent."""
        if self._thread.is_alive():
            self._inbox.put(None)
            self._thread.join()
        if not self._socket.closed:
            self._own.close(linger=0)
            self._socket.close(linger=200)
            self._context.term()
            self._inbox.close()

    # --- the Controller's thread ----------------------------------------------------------------

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._inbox.fileno(), zmq.POLLIN)
        open_ = True
        while open_:
            events = dict(poller.poll())
            if self._inbox.fileno() in events:
                for order in self._inbox.drain():
                    if order is None:
                        open_ = False
                    elif isinstance(order, _Forget):
                        self._admitted.discard(order.incarnation)
                    elif isinstance(order, _Echo):
                        self._ask_itself(order)
                    else:
                        self._send(order)
            if self._socket in events:
                self._receive()
            while self._echoes and self._echoes[0][0] <= self._echoed:
                self._echoes.popleft()[1]()

    def _ask_itself(self, order: _Echo) -> None:
        number = self._echoes[-1][0] + 1 if self._echoes else self._echoed + 1
        self._echoes.append((number, order.done))
        try:
            self._own.send(b"%d" % number, zmq.NOBLOCK)
        except zmq.Again:  # many are under way: a later one that comes back counts for all
            log.debug("echo %d waits for the next one", number)

    def _send(self, order: _Deliver) -> None:
        identity = str(order.incarnation).encode()
        try:
            self._socket.send_multipart([identity, self._frame(order.message)], zmq.NOBLOCK)
        except zmq.Again:  # it does not read: supervision deals with hung processes
            self.counters.refused += 1
        except zmq.ZMQError as e:
            self.counters.unreachable += 1
            log.debug("%s to %d: %s", order.message.KIND, order.incarnation, e)

    def _frame(self, message: ControlMessage) -> bytes:
        """A message to many processes, routes or a ping, comes for one after the other; it is
        encoded for the first of them."""
        if self._framed is None or self._framed[0] is not message:
            self._framed = message, encode_control(message)
        return self._framed[1]

    def _receive(self) -> None:
        # Bounded, so that a flood from one process cannot keep orders waiting.
        for _ in range(256):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if frames[0] == self._own_name:
                self._echoed = int(frames[1])
                continue
            counters = self.counters
            counters.received += 1
            if len(frames) != 2 or not frames[0].isdigit() or len(frames[0]) > 20:
                counters.malformed += 1
                continue
            incarnation = int(frames[0])
            if incarnation not in self._admitted:
                counters.unknown += 1
                continue
            try:
                message = decode_control(frames[1])
            except WireError as e:
                counters.malformed += 1
                if worth_a_line(counters.malformed):
                    log.warning("control frame from %d refused: %s", incarnation, e)
                continue
            if getattr(message, "incarnation", None) != incarnation:
                counters.malformed += 1
                continue
            self._deliver(Received(incarnation, message, time.monotonic_ns()))
