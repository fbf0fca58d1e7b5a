"""Connections: which connection a descriptor stands for, and whose it is. Pure.

ZeroMQ tells of each connection when it is accepted and just before its descriptor is closed, by the
number of that descriptor; and of each message by which number it came. But messages may be read
after their connection has ended, when the number belongs to another one. What can be known:

- an accepted connection begins after everything that those before it with its number had sent was
  handed over. Once nothing at all waits to be read, whatever still comes by that number is its own:
  it is *clear*, and a client whose message was read since is *certain* to have it;
- before that, the client may as well have had an earlier one, which has ended. Then ZeroMQ knows it
  no more, in a moment; so who can still be sent to after that moment has the present one.
"""

from __future__ import annotations

from dataclasses import dataclass

from blockflow.dispatcher.past import came_after

SURE_NS = 1_000_000_000
"""After an end ZeroMQ takes a round of its own loop to refuse what is sent there."""

SPEAKS_NS = 250_000_000
"""So long a new connection may take to its first message before it counts as silent."""


@dataclass(slots=True, eq=False)
class Connection:
    """One that has not ended.

    Attributes:
        fd: its descriptor.
        mark: what the kernel alone calls it (:func:`~.descriptors.mark`).
        since_ns: when it was heard of.
        clear: what comes by its descriptor from now on is its own.
        client: who has it, as far as is known.
        certain: ... without any doubt.
        spoken: a message has come by it, as far as is known.
        ending: it was shut down, and ZeroMQ has not said yet that it has ended.
    """

    fd: int
    mark: int
    since_ns: int
    clear: bool
    client: bytes = b""
    certain: bool = False
    spoken: bool = False
    ending: bool = False

    def belongs_to(self, client: bytes) -> None:
        """A message of ``client`` has come by it, as far as is known."""
        self.client = client
        self.certain = self.clear
        self.spoken = True

    def leave(self, client: bytes) -> None:
        """``client`` has it no more."""
        if self.client == client:
            self.client, self.certain = b"", False

    def doubtful(self, now_ns: int) -> bool:
        """Whether ``client``, who can still be sent to, may yet have had an earlier one."""
        return not self.certain and now_ns - self.since_ns < SURE_NS


class Connections:
    """The book of them."""

    def __init__(self) -> None:
        self._present: dict[int, Connection] = {}
        self._used: set[int] = set()
        self._unclear: set[Connection] = set()
        self._silent: dict[Connection, None] = {}  # the oldest first
        self._ending = 0

    def began(self, fd: int, mark: int, now_ns: int) -> Connection:
        """ZeroMQ has accepted one."""
        connection = Connection(fd, mark, now_ns, clear=fd not in self._used)
        self._present[fd] = connection
        self._silent[connection] = None
        self._used.add(fd)
        if not connection.clear:
            self._unclear.add(connection)
        return connection

    def ended(self, fd: int) -> Connection | None:
        """The one with this descriptor is no more; None when it was not booked."""
        self._used.add(fd)
        connection = self._present.pop(fd, None)
        if connection is not None:
            self._unclear.discard(connection)
            self._silent.pop(connection, None)
            self._ending -= connection.ending
        return connection

    def shut(self, connection: Connection) -> None:
        """It was shut down: soon it is no more."""
        self._ending += not connection.ending
        connection.ending = True

    def __len__(self) -> int:
        """Those that have a descriptor."""
        return len(self._present)

    @property
    def standing(self) -> int:
        """... and keep it."""
        return len(self._present) - self._ending

    def silent_for_longest(self, now_ns: int) -> Connection | None:
        """The oldest one by which nothing has come yet; the next call tells the next. None when
        there is none but new ones, whose handshake may be under way."""
        while self._silent:
            connection = next(iter(self._silent))
            if now_ns - connection.since_ns < SPEAKS_NS:
                return None
            del self._silent[connection]
            if not connection.spoken:
                return connection
        return None

    def at(self, fd: int) -> Connection | None:
        """The present one with this descriptor."""
        return self._present.get(fd)

    def heard_of(self, fd: int) -> bool:
        """There is or was one with this descriptor."""
        return fd in self._used

    @property
    def unclear(self) -> bool:
        """There are some by whose descriptor an earlier one's messages may come."""
        return bool(self._unclear)

    def all_read(self) -> None:
        """Nothing waits to be read; of all that was told of before somebody looked."""
        for connection in self._unclear:
            connection.clear = True
        self._unclear.clear()


def takes_over(client: bytes, connection: Connection) -> bool:
    """A message of ``client`` was read by the descriptor: is the connection its own, by all that
    is known?"""
    holder = connection.client
    return connection.clear or not holder or holder == client or came_after(client, holder)
