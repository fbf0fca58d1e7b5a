"""Supervision: whether and when a dead process is started again. Pure: ``now`` is an argument.

Pauses double, and a part of each is left to chance, so that processes which die together do not
all come back, and load from the same disk, in the same moment.

Restart intensity as in Erlang/OTP's supervisors: so many crashes within a window and the replica is
given up, so that a block that cannot live does not take the machine with it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Back-off ``first_s`` doubling to ``cap_s``; ``crashes`` within ``window_s`` mean giving up
    (0 = never, for a process without which nothing works)."""

    first_s: float = 0.1
    cap_s: float = 30.0
    crashes: int = 5
    window_s: float = 60.0


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


Verdict = RestartAt | GiveUp


@dataclass(slots=True)
class RestartLedger:
    """The crashes of one replica within the window."""

    policy: RestartPolicy
    total: int = 0
    _recent: deque[int] = field(default_factory=deque)

    def crashed(self, now_ns: int, *, retryable: bool = True, chance: float = 0.0) -> Verdict:
        """Record a death.

        Args:
            now_ns: monotonic clock.
            retryable: false gives up at once (a load failure: the same artifact will fail the same
                way).
            chance: 0..1; the pause is shortened by up to half of it.
        """
        policy = self.policy
        window_ns = int(policy.window_s * 1e9)
        self.total += 1
        self._recent.append(now_ns)
        while self._recent and self._recent[0] <= now_ns - window_ns:
            self._recent.popleft()
        if not retryable:
            return GiveUp("it failed in a way that another start does not mend")
        count = len(self._recent)
        if policy.crashes and count >= policy.crashes:
            return GiveUp(f"{count} crashes within {policy.window_s:g} s")
        # The exponent is bounded so that a long crash loop cannot overflow the float.
        delay_s = min(policy.first_s * 2.0 ** min(count - 1, 30), policy.cap_s) * (1 - chance / 2)
        return RestartAt(now_ns + int(delay_s * 1e9))
