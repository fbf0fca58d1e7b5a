"""Deaths for want of memory: who was killed for it, and what is said of that.

The kernel kills with SIGKILL, as anybody may, and the dead say nothing. But it counts whom it kills
(:func:`blockflow.launch.cgroup.oom_kills`), so a death beside which the count has risen is told
from others. Which process of the group it was is not said: one that dies so claims one kill, and a
kill that nobody claims (a client's in the same container, say) is forgotten after a while.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from blockflow.core.errors import BlockFlowError, SystemError_
from blockflow.launch.cgroup import OomKills, memory_limit, oom_kills

LOOK_NS = 1_000_000_000
"""Time between two looks while nobody dies: they say which kills are old."""

FRESH_NS = 10_000_000_000
"""How long a kill may be unclaimed: a large process takes its time to end."""

_MOST = 64
"""Kills that may be unclaimed; also after a move to a group that has counted for long."""

_MARK = "oom_kill"

_MEND = "a larger limit, fewer rows at once (max_rows) or fewer replicas"

_ASIDE = "out of memory "


@dataclass(frozen=True, slots=True)
class Shortage:
    """What a process was killed for.

    Attributes:
        limit_bytes: of the control groups, 0 = none: it was the machine's memory.
        own: the kill is of the own control group. Otherwise it was on this machine, and that it was
            this process is a guess.
    """

    limit_bytes: int
    own: bool

    def __str__(self) -> str:
        if not self.own:
            return "perhaps out of memory, for which the kernel has killed on this machine just now"
        return f"out of memory{_limit(self.limit_bytes)}"


class KillWatch:
    """Knows of kills that are recent and unclaimed.

    Args:
        kills: the kernel's count.
        limit: bytes that the control groups allow, 0 = no limit.
        told: called for each kill that explains a death; who watches as well must not claim it.
    """

    def __init__(
        self,
        kills: Callable[[], OomKills] = oom_kills,
        limit: Callable[[], int] = memory_limit,
        told: Callable[[], None] = lambda: None,
    ) -> None:
        self._kills = kills
        self._limit = limit
        self._told = told
        self._seen = kills()
        self._fresh: deque[int] = deque(maxlen=_MOST)
        self._due_ns = 0

    def look(self, now_ns: int) -> None:
        """Take note of the time; call it often."""
        if now_ns >= self._due_ns:
            self._look(now_ns)

    def claim(self, now_ns: int) -> Shortage | None:
        """A process was ended by a SIGKILL that nobody here has ordered: what for, if that is
        known. One kill explains one death."""
        self._look(now_ns)
        if not self._fresh:
            return None
        self._fresh.popleft()
        self._told()
        return Shortage(self._limit(), self._seen.own)

    def _look(self, now_ns: int) -> None:
        self._due_ns = now_ns + LOOK_NS
        before, self._seen = self._seen, self._kills()
        if before.own == self._seen.own:  # else, or where it is lower, another group is asked now
            self._fresh.extend([now_ns] * min(self._seen.total - before.total, _MOST))
        while self._fresh and self._fresh[0] <= now_ns - FRESH_NS:
            self._fresh.popleft()


def killed(name: str, shortage: Shortage, cause: str) -> SystemError_:
    """What the process ``name`` ended with: NO_SPACE, as if it could still have said so."""
    return SystemError_(
        "NO_SPACE",
        cause,
        where=name,
        hint=f"give it {_MEND}",
        details={_MARK: True, "limit_bytes": shortage.limit_bytes},
    )


def starved(error: BlockFlowError | None) -> bool:
    """Whether ``error`` is of :func:`killed`."""
    return error is not None and error.details.get(_MARK) is True


def aside(error: BlockFlowError | None, seconds: float) -> str:
    """Why a replica that was killed too often is left alone for some ``seconds``."""
    limit = error.details.get("limit_bytes", 0) if error is not None else 0
    return f"{_ASIDE}too often{_limit(limit)}: it needs {_MEND}; tried again within {seconds:g} s"


def is_aside(given_up: str) -> bool:
    """Whether a replica was given up with the words of :func:`aside`."""
    return given_up.startswith(_ASIDE)


def _limit(nbytes: int) -> str:
    return f" (limit {nbytes / (1 << 20):.0f} MiB)" if nbytes else ""
