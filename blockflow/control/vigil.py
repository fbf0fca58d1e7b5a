"""Vigil: does the Manager still turn? Pure: its signs of life, looks at its process, the time.

A Manager that hangs serves nobody worse for a while: requests do not pass through it. But nobody
replaces a dead worker meanwhile, so in the end it is killed, and its successor takes over. Until
then it has much longer than a worker, since what holds it up may be the disk on which it writes an
epoch down; and as with workers (:mod:`blockflow.control.heartbeat`) silence alone proves nothing:
one that sleeps all that time is given up sooner than one that runs or waits for the disk, one in a
debugger's hands never, and a guardian who was late himself begins to count anew.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass

from blockflow.core.errors import SystemError_
from blockflow.launch.vitals import Vitals

_IDLE_SHARE = 0.05
_PROMPT_NS = 2_000_000_000
"""A Manager says once a second that it turns."""


def gone_since(spoke_ns: int, noticed_ns: int) -> int:
    """Since when a dead Manager has done nothing (monotonic clock). Its end is noticed at once; but
    one that had been silent for longer than any is (it hung, or nobody could look) was gone before.

    Args:
        spoke_ns: when it said for the last time that it turns; 0 = it never did.
        noticed_ns: when its end was noticed.
    """
    silent = noticed_ns - spoke_ns > _PROMPT_NS
    return spoke_ns if spoke_ns and silent else noticed_ns


@dataclass(frozen=True, slots=True)
class VigilPolicy:
    """Seconds.

    Attributes:
        look: time between two looks.
        asleep: how long a Manager may say nothing while all of it sleeps, or is stopped.
        busy: how long it may otherwise.
        first: how long until its first sign of life: it may have a dead one's processes to take
            over, and waits for each.
    """

    look: float = 1.0
    asleep: float = 10.0
    busy: float = 30.0
    first: float = 60.0


class Vigil:
    """What is known of one Manager.

    Args:
        now_ns: monotonic clock; it was forked now.
    """

    def __init__(self, now_ns: int, policy: VigilPolicy = VigilPolicy()) -> None:
        self._policy = policy
        self._seen = False
        self._begin(now_ns)

    def _begin(self, now_ns: int) -> None:
        self._since_ns = now_ns
        self._due_ns = now_ns + int(self._policy.look * 1e9)
        self._cpu_ns: int | None = None
        self._busy = False

    def heard(self, now_ns: int) -> None:
        """A sign of life."""
        self._seen = True
        self._begin(now_ns)

    def deadline(self) -> int:
        """When :meth:`look` is due."""
        return self._due_ns

    def look(self, vitals: Vitals | None, now_ns: int) -> str:
        """Judge, by what the kernel says of the Manager's process just now.

        Returns:
            Why it is to be killed; '' = it is not.
        """
        policy, period_ns = self._policy, int(self._policy.look * 1e9)
        late = now_ns - self._due_ns > period_ns
        if vitals is None or vitals.traced or late:
            self._begin(now_ns)
            return ""
        self._due_ns = now_ns + period_ns
        if self._cpu_ns is None:
            self._cpu_ns = vitals.cpu_ns
        silent_ns = now_ns - self._since_ns
        self._busy |= vitals.eager or vitals.cpu_ns - self._cpu_ns > silent_ns * _IDLE_SHARE
        if not self._seen:
            patience = policy.first
        else:
            patience = policy.busy if self._busy else policy.asleep
        if silent_ns < patience * 1e9:
            return ""
        how = "stopped" if vitals.stopped else "busy" if self._busy else "asleep"
        return f"hung: silent for {silent_ns / 1e9:.0f} s, and {how}"


def was_killed(status: int, cause: str, no_room: bool) -> SystemError_:
    """No Manager follows on the first one, which was killed before it served.

    Args:
        status: minus the signal.
        cause: that, in words.
        no_room: it lacked some.
    """
    hint = "give it more memory" if no_room else ""
    if status == -signal.SIGABRT:  # ZeroMQ, say, where it gets no thread
        hint = "why a library aborts, it has said above"
    code = "NO_SPACE" if no_room else "INTERNAL"
    return SystemError_(code, f"the control plane was {cause}", hint=hint)
