"""ClientPort: the ROUTER that clients connect to, and what is owed to slow ones.

ZeroMQ tells neither how many bytes it holds for a peer nor when a peer has gone, and cannot cut a
ROUTER's peer off. What is needed is found out beside it: a large frame is sent from our memory, and
a tracker says when ZeroMQ has written it; small messages the socket's HWM bounds. Every message
says on which file descriptor it came: shutting that down ends the connection, and what ZeroMQ held
for it is freed. Whose the descriptor is meanwhile, :class:`Peers` knows.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import zmq

from blockflow.core.text import worth_a_line
from blockflow.dispatcher.connections import Connection
from blockflow.dispatcher.debt import Debt, Tracker
from blockflow.dispatcher.descriptors import Doors, Sealed, bytes_taken
from blockflow.dispatcher.heap import LARGE_BYTES, is_large
from blockflow.dispatcher.peers import Peers
from blockflow.dispatcher.reading import FrameReader
from blockflow.dispatcher.watch import Watch
from blockflow.tensormq.sockets import end_message

_LOG = logging.getLogger("blockflow.dispatcher")

OWED_BYTES = 256 * 1024 * 1024
"""All clients together may let so much pile up; beyond it the one who is owed most is cut off, of
those that take nothing ..."""

MOST_OWED_BYTES = 8 * OWED_BYTES
"""... and beyond this of all: who reads gets what it has asked for, but not without a bound."""

TRACKED_BYTES = LARGE_BYTES
"""Of a message. A frame of this size is not copied, and can be watched until it is written; so is
one that makes so many with the smaller ones before it."""

CIPHER_NS = 1_000_000_000
"""ZeroMQ's one thread en- and decrypts a frame as a whole, and reads and writes nothing meanwhile,
for anybody: half a second for the largest (1.5 to 3 ns a byte, measured), and as long for the
next."""

_CIPHER_COPIES = 2
"""Of a frame that it encrypts, while it does."""

_MOST_FRAMES = 3
"""Of a message: who sent it, its header, and a tensor."""

_LONGEST_NAME = 255
"""Bytes of the identity that a peer may give itself, by ZMTP. libzmq takes more, and copies them
for each message."""

_THROWN_AWAY_AT_ONCE = 256
"""Messages of who has gone: were it one, each would cost a whole round of the loop, and without a
bound others would wait for all of them."""

_RETRY_MS = 5
_LOOK_MS = 100

_MORE = zmq.NOBLOCK | zmq.SNDMORE
"""Flags are an enum's members, and two of them a search for a third."""

_LOCAL_PEERS = ("localhost:", "127.", "::1", "::ffff:127.")


class Sent(Enum):
    """What became of a reply."""

    YES = "sent"
    LATER = "waits for the client to read"
    GONE = "no such client"
    SLOW = "the client is given up"


def is_local(frame: zmq.Frame) -> bool:
    """Whether a client's message came from this host, by the transport's word.

    ZeroMQ gives the peer's address for tcp and ``localhost:uid:gid:pid`` for ipc.
    """
    try:
        peer = str(frame.get("Peer-Address"))
    except zmq.ZMQError:  # the transport does not say
        return False
    return peer.startswith(_LOCAL_PEERS)


