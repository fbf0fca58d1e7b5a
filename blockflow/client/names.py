"""Names: a Dispatcher's host is looked up here, so that libzmq never does.

libzmq looks a name up whenever it connects, and also in ``zmq_disconnect``, within which pyzmq
keeps the interpreter: a name server that is slow would hold up every thread, deadline and event
loop of the process, and the end of the context with them. A look-up has a thread of its own here,
for which nobody waits. Of several addresses libzmq tries the first alone; here each attempt has its
own.
"""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress

_MORE_ROUNDS = 3
"""After a connection its own family is tried once, and so often again, before the other one, of
which each attempt may take seconds where nothing lets it through."""


def _is_v6(endpoint: str) -> bool:
    return endpoint.startswith("tcp://[")


def resolve(host: str) -> list[str]:
    """The addresses of a name, as they stand in an endpoint: the IPv4 ones first. It may wait for a
    name server.

    Raises:
        OSError, UnicodeError: there is none.
    """
    v4: list[str] = []
    v6: list[str] = []
    for family, *_, where in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM):
        if family == socket.AF_INET:
            v4.append(str(where[0]))
        elif family == socket.AF_INET6:
            scope = f"%{where[3]}" if len(where) == 4 and where[3] else ""
            v6.append(f"[{where[0]}{scope}]")
    return list(dict.fromkeys(v4 + v6))  # some are listed twice


def names_a_host(address: str) -> bool:
    """Whether the host of ``address`` is a name, and no number."""
    if not address.startswith("tcp://"):
        return False
    host = address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    for family, number in ((socket.AF_INET, host), (socket.AF_INET6, host.partition("%")[0])):
        with suppress(OSError, UnicodeError):
            socket.inet_pton(family, number)
            return False
    return True


class Whereabouts:
    """Where to connect to, one attempt after the other: an address without a name says it itself.

    A name is looked up for each attempt. That takes the address with which it worked before, then
    those that were not tried since; when all were, they come again.

    Args:
        address: of the Dispatcher.
        ring: wakes the thread that uses this, once it has run its argument; called in other
            threads.

    Attributes:
        trouble: what is wrong with the name; '' = nothing known.
        further: it has addresses besides that were not tried since one worked.
        answers: what was found out: then :meth:`found`.
    """

    def __init__(self, address: str, ring: Callable[[Callable[[], None]], object]) -> None:
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        self.trouble = ""
        self.further = False
        self._fixed = "" if names_a_host(address) else address
        self._host, self._port = host.strip("[]"), port
        self._ring = ring
        self.answers: deque[list[str] | str] = deque()
        self._tried: list[str] = []
        self._good = ""
        self._rounds = 0

    def ask(self) -> None:
        """Find out: :meth:`found` says it, where a name is looked up after a ring."""
        if self._fixed:
            self.answers.append([self._fixed])
            return
        self.trouble = f"no address was found yet for the name {self._host!r}"
        # A daemon: neither a close nor the exit waits for a name server.
        thread = threading.Thread(target=self._look_up, name="blockflow-names", daemon=True)
        try:
            thread.start()
        except RuntimeError as exc:  # no threads are left, or the interpreter ends
            self.answers.append(f"the name {self._host!r} cannot be looked up: {exc}")

    def _look_up(self) -> None:
        answer: list[str] | str
        try:
            answer = [f"tcp://{a}:{self._port}" for a in resolve(self._host)]
            why = "" if answer else ": it has none"
        except Exception as exc:  # whatever it is: the next attempt begins when this one has ended
            answer, why = [], f": {getattr(exc, 'strerror', None) or exc}"
        answer = answer or f"no address was found for the name {self._host!r}{why}"
        self._ring(lambda: self.answers.append(answer))

    def found(self) -> str | None:
        """The endpoint to try, '' = there is none (see :attr:`trouble`); None = not known yet."""
        if not self.answers:
            return None
        answer = self.answers.popleft()
        if isinstance(answer, str):
            self.trouble, self.further = answer, False
            return ""
        self.trouble = ""
        kin = [a for a in answer if self._good and _is_v6(a) == _is_v6(self._good)]
        if kin and self._rounds < _MORE_ROUNDS:
            answer = kin
        left = [a for a in answer if a not in self._tried]
        if not left:
            self._tried, left = [], answer
            self._rounds += 1
        endpoint = self._good if self._good in left else left[0]
        self._tried.append(endpoint)
        self.further = len(left) > 1
        return endpoint

    def worked(self, endpoint: str) -> None:
        """There is a connection with ``endpoint``."""
        self._tried, self._good, self.further, self._rounds = [], endpoint, False, 0
