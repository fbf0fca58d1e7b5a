"""Sending: messages between the processes of a control plane, also where the kernel is short of
memory for a moment. One that is lost is not said again, and the other side acts on what it knows.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable

_NO_ROOM = frozenset({errno.ENOBUFS, errno.ENOMEM, errno.ETOOMANYREFS})
"""No memory for a message just now, or no room for another descriptor under way."""

_ROOM_S = 0.2
"""So long a message is tried again: whoever sends it has other things to do, and whoever waits for
it waits for longer."""

_AGAIN_S = 0.01


def sent(send: Callable[[], object]) -> bool:
    """Call ``send`` until the message has left.

    Returns:
        False: the other side is gone or does not read, or there has been no room for too long.
    """
    end = time.monotonic() + _ROOM_S
    while True:
        try:
            send()
        except OSError as exc:
            if exc.errno not in _NO_ROOM or time.monotonic() >= end:
                return False
        else:
            return True
        time.sleep(_AGAIN_S)
