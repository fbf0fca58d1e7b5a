"""Supervision: whether and when a dead process is started again. Pure: ``now`` is an argument.

Pauses double, and a part of each is left to chance, so that processes which die together do not
all come back, and load from the same disk, in the same moment.

Restart intensity as in Erlang/OTP's supervisors: so many crashes within a window and the replica is
given up, so that a block that cannot live does not take the machine with it. Who could not start
since the machine had no room for it has not crashed, and is tried again as long as that lasts. Who
was killed for want of memory is left alone for a while when that happens too often: what others had
to do then may be over, and until then every further attempt may cost them their lives too.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from blockflow.core.errors import SystemError_


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Back-off ``first_s`` doubling to ``cap_s``; ``crashes`` within ``window_s`` mean giving up
    (0 = never, for a process without which nothing works)."""

    first_s: float = 0.1
    cap_s: float = 30.0
    crashes: int = 5
    window_s: float = 60.0


SCARCE_CAP_S = 5.0
"""Longest pause while the machine has no room: to try again costs little."""

ASIDE_S = 30.0
"""Longest time for which one is left alone that was killed for want of memory too often."""

_GOLDEN = 0.6180339887498949

WORKER_POLICY = RestartPolicy()
DISPATCHER_POLICY = RestartPolicy(crashes=0)


def spread(number: int) -> float:
    """A number in 0..1 for ``number``; those of neighbours lie far apart (golden ratio sequence).

    As good as chance for telling processes apart, and the same in every run.
    """
    return number * _GOLDEN % 1.0


@dataclass(frozen=True, slots=True)
class RestartAt:
    """Start it again when the clock shows ``at_ns``."""

    at_ns: int


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Leave it down; ``reason`` is for people."""

    reason: str


@dataclass(frozen=True, slots=True)
class SetAside:
    """Leave it down, as with :class:`GiveUp`, until the clock shows ``at_ns``."""

    at_ns: int


Verdict = RestartAt | GiveUp | SetAside


@dataclass(slots=True)
class RestartLedger:
    """The crashes of one replica within the window."""

    policy: RestartPolicy
    total: int = 0
    _recent: deque[int] = field(default_factory=deque)
    _scarce: deque[int] = field(default_factory=deque)
    _starved: deque[int] = field(default_factory=deque)
    _aside_ns: int | None = None

    def no_room(self, now_ns: int, *, chance: float = 0.0) -> RestartAt:
        """Record that it could not start for want of memory, processes, descriptors or the like.

        Args: as of :meth:`crashed`.
        """
        self.total += 1
        return self._pause(self._within(self._scarce, now_ns), now_ns, SCARCE_CAP_S, chance)

    def starved(self, now_ns: int, *, chance: float = 0.0) -> RestartAt | SetAside:
        """Record that the kernel killed it for want of memory.

        One that was set aside is so again at once, unless it has lived for a window since.

        Args: as of :meth:`crashed`.
        """
        policy = self.policy
        self.total += 1
        count = self._within(self._starved, now_ns)
        window_ns = int(policy.window_s * 1e9)
        again = self._aside_ns is not None and now_ns < self._aside_ns + window_ns
        if not policy.crashes or (count < policy.crashes and not again):
            return self._pause(count, now_ns, policy.cap_s, chance)
        self._aside_ns = now_ns + int(ASIDE_S * (1 - chance / 2) * 1e9)
        return SetAside(self._aside_ns)

    def crashed(self, now_ns: int, *, retryable: bool = True, chance: float = 0.0) -> Verdict:
        """Record a death.

        Args:
            now_ns: monotonic clock.
            retryable: false gives up at once (a load failure: the same artifact will fail the same
                way).
            chance: 0..1; the pause is shortened by up to half of it.
        """
        policy = self.policy
        self.total += 1
        count = self._within(self._recent, now_ns)
        if not retryable:
            return GiveUp("it failed in a way that another start does not mend")
        if policy.crashes and count >= policy.crashes:
            return GiveUp(f"{count} crashes within {policy.window_s:g} s")
        return self._pause(count, now_ns, policy.cap_s, chance)

    def _within(self, times: deque[int], now_ns: int) -> int:
        """How many there are within the window, with one more now."""
        window_ns = int(self.policy.window_s * 1e9)
        times.append(now_ns)
        while times[0] <= now_ns - window_ns:
            times.popleft()
        return len(times)

    def _pause(self, count: int, now_ns: int, cap_s: float, chance: float) -> RestartAt:
        # The exponent is bounded so that a long crash loop cannot overflow the float.
        delay_s = min(self.policy.first_s * 2.0 ** min(count - 1, 30), cap_s) * (1 - chance / 2)
        return RestartAt(now_ns + int(delay_s * 1e9))


def given_up(reason: str, no_room: bool) -> SystemError_:
    """No Manager follows on those that have died, whether or not for want of room."""
    return SystemError_(
        "NO_SPACE" if no_room else "INTERNAL",
        f"the control plane is given up: {reason}; everything is ended",
        hint="its last words are above; `blockflow up` starts from the stored state",
    )
