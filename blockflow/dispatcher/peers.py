"""Peers: which connection a client has, who has gone, and whose messages still count.

Carries out what :class:`Connections` and :class:`Past` know, by the monitor of the clients' socket
and by what the kernel says of descriptors.
"""

from __future__ import annotations

from collections.abc import Sequence

import zmq

from blockflow.dispatcher.connections import Connection, Connections, takes_over
from blockflow.dispatcher.descriptors import Doors, mark
from blockflow.dispatcher.past import Past, is_given
from blockflow.dispatcher.unread import wire_bytes
from blockflow.dispatcher.watch import Watch
from blockflow.tensormq.monitoring import read_event
from blockflow.tensormq.tcp_peers import last_descriptor


class Peers:
    """Those of a bound ROUTER; used from the Dispatcher's thread alone.

    Args:
        socket: the ROUTER.
        doors: shuts connections.
        watch: is told of connections, and of what was read of them.
        encrypted: tcp connections have CURVE.

    Attributes:
        departures: becomes readable when a connection has begun or ended; then call :meth:`note`.
        turned_away: connections that were ended because of their number.
        links: the connection of each client, as far as it is known.
        gone: clients whose connection has ended, and that were not forgotten yet.
    """

    def __init__(
        self, socket: zmq.Socket[bytes], doors: Doors, watch: Watch, *, encrypted: bool
    ) -> None:
        self.departures: zmq.Socket[bytes] = socket.get_monitor_socket(
            zmq.EVENT_DISCONNECTED | zmq.EVENT_ACCEPTED
        )
        self.turned_away = 0
        self.watch = watch
        self.links: dict[bytes, Connection] = {}
        self.gone: set[bytes] = set()
        self.book = Connections()
        self._socket = socket
        self._doors = doors
        self._encrypted = encrypted
        self._past = Past()
        self._last_fd = last_descriptor()
        self._beyond = 0  # connections with a descriptor beyond that one
        self._room = 0  # connections that there is room for while there are such

    def note(self, now_ns: int) -> None:
        """Who has come and who has gone. ZeroMQ tells of an end just before it closes the
        descriptor."""
        while self.departures.poll(0):
            event, fd = read_event(self.departures.recv_multipart(zmq.NOBLOCK))
            if event == zmq.EVENT_ACCEPTED:
                self._began(fd, now_ns)
                self._make_room(fd, now_ns)
                continue
            self.watch.gone(fd)
            ended = self.book.ended(fd)
            if ended is None:
                continue
            self._beyond -= fd > self._last_fd
            if ended.client:
                self.gone.add(ended.client)

    def note_if_all_read(self) -> None:
        """Find out whether anything waits to be read, if that is worth knowing."""
        if self.book.unclear and not self._socket.poll(0):
            self.book.all_read()

    def hear(self, client: bytes, frames: Sequence[zmq.Frame], now_ns: int) -> bool:
        """``client`` has sent this; remember which connection it has.

        What is left of a connection that has ended names a descriptor that is closed by now, or is
        another connection's, which must not be taken for this client's.

        Returns:
            Whether it counts: no answer reaches who has gone or was cut off, and all that it had
            sent would be computed for nobody. Who names itself and is back is heard again.
        """
        try:
            fd = int(frames[0].get(zmq.SRCFD))
        except zmq.ZMQError:  # a transport without descriptors
            return client not in self._past
        if client in self._past:
            self._shut_out(fd)
            return False
        sizes = map(len, frames[1:])  # the first one says who it was, and was made here
        self.watch.delivered(fd, wire_bytes(sizes, encrypted=self._encrypted))
        known = self.links.get(client)
        if known is not None and known.certain and is_given(client):
            return True
        self.note(now_ns)
        if not self.book.heard_of(fd):  # it came between the socket's binding and its monitor
            self._began(fd, now_ns)
        connection = self.book.at(fd)
        if connection is None or connection.ending:
            self._past.add(client)
            return False
        if not takes_over(client, connection):
            # Of two that ZeroMQ has named, the earlier one has gone. Who has named itself may be
            # the one that has the connection now.
            self._past.add(client)
            return not is_given(client)
        self._has(client, connection)
        return True

    def end(self, connection: Connection) -> None:
        """End it; when ZeroMQ says that it has ended, its client is gone."""
        self._past.add(connection.client)
        if self._doors.shut(connection.fd, connection.mark):
            self.book.shut(connection)

    def forget(self, client: bytes) -> None:
        """It is gone, or cut off."""
        self.gone.discard(client)
        self._past.add(client)
        link = self.links.pop(client, None)
        if link is not None:
            link.leave(client)

    def close(self) -> None:
        self.watch.close()
        self._socket.disable_monitor()
        self.departures.close(0)

    def _has(self, client: bytes, connection: Connection) -> None:
        # Whoever chooses its identity itself may be back, even with the same descriptor.
        self.gone.discard(client)
        known = self.links.get(client)
        if known is not None and known is not connection:
            known.leave(client)
        if connection.client not in (b"", client):
            self.gone.add(connection.client)  # its descriptor has been given to this one
        connection.belongs_to(client)
        self.links[client] = connection

    def _shut_out(self, fd: int) -> None:
        """Who was cut off while its connection was in doubt speaks by this one. If that is its own
        for certain, it ends, or the peer would wait for answers that never come."""
        connection = self.book.at(fd)
        if connection is not None and connection.clear and not connection.ending:
            self.end(connection)

    def _began(self, fd: int, now_ns: int) -> None:
        name = mark(fd)
        if name is not None:  # else it has ended already, and ZeroMQ will say so
            self.book.began(fd, name, now_ns)
            self.watch.began(fd, name)
            self._beyond += fd > self._last_fd

    def _make_room(self, newest: int, now_ns: int) -> None:
        """The workers' connections, on unix sockets, must find descriptors: without any libzmq ends
        this process.

        One beyond the last that clients may have shows that all others are taken. It may stay, if
        another one goes for it; so does each that comes after it, for it may get the descriptor
        that has become free.
        """
        if newest > self._last_fd:
            self._room = len(self.book) - self._beyond
        while self._beyond and self.book.standing > self._room:
            if not self._turn_one_away(newest, now_ns):
                return
            self.turned_away += 1

    def _turn_one_away(self, newest: int, now_ns: int) -> bool:
        """End one connection by TCP: that which is silent for longest. Else peers that say nothing
        would keep everybody out. Without such a one it is the newest."""
        silent = self.book.silent_for_longest(now_ns)
        while silent is not None:
            if self._turn_away(silent):
                return True
            silent = self.book.silent_for_longest(now_ns)
        latest = self.book.at(newest)
        return latest is not None and self._turn_away(latest)

    def _turn_away(self, connection: Connection) -> bool:
        if connection.ending or not self._doors.turn_away(connection.fd, connection.mark):
            return False
        self.book.shut(connection)
        return True
