"""The thread that owns a connection's socket and runs its core."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, suppress
from functools import partial

import zmq

from blockflow.client.core import ClientCore
from blockflow.client.dealer import Dealer
from blockflow.client.ends import Ends, Owner
from blockflow.client.line import Line
from blockflow.client.names import Whereabouts
from blockflow.client.outcome import Answered, Failed, Outcome
from blockflow.client.reception import Reception
from blockflow.client.request import Upload
from blockflow.client.room import cannot_begin, check_room, frame_of
from blockflow.client.side import SideConnection
from blockflow.client.tap import Tap
from blockflow.client.thread import ClientThread, SharedLock
from blockflow.client.wakeup import WakeUp
from blockflow.core.errors import BlockFlowError, RequestError, make_error
from blockflow.core.scarcity import no_room
from blockflow.core.text import worth_a_line
from blockflow.tensormq.collector import begin_collector
from blockflow.tensormq.curve import Protect
from blockflow.wire.client import Place

log = logging.getLogger("blockflow.client")

_MORE = zmq.NOBLOCK | zmq.SNDMORE
_CLOSE_LINGER_MS = 200

_LONGEST_POLL_MS = 3_600_000
"""A caller's patience may be longer than the poller can count."""

Call = Callable[[], list[Outcome]]


class IoThread:
    """Runs posted calls on the core, carries its messages, and hands outcomes to their owners.

    Args:
        core: the protocol.
        protect: sets CURVE up.
        tap: is told what passes the socket.

    Attributes:
        side: the connection for granted memory; to be used in this thread alone.

    Raises:
        RequestError: INVALID_REQUEST, the address is none, or threads are none of the system's.
        SystemError_: NO_SPACE: no descriptors, memory or threads are left for it. INTERNAL: its
            threads are not allowed what ZeroMQ does.
    """

    def __init__(
        self, core: ClientCore, protect: Protect | None = None, tap: Tap | None = None
    ) -> None:
        self._core = core
        self._tap = tap
        self._ending = False  # the connection has ended, but what came on it is not all read yet
        self._failed = ""
        self._mailbox: deque[tuple[Call, bytes | None, Owner | None]] = deque()
        self._ends = Ends()
        self._lock = threading.RLock()  # a signal's handler may post in the middle of a post
        self._closed = False
        self._poller = zmq.Poller()
        self.side = SideConnection()
        self._side_fd = -1
        self.ended: Future[None] = Future()
        self.ended.set_running_or_notify_cancel()  # whoever waits may give up; the end comes anyway
        self._pid = os.getpid()
        self._thread = ClientThread(self._run)
        with ExitStack() as undo:
            try:
                self._wakeup = WakeUp()
                undo.callback(self._wakeup.close)
                check_room(self._wakeup.fileno())
                begin_collector()
                self._context = zmq.Context()
                undo.callback(self._context.destroy, linger=0)
                self._dealer = Dealer(self._context, core.link.address, protect)
                where = Whereabouts(core.link.address, self._ring)
                self._line = Line(self._dealer, core.link, where)
                self._reception = Reception(core, self._dealer, self._deliver, tap)
                self._thread.start()
            except Exception as exc:
                raise cannot_begin(exc, core.link.address) from exc
            self._thread.check(core.link.address)
            undo.pop_all()
        # What is called last was registered first, as pyzmq's collector was by the import above:
        # ZeroMQ's thread must have let go of all arrays before that forgets them, or it sends, or
        # falls over, what they have become.
        atexit.register(self.shut_down)

    def post(self, call: Call, request_id: bytes | None, owner: Owner | None) -> None:
        """Run ``call`` in the thread; ``owner`` gets the outcome of ``request_id``, exactly once.

        Raises:
            RequestError: CANCELLED, the connection is closed.
            SystemError_: INTERNAL, its thread has failed.
        """
        taken = self._ring(partial(self._mailbox.append, (call, request_id, owner)))
        if not taken and owner is not None:
            if self._failed:
                raise _defect(self._failed)
            raise RequestError("CANCELLED", "the client is closed", where=self._core.link.address)

    def stop(self) -> None:
        """End the thread soon; safe to call more than once."""
        self._ring(self._end)

    def _ring(self, act: Callable[[], None]) -> bool:
        """Run ``act`` and wake the thread; False when it is closed."""
        held = SharedLock.held
        held.depth += 1
        try:
            with self._lock:  # the interpreter's own: no signal leaves it taken
                if self._closed:
                    return False
                act()
                self._wakeup.ring()
                return True
        finally:
            held.depth -= 1

    def _end(self) -> None:
        self._closed = True

    def join(self) -> None:
        """Wait for the thread's end; not where it waits for this very caller: in a callback, also
        by way of another client's, and in the handler of a signal that came while its thread held a
        lock of any client's :meth:`new_lock`.
        """
        if not SharedLock.held.depth:
            self._wait_for_end()

    def _wait_for_end(self) -> None:
        with suppress(RequestError), self.awaited():
            self.ended.result()
            if not self._ends:  # else it stays for those that could not be told yet
                self._thread.join()

    def new_lock(self) -> SharedLock:
        """A lock that this thread may wait for."""
        return SharedLock()

    def abandon(self) -> None:
        """End the thread soon; in a forked child, which has none, do nothing.

        Whoever drops the last reference waits for nothing. It may be a thread at its very end, to
        which the client was local: a join there would enter it in threading's books again.
        """
        if os.getpid() == self._pid:
            self.stop()

    def shut_down(self) -> None:
        """End the thread and wait for that; in a forked child do nothing."""
        if os.getpid() == self._pid:
            self.stop()
            self._wait_for_end()

    def is_current(self) -> bool:
        """Whether the caller runs in this thread, as callbacks do."""
        return threading.current_thread() is self._thread

    def awaited(self) -> AbstractContextManager[None]:
        """While the caller waits for an answer: see :meth:`ClientThread.awaited`."""
        return self._thread.awaited(self._core.link.address)

    # --- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._loop()
            self._flush_cancels()
        except Exception as exc:  # a defect must end the callers' waits, not hang them
            log.exception("the client's thread failed")
            self._failed = repr(exc)
        finally:
            with self._lock:
                self._closed = True
            closed = RequestError("CANCELLED", "the client was closed")
            self._end_all(_defect(self._failed) if self._failed else closed)
            try:
                self.side.close()
                self._dealer.close(_CLOSE_LINGER_MS)
                self._context.term()
                self._wakeup.close()
                del self._line, self._reception  # which refer to this
                atexit.unregister(self.shut_down)
            finally:
                self.ended.set_result(None)
            self._ends.finish()

    def _loop(self) -> None:
        core, dealer, wakeup, poller = self._core, self._dealer, self._wakeup, self._poller
        sock, monitor, bell = dealer.socket, dealer.monitor, wakeup.fileno()
        side, sharing = self.side, core.sharing
        poller.register(bell, zmq.POLLIN)
        poller.register(monitor, zmq.POLLIN)
        poller.register(sock, zmq.POLLIN)
        blocked = False
        self._line.begin(time.monotonic_ns())
        while not self._closed:
            ready = dict(poller.poll(self._poll_ms()))
            if bell in ready:
                wakeup.clear()
            if self._side_fd in ready:
                self.side.receive()
            self._take_calls()
            if self._ends.late:
                self._ends.retry(time.monotonic_ns())
            # Replies first: what came before a disconnect is not lost with it.
            if sock in ready:
                self._reception.receive()
            if monitor in ready:
                self._watch()
            now = time.monotonic_ns()
            if self._reception.conduct.trouble:
                self._leave(now)
            elif self._ending and self._reception.receive():
                self._lose(now)
            self._line.on_tick(now)
            if overdue := core.on_tick(now):
                self._deliver(overdue)
            if sharing.way or sharing.packets or side.inbox or side.trouble:
                self._share()
            if self._ending:  # what is not sent yet waits for the next one
                continue
            if blocked == self._send():
                blocked = not blocked
                poller.modify(sock, zmq.POLLIN | zmq.POLLOUT if blocked else zmq.POLLIN)
            if sharing.packets:  # a message has just left for want of a slot
                self._share()

    def _poll_ms(self) -> int | None:
        due = self._core.next_wakeup()
        for other in (self._line.next_wakeup(), self._ends.next_wakeup()):
            if other is not None and (due is None or other < due):
                due = other
        if due is None:
            return None
        left_ms = -(-(due - time.monotonic_ns()) // 1_000_000)
        return min(max(0, left_ms), _LONGEST_POLL_MS)

    def _take_calls(self) -> None:
        if self._line.refused and self._mailbox:  # who was refused tries again when asked to
            self._line.dial()
        while self._mailbox:
            call, rid, owner = self._mailbox.popleft()
            try:
                outcomes = call()
            except BlockFlowError as exc:
                if rid is not None and owner is not None:
                    self._ends.tell_to(owner, Failed(rid, exc))
                continue
            except Exception as exc:  # a defect: :meth:`_run` ends the others
                if rid is not None and owner is not None:
                    self._ends.tell_to(owner, Failed(rid, _defect(repr(exc))))
                raise
            if rid is not None and owner is not None:
                self._ends.expect(rid, owner)
            if outcomes:
                self._deliver(outcomes)

    def _watch(self) -> None:
        core, line, tap = self._core, self._line, self._tap
        for kind, value in self._dealer.events():
            now = time.monotonic_ns()
            if kind == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                line.succeeded()
                self._reception.conduct.begin()
                core.on_connected()
                if tap is not None:
                    tap.connected()
            elif kind == zmq.EVENT_DISCONNECTED and core.link.up:
                self._ending = True
            elif line.on_event(kind, value, now):
                self._deliver(core.on_denied())

    def _lose(self, now_ns: int) -> None:
        """The connection has ended, and what had come on it was read."""
        self._ending = False
        self._line.ended(now_ns)
        self._disconnected(now_ns)

    def _leave(self, now_ns: int) -> None:
        """What came on the connection is not borne any longer."""
        counters, conduct = self._core.counters, self._reception.conduct
        counters.hang_ups += 1
        if worth_a_line(counters.hang_ups):
            address, n = self._core.link.address, counters.hang_ups
            log.warning("%s: %s (%d so far)", address, conduct.trouble, n)
        self._ending = False
        self._line.leave(conduct.trouble, now_ns)
        conduct.begin()
        self._disconnected(now_ns)

    def _disconnected(self, now_ns: int) -> None:
        if self._tap is not None:
            self._tap.disconnected()
        self._deliver(self._core.on_disconnected(now_ns))
        self.side.close()
        self._share()

    def _share(self) -> None:
        """Carry out what the core wants of the side connection, and tell it what came of it."""
        side, sharing = self.side, self._core.sharing
        if sharing.way is not None:
            path, attach = sharing.way
            side.connect(path)
            side.send(attach)
            if not side.trouble:
                sharing.on_attached()
        while sharing.packets:
            side.send(sharing.packets.popleft())
        while side.inbox:
            sharing.on_packet(side.inbox.popleft(), time.monotonic_ns())
        if side.trouble:
            sharing.lost(side.trouble, time.monotonic_ns())
            side.trouble = ""
        fd = side.fileno()
        if fd != self._side_fd:
            if self._side_fd >= 0:
                self._poller.unregister(self._side_fd)
            if fd >= 0:
                self._poller.register(fd, zmq.POLLIN)
            self._side_fd = fd

    def _send(self) -> bool:
        """Send what the core has; False when the socket takes no more for now."""
        socket = self._dealer.socket
        while (message := self._core.next_message(time.monotonic_ns())) is not None:
            header, body, rid = message
            try:
                if isinstance(body, Upload):
                    if not body.written:
                        self.side.write(body.slot.grant, body.slot.index, body.body)
                        body.written = True
                    socket.send(header, zmq.NOBLOCK)
                elif body is None:
                    socket.send(header, zmq.NOBLOCK)
                else:
                    frame = frame_of(body)  # first: there is no half of a message
                    socket.send(header, _MORE)
                    socket.send(frame, zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return False
            except (zmq.ZMQError, MemoryError) as exc:
                self._deliver(self._no_room(rid, exc))
                continue
            if self._tap is not None:
                self._tap.sent(header)
            self._core.sent(rid)
        return True

    def _no_room(self, rid: bytes | None, exc: Exception) -> list[Outcome]:
        """One request cannot be sent for want of descriptors or memory: it ends, and it alone."""
        error = no_room(exc, f"no room to send this request: {exc}", self._core.link.address)
        if rid is None or error is None:
            raise exc
        return [Failed(ended.request_id, error) for ended in self._core.cancel(rid)]

    def _deliver(self, outcomes: list[Outcome]) -> None:
        for outcome in outcomes:
            if not self._ends.tell(outcome) and isinstance(outcome, Answered):
                self._core.unclaimed.extend(f for f in outcome.frames if isinstance(f, Place))
        while self._core.unclaimed:
            self.side.release(self._core.unclaimed.popleft())

    def _flush_cancels(self) -> None:
        """The client closes: spare the system what nobody waits for any more."""
        self._take_calls()
        self._deliver(self._core.close())
        self._send()

    def _end_all(self, error: BlockFlowError) -> None:
        while self._mailbox:
            _, rid, owner = self._mailbox.popleft()
            if rid is not None and owner is not None:
                self._ends.tell_to(owner, Failed(rid, error))
        for rid in self._ends.expected():
            self._deliver([Failed(rid, error)])


def _defect(why: str) -> BlockFlowError:
    return make_error("INTERNAL", f"the client's thread failed: {why}", hint="make a new client")