class ClientPort:
    """Receives requests and sends replies; used from the Dispatcher's thread alone.

    Args:
        socket: a bound ROUTER with ROUTER_MANDATORY and a finite SNDHWM.
        endpoints: that it is bound to, ports resolved.
        encrypted: tcp connections have CURVE.

    Attributes:
        departures: becomes readable when a connection has begun or ended; then call
            :meth:`on_departures`.
        evicted: clients that were cut off.
        peers: which connection each client has.
        watch: over what is unread, and what large messages leave.
    """

    def __init__(
        self, socket: zmq.Socket[bytes], endpoints: Sequence[str], *, encrypted: bool = False
    ) -> None:
        self.socket = socket
        socket.copy_threshold = 0  # what is watched is not copied, whatever its size
        self.evicted = 0
        self._encrypted = encrypted
        doors = Doors(endpoints)
        self.watch = Watch(doors)
        self.peers = Peers(socket, doors, self.watch, encrypted=encrypted)
        self.departures = self.peers.departures
        self._reader = FrameReader(socket, _MOST_FRAMES)
        self._debts: dict[bytes, Debt] = {}
        self._owed = 0

    def receive(self, now_ns: int) -> tuple[bytes, list[zmq.Frame]] | None:
        """(client, its frames) of the next message, or None when there is none now.

        What those who have gone had sent is thrown away. Of more than two frames, the third stands
        for all others.
        """
        for _ in range(_THROWN_AWAY_AT_ONCE):
            frames = self._reader.read()
            if not frames:
                if not self._reader.skipping:
                    self.peers.book.all_read()
                return None
            if is_large(frames):  # whatever becomes of it
                self.watch.large(now_ns)
            client = frames[0].bytes
            counts = self.peers.hear(client, frames, now_ns)
            if self._reader.skipping or len(client) > _LONGEST_NAME:
                self._refuse(client, now_ns)
                return None
            if counts:
                return client, frames[1:]
            self.watch.large(now_ns)  # it leaves room behind, and so does its connection
            if len(frames) > _MOST_FRAMES:  # it had up to a thousand
                return None
        return None

    def more(self) -> bool:
        """Whether something waits to be read."""
        if self._reader.waits:
            return True
        self.peers.book.all_read()
        return False

    def send(self, client: bytes, frames: Sequence[Any], now_ns: int) -> Sent:
        """Send ``frames`` to ``client``; never waits, keeps the order per client."""
        debt = self._debts.get(client)
        if debt is not None:
            self._settle(debt, now_ns)
        if debt is None or not debt.waiting:
            sent = self._try(client, frames, now_ns)
            if sent is Sent.GONE:
                self.forget(client)
                return sent
            if sent is Sent.YES:
                return sent if self._patient(client, now_ns) else Sent.SLOW
            debt = self._debts.setdefault(client, Debt(now_ns))
        debt.waiting.append(list(frames))
        self._owe(debt, sum(map(_size, frames)))
        return Sent.LATER if self._patient(client, now_ns) else Sent.SLOW

    def flush(self, now_ns: int) -> list[tuple[bytes, Sent]]:
        """Try what waits once more; returns the clients that are gone or cut off."""
        lost: list[tuple[bytes, Sent]] = []
        for client, debt in list(self._debts.items()):
            sent = Sent.YES
            self._settle(debt, now_ns)
            while debt.waiting:
                sent = self._try(client, debt.waiting[0], now_ns)
                if sent is not Sent.YES:
                    break
                self._owe(debt, -sum(map(_size, debt.waiting.popleft())))
                debt.since_ns = now_ns
            if sent is Sent.GONE:
                self.forget(client)
                lost.append((client, sent))
            elif self._settle(debt, now_ns):
                self._debts.pop(client, None)
            elif not self._patient(client, now_ns):
                lost.append((client, Sent.SLOW))
        if self._owed > OWED_BYTES:
            lost += [(client, Sent.SLOW) for client in self._relieve(now_ns)]
        return lost + self._departed()

    def on_departures(self, now_ns: int) -> None:
        """Connections have come, or ended: :meth:`flush` will say which clients are gone."""
        self.peers.note(now_ns)
        self.peers.note_if_all_read()

    def forget(self, client: bytes) -> None:
        """Throw away what waits for ``client``, what it sends, and all that is known of it."""
        debt = self._debts.pop(client, None)
        if debt is not None:
            self._owed -= debt.owed
        self.peers.forget(client)

    def waiting(self) -> int:
        """Clients that :meth:`flush` has something to do for."""
        return len(self._debts) + len(self.peers.gone)

    @property
    def blocked(self) -> bool:
        """Replies wait here, which their clients' connections did not take."""
        return any(d.waiting for d in self._debts.values())

    def next_look_ms(self) -> int | None:
        """How soon :meth:`flush` or :meth:`look` is due; None = at any event."""
        if self.peers.gone or (self._debts and self.blocked):
            return _RETRY_MS
        watch_ms = self.watch.next_ms()
        return watch_ms if watch_ms is not None or not self._debts else _LOOK_MS

    def look(self, now_ns: int, held: Callable[[], int]) -> None:
        """Cut off who left too much unread. ``held`` counts bytes of inputs and results that are
        kept elsewhere; it is asked when that is due."""
        if self.watch.due(now_ns):
            self.peers.note(now_ns)
            drained = not self.socket.poll(0)
            self.watch.look(now_ns, held() + self._owed, self._ciphers(), drained=drained)

    @property
    def present(self) -> tuple[bytes, ...]:
        """Whoever has sent something by a connection that has not ended."""
        return tuple(self.peers.links)

    def backlog_bytes(self) -> int:
        """Bytes that clients have not taken yet, here and in ZeroMQ (there, of large frames)."""
        return self._owed

    def close(self) -> None:
        self._debts.clear()
        self.peers.close()
        self.socket.close()

    # --- debts -----------------------------------------------------------------------------------

    def _owe(self, debt: Debt, nbytes: int) -> None:
        debt.nbytes += nbytes
        self._owed += nbytes

    def _settle(self, debt: Debt, now_ns: int) -> bool:
        """Take off what ZeroMQ has written; True when nothing is owed any more."""
        before = debt.posted_bytes
        clear = debt.settle(now_ns)
        self._owed -= before - debt.posted_bytes
        return clear

    def _ciphers(self) -> int:
        """So much more may be in use for a frame that ZeroMQ is encrypting."""
        posted = [f for d in self._debts.values() for f in d.posted] if self._encrypted else []
        plain = [size for frame, size in posted if isinstance(frame, Sealed) and frame.plain]
        return _CIPHER_COPIES * max(plain, default=0)

    def _patient(self, client: bytes, now_ns: int) -> bool:
        """False when ``client`` was too slow: it has been cut off."""
        debt = self._debts.get(client)
        if debt is None:
            return True
        link = self.peers.links.get(client)
        pressed = self._owed > OWED_BYTES
        head = debt.posted[0][0] if debt.posted else None
        # What is not encrypted yet it cannot take.
        plain = isinstance(head, Sealed) and head.plain
        counted = link is not None and (debt.crowded or pressed) and not plain
        taken = bytes_taken(link.fd) if link is not None and counted else None
        busy_ns = CIPHER_NS if self._encrypted else 0
        if not debt.hopeless(now_ns, taken, pressed=pressed, busy_ns=busy_ns):
            return True
        if link is not None and link.doubtful(now_ns):  # in a moment it is known
            return True
        self._cut_off(client, now_ns)
        return False

    def _relieve(self, now_ns: int) -> list[bytes]:
        """Cut off whom it costs all others the most to wait for."""
        cut: list[bytes] = []
        for client in sorted(self._debts, key=lambda c: self._debts[c].owed, reverse=True):
            if self._owed <= OWED_BYTES:
                break
            debt = self._debts[client]
            if debt.stands or self._owed > MOST_OWED_BYTES:
                if worth_a_line(self.evicted + 1):
                    owed = f"{debt.owed} of {self._owed} bytes"
                    _LOG.warning("a client is cut off: of the replies it had not taken %s", owed)
                self._cut_off(client, now_ns)
                cut.append(client)
        return cut

    def _try(self, client: bytes, frames: Sequence[Any], now_ns: int) -> Sent:
        socket = self.socket
        try:
            # Only the first part can be refused: after it, the message is the peer's as a whole.
            socket.send(client, _MORE)
        except zmq.Again:
            return Sent.LATER
        except zmq.ZMQError as exc:
            if exc.errno == errno.EHOSTUNREACH:
                return Sent.GONE
            raise
        try:
            self._send_rest(client, frames, now_ns)
        except BaseException:
            end_message(socket)  # or the next client's name and reply would be its frames
            raise
        return Sent.YES

    def _send_rest(self, client: bytes, frames: Sequence[Any], now_ns: int) -> None:
        socket, last, size = self.socket, len(frames) - 1, 0
        for i, frame in enumerate(frames):
            flags = zmq.NOBLOCK if i == last else _MORE
            size += _size(frame)
            if size < TRACKED_BYTES:
                socket.send(frame, flags)
                continue
            self.watch.large(now_ns)
            link = self.peers.links.get(client) if self._encrypted else None
            # Before it is sent: ZeroMQ's thread may be quick.
            taken = bytes_taken(link.fd) if link and not link.doubtful(now_ns) else None
            tracker: Tracker = socket.send(frame, flags, copy=False, track=True)
            debt = self._debts.setdefault(client, Debt(now_ns))
            if link is not None and taken is not None:
                before = debt.posted[-1][0] if debt.posted else None
                tracker = Sealed(tracker, link.fd, link.mark, taken, size, before)
            debt.posted.append((tracker, size))
            debt.posted_bytes += size
            self._owed += size
            size = 0

    # --- connections -----------------------------------------------------------------------------

    def _refuse(self, client: bytes, now_ns: int) -> None:
        """Its name, or the number of its frames, is no mistake."""
        if self._reader.skipping:
            self.watch.freed(now_ns)
        elif not self.socket.poll(0):  # nobody else will come to see that
            self.peers.book.all_read()
        link = self.peers.links.get(client)
        # Else it may be of an earlier connection, or is ended already.
        if link is not None and link.certain and not link.ending:
            self._end(link)

    def _departed(self) -> list[tuple[bytes, Sent]]:
        """Clients whose connection is no more."""
        lost = [(client, Sent.GONE) for client in self.peers.gone]
        for client, _ in lost:
            self.forget(client)
        return lost

    def _cut_off(self, client: bytes, now_ns: int) -> None:
        """End the client's connection and forget it."""
        link = self.peers.links.get(client)
        if link is None or link.doubtful(now_ns):
            self.evicted += 1
        else:
            self._end(link)
        self.forget(client)

    def _end(self, link: Connection) -> None:
        self.evicted += 1
        self.peers.end(link)


def _size(frame: Any) -> int:
    return frame.nbytes if isinstance(frame, memoryview) else len(frame)
