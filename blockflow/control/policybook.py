"""PolicyBook: the batching policies that running processes were given, and who keeps another. Pure.

A policy counts on facts: the threads of a forward, and what was measured of its block with them. A
process that runs keeps the facts that it was told, so it is told them with the policy: those by
which the update was accepted. Threads are meant as they will be once no update is under way, for
that is what acceptance looks at; while an update goes on a process may have fewer.
"""

from __future__ import annotations

from blockflow.control.crew import Crew
from blockflow.control.events import Send
from blockflow.control.fleet import Life, Replica
from blockflow.core.errors import from_dict
from blockflow.wire.control import PolicyRefused, SetPolicy


class PolicyBook:
    """Tells policies (:class:`Replica` says which, :class:`Life` for how many threads)."""

    def __init__(self, crew: Crew) -> None:
        self._crew = crew

    def tell(self, replica: Replica, epoch: int) -> None:
        """Give a process the policies of its spec, where it has others or counts on other threads.

        One that has not said Hello hears nothing yet: it is told then. A dead one's successor has
        them from its birth.
        """
        life, wanted = replica.life, replica.spec.policies()
        if not (life.connected or life.reaped):
            return
        for block, policy in wanted.items() if life.connected else ():
            if replica.policies.get(block) != policy or life.planned != replica.planned:
                stage = life.stages[block]
                order = SetPolicy(stage, policy, replica.planned, epoch=epoch)
                life.asked[stage] = epoch
                self._crew.out.append(Send(life.incarnation, order))
        replica.policies, life.planned = wanted, replica.planned
        replica.refused = {}

    def refused(self, life: Life, message: PolicyRefused) -> str:
        """A process keeps a policy, or its facts, that it should have changed. What is in force is
        noted, so that the next update tells it again.

        Returns:
            What to tell people; "" for a stray.
        """
        replica = self._crew.fleet.by_incarnation(life.incarnation)
        plan = None if replica is None else replica.block_of(message.stage)
        if replica is None or plan is None:
            self._crew.strays += 1
            return ""
        block = plan.spec.name
        if message.epoch != life.asked.get(message.stage):
            self._crew.strays += 1  # it comes late: the process was told something else since
            return ""
        replica.policies = {**replica.policies, block: message.kept}
        life.planned = 0  # where the policy is the same, it still counts on what it knew before
        replica.refused = {**replica.refused, block: from_dict(message.error)}
        return refusal(replica, block)

    def refusals(self) -> list[str]:
        """Who keeps which policy, and why, of all that serve."""
        return [refusal(r, b) for r in self._crew.fleet.active() for b in r.refused]


def refusal(replica: Replica, block: str) -> str:
    """One refusal in a line."""
    error = replica.refused[block]
    problem = next(iter(getattr(error, "problems", ())), None)
    why, hint = (error.message, error.hint) if problem is None else (problem.message, problem.hint)
    kept = replica.policies[block]
    name = kept.get("policy", "?")
    how = " as it was" if kept == replica.spec.policies()[block] else ""
    text = f"{replica.name} keeps the batching policy {name!r} for block {block!r}{how}: {why}"
    return f"{text} ({hint})" if hint else text
