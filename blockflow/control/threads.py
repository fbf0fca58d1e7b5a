"""ThreadBook: the planned threads and lanes, told to the processes that run. Pure.

The plan follows the fleet's seats, that is the topology and the update under way, never the state
of a process: a crash, a restart or a drain changes nobody's threads. While an update goes on,
processes of two generations may compute; the plan then is over both, and threads only shrink. What
the old ones leave is given out when they are gone.
"""

from __future__ import annotations

from collections.abc import Sequence

from blockflow.control.crew import Crew
from blockflow.control.events import Send
from blockflow.control.fleet import Life, Replica, Role
from blockflow.core.lifecycle import State
from blockflow.core.placement import WorkerSpec
from blockflow.core.threads import Demand, Share, ThreadPlan, plan_threads
from blockflow.wire.control import SetThreads


class ThreadBook:
    """Who was told to use how many threads in how many lanes (:class:`Life`), and who has to be.

    Args:
        crew: the processes.
        at_once: cores that may be busy at once.
    """

    def __init__(self, crew: Crew, at_once: int) -> None:
        self._crew = crew
        self._at_once = at_once
        self._known: tuple[list[Demand], ThreadPlan] = ([], plan_threads([]))
        self._looked: tuple[object, ...] = ()

    def of_new(self, specs: Sequence[WorkerSpec]) -> list[Share]:
        """Threads and lanes of processes that are about to start beside all others, by spec."""
        running = [group[0].spec.demand(len(group)) for group in self._groups()]
        counts: dict[str, int] = {}
        for spec in specs:
            counts[spec.name] = counts.get(spec.name, 0) + 1
        new = {s.name: s.demand(counts[s.name]) for s in specs}
        plan = plan_threads([*running, *new.values()], self._at_once)
        shares = dict(zip(new, plan.shares[len(running) :], strict=True))
        return [shares[s.name] for s in specs]

    def tell(self, *, settled: bool) -> None:
        """Send SetThreads to whom the plan has changed for, those that shrink first.

        Args:
            settled: no update is under way; otherwise nobody grows.
        """
        # The brain asks after every event. These are all that the answer follows from.
        facts = [(r.spec, r.role, r.life, r.life.hello, r.life.reaped) for r in self._crew.fleet]
        if self._looked == (settled, facts):
            return
        self._looked = settled, facts
        groups = self._groups(but=Role.CANDIDATE)
        plan = self._plan([group[0].spec.demand(len(group)) for group in groups])
        changes: list[tuple[Share, Life]] = []
        for group, share in zip(groups, plan.shares, strict=True):
            for replica in group:
                life = replica.life
                if share != (life.threads, life.lanes) and (settled or not _grows(share, life)):
                    changes.append((share, life))
        for (threads, lanes), life in sorted(changes, key=lambda c: _grows(*c)):
            if life.reaped:
                life.threads, life.lanes = threads, lanes  # its successor's
            elif life.connected and life.state is not State.STOPPING:
                life.threads, life.lanes = threads, lanes
                self._crew.out.append(Send(life.incarnation, SetThreads(threads, lanes)))

    def _plan(self, demands: list[Demand]) -> ThreadPlan:
        """The answer changes with updates only, not with lives that begin and end."""
        if demands != self._known[0]:
            self._known = demands, plan_threads(demands, self._at_once)
        return self._known[1]

    def _groups(self, but: Role | None = None) -> list[list[Replica]]:
        """The replicas of each worker and role, which have one number of threads. Those that retire
        may be of two epochs that ask for different ones."""
        groups: dict[tuple[Demand, Role], list[Replica]] = {}
        for replica in self._crew.fleet:
            if replica.role is not but:
                groups.setdefault((replica.spec.demand(1), replica.role), []).append(replica)
        return list(groups.values())


def _grows(share: Share, life: Life) -> bool:
    """Whether with ``share`` more of its threads may compute at once."""
    threads, lanes = share
    return threads * lanes > life.threads * life.lanes
