"""Kills: processes of all roles in turn, each as soon as the system has recovered from the last."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

import psutil

from blockflow.bench.chaos.faults import Injected, Injector, wait_healthy
from blockflow.bench.chaos.plan import Fault, Kind
from blockflow.bench.chaos.remote import RemoteSystem
from blockflow.core.errors import BlockFlowError

REPLICAS = 3
"""Of every worker: one that dies often is restarted later and later, and given up in the end, so a
run that shall kill dozens a minute needs many to choose from."""

PER_MINUTE = 3
"""Kills of a role that has one process only, for the same reason."""

_ANY = "worker"
RECOVERY_S = 120.0
"""Longer than this no recovery takes, nor does anybody have to rest."""
_AGAIN_S = 1.0


class Turns:
    """Whose turn it is. Pure: times are arguments.

    Args:
        kinds: of faults; those that kill a process take part, whatever they are called.
    """

    def __init__(self, kinds: Sequence[Kind]) -> None:
        self._queue = deque(k for k in kinds if k.kills and "killed" in k.name)
        self._taken: dict[str, deque[float]] = {k.name: deque() for k in self._queue}
        self._not_before: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._queue)

    def take(self, now_s: float) -> Kind | None:
        """The next one that may die now; None = all must wait."""
        for _ in range(len(self._queue)):
            kind = self._queue[0]
            self._queue.rotate(-1)
            taken = self._taken[kind.name]
            while taken and taken[0] < now_s - 60.0:
                taken.popleft()
            rested = now_s >= self._not_before.get(kind.name, 0.0)
            if rested and (kind.name.startswith(_ANY) or len(taken) < PER_MINUTE):
                taken.append(now_s)
                return kind
        return None

    def give_back(self, kind: Kind, now_s: float) -> None:
        """There was nobody to kill: not now."""
        self._taken[kind.name].pop()
        self._not_before[kind.name] = now_s + _AGAIN_S


def strike(system: RemoteSystem, injector: Injector, fault: Fault) -> tuple[Injected, float | None]:
    """Do it and wait until everything is ready again.

    Returns:
        What was done (without tasks: nothing, and nothing was waited for), and the seconds until
        the system was ready; None = not in time.
    """
    try:
        before = census(system)
    except BlockFlowError as e:
        return Injected(fault.at_s, fault.kind.name, (), f"not done: {e}"), None
    begin = time.monotonic()
    done = injector.inject(fault)
    if not done.tasks:
        return done, None
    # It is ready until the death is noticed: that comes first.
    while _all_there(before, system):
        if time.monotonic() - begin > RECOVERY_S:
            return done, None
        time.sleep(0.005)
    # Ready is who can serve; the next one dies when every process has its successor.
    while wait_healthy(system, RECOVERY_S) is None or not _as_many(len(before), system):
        if time.monotonic() - begin > RECOVERY_S:
            return done, None
        time.sleep(0.01)
    return done, time.monotonic() - begin


def census(system: RemoteSystem) -> set[int]:
    """Process ids of the living, as the control plane knows them."""
    commands = system.commands
    members = [commands.worker("dispatcher"), *commands.workers()]
    found = {m["pid"] for m in members if m.get("pid") and m["state"] == "ready"}
    found.add(commands.status()["manager"]["pid"])
    template = commands.template_pid()
    if template and _lives(template):
        found.add(template)
    return found


def _all_there(pids: set[int], system: RemoteSystem) -> bool:
    try:
        return pids <= census(system)
    except BlockFlowError:  # it is too busy to say
        return True


def _as_many(count: int, system: RemoteSystem) -> bool:
    try:
        return len(census(system)) >= count
    except BlockFlowError:
        return False


def _lives(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
