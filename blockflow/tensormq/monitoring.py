"""What ZeroMQ tells of a socket's connections, by the socket's monitor.

pyzmq's own reader makes a member of an enumeration of each *value* that it meets, a descriptor or a
time that is partly chance, and an enumeration keeps its members for ever: half a kilobyte more for
every attempt to connect that fails, in a process that may live for months.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

_EVENT = struct.Struct("=Hi")


def read_event(frames: Sequence[bytes]) -> tuple[int, int]:
    """The event (``zmq.EVENT_...``) and its value, of the two frames of a monitor's message: the
    event's header, and an endpoint.

    Raises:
        ValueError: they are none.
    """
    if len(frames) != 2 or len(frames[0]) != _EVENT.size:
        raise ValueError("a monitor's message has an event's header and an endpoint")
    event, value = _EVENT.unpack(frames[0])
    return event, value
