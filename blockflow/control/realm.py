"""Realm: what is in force (topology, epoch, closed blocks), and its routes. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from typing import Any

from blockflow.control.crew import Crew, ns
from blockflow.control.events import Send
from blockflow.control.fleet import Numbers, Place, Replica
from blockflow.control.policybook import PolicyBook
from blockflow.control.publication import Publication
from blockflow.control.routes import build_tables
from blockflow.control.settings import ControlSettings
from blockflow.control.shares import ShareBook
from blockflow.control.threads import ThreadBook
from blockflow.core.cores import at_once
from blockflow.core.errors import BlockFlowError, RepositoryError, TopologyError
from blockflow.core.guess import Guesses
from blockflow.core.lifecycle import Event, State
from blockflow.core.placement import desired_workers, oversubscription, plan_workers
from blockflow.core.plan import Plan, diff
from blockflow.core.routing import RouteTable
from blockflow.core.topology import Topology
from blockflow.wire.control import Undrain

DEAD_KEPT = 64
"""More do not die in the moment before their Manager does."""


class Realm:
    """The state in force, apart from the update that may be changing it.

    Attributes:
        crew: the processes.
        publication: how far the latest routes got.
        threads: who was told to use how many.
        policies: who was given which.
        shares: index of each task's share.
        epoch, topology, posted: what is in force; epoch 0 is none.
        unrestored: why the stored topology is not in force, None where it is or there was none.
        stored: artifacts that the epoch means, by block of the repository; None where those that
            the topology names are meant.
        notes: what is otherwise than the epoch means it.
        closed: block -> ``drain`` or ``stop``: what an operator closed to new work.
        version: of the latest routes; counts up with every change of them.
        dead: incarnations of the latest processes that have ended. Should this Manager die, its
            successor tells everybody of them: it may not have come to that.
    """

    def __init__(self, settings: ControlSettings, place: Place, numbers: Numbers) -> None:
        self.settings = settings
        self.crew = Crew(settings, place, numbers)
        self.publication = Publication(ns(settings.timing.ack), ns(settings.timing.flip))
        self.threads = ThreadBook(self.crew, at_once(settings.cores))
        self.policies = PolicyBook(self.crew)
        self.epoch = 0
        self.topology: Topology | None = None
        self.posted: Mapping[str, Any] | None = None
        self.unrestored: BlockFlowError | None = None
        self.stored: Mapping[str, str] | None = None
        self.notes: tuple[str, ...] = ()
        self.shares = ShareBook()
        self.closed: dict[str, str] = {}
        self.version = 0
        self.dead: deque[int] = deque(maxlen=DEAD_KEPT)

    def plan(self, topology: Topology) -> Plan:
        """The difference between ``topology`` and what runs. Raises TopologyError."""
        desired = desired_workers(topology, self.settings.cores)
        running = [r.running() for r in self.crew.fleet.active() if r.wanted]
        # Who is set aside does not count as running, and comes back all the same.
        taken = {r.name for r in self.crew.fleet if r.restart_at_ns is not None}
        return diff(desired, running, taken | {life.name for life in self.crew.lives()})

    def unchanged(self, topology: Topology, plan: Plan) -> bool:
        """True when applying ``topology`` would change nothing at all."""
        return (
            plan.empty
            and not self.closed
            and self.topology is not None
            and self.topology.to_dict() == topology.to_dict()
            # What runs in the place of an artifact that was gone is meant from now on.
            and self.stored in (None, topology.digests())
            # A refusal may be of new facts for a policy that stays: the plan does not show it.
            and not any(r.refused for r in self.crew.fleet.active())
        )

    def told(self, topology: Topology, plan: Plan) -> dict[str, Any]:
        """The plan for people: replicas, threads, lanes and tasks."""
        old = self.topology.tasks if self.topology is not None else {}
        new = topology.tasks
        workers = desired_workers(topology, self.settings.cores)
        shares = plan_workers(workers, self.settings.cores)
        return {
            **plan.to_dict(),
            "threads": self.planned(topology),
            "lanes": {w.name: n for w, n in zip(workers, shares.lanes, strict=True)},
            "tasks": {
                "add": [t for t in new if t not in old],
                "remove": [t for t in old if t not in new],
                "change": [t for t in new if t in old and new[t] != old[t]],
            },
        }

    def planned(self, topology: Topology | None) -> dict[str, int]:
        """worker -> threads of a forward under ``topology`` once no update is under way. Policies
        count on these, for it is with them that they were accepted."""
        if topology is None:
            return {}
        workers = desired_workers(topology, self.settings.cores)
        threads = plan_workers(workers, self.settings.cores).threads
        return {w.name: n for w, n in zip(workers, threads, strict=True)}

    def cautions(self, topology: Topology | None) -> list[str]:
        """What is allowed in ``topology`` and yet should be known."""
        if topology is None or not topology.oversubscribe:
            return []
        cores = self.settings.cores
        workers = desired_workers(topology, cores)
        text = oversubscription(workers, plan_workers(workers, cores), cores)
        return [f"oversubscribed: {text}"] if text else []

    def hosts(self, block: str) -> list[Replica]:
        """The active replicas that host ``block``. Raises RepositoryError: UNKNOWN_BLOCK."""
        replicas = self.crew.fleet.hosting(block)
        if replicas:
            return replicas
        guesses = Guesses(self.topology.blocks if self.topology is not None else ())
        deployed = ", ".join(guesses.known[:10]) or "none"
        raise RepositoryError(
            "UNKNOWN_BLOCK",
            f"no block {block!r} in the topology",
            where=block,
            hint=guesses.hint(block) or f"deployed: {deployed}",
        )

    def all_closed(self, replica: Replica, how: str = "") -> bool:
        """True when every block of ``replica`` is closed (by ``how``, if given)."""
        blocks = replica.spec.blocks
        return all(self.closed.get(b) == how if how else b in self.closed for b in blocks)

    def reopen(self, *blocks: str) -> None:
        """Let blocks take new work again (with the next publication)."""
        for block in blocks:
            self.closed.pop(block, None)
        for replica in self.crew.fleet.active():
            if replica.life.state is State.DRAINING and not self.all_closed(replica):
                replica.life.on(Event.UNDRAIN)
                self.crew.out.append(Send(replica.life.incarnation, Undrain()))

    def take(
        self,
        topology: Topology,
        epoch: int,
        posted: Mapping[str, Any] | None,
        leaving: set[str],
        closed: Collection[str] = (),
    ) -> None:
        """Put a topology in force; replicas that stay follow it in what a running process can
        change (``leaving`` names those that do not stay). Blocks open but for those ``closed``."""
        self.epoch, self.topology, self.posted = epoch, topology, posted
        self.unrestored, self.stored, self.notes = None, None, ()
        self.reopen(*(set(self.closed) - set(closed)))
        specs = {s.name: s for s in desired_workers(topology, self.settings.cores)}
        planned = self.planned(topology)
        for replica in self.crew.fleet.active():
            spec = specs.get(replica.spec.name)
            if spec is None or replica.name in leaving:
                continue
            replica.spec, replica.planned = spec, planned[spec.name]
            self.policies.tell(replica, epoch)

    def publish(self, now_ns: int) -> None:
        """Make the routes of the present state known. Without a Dispatcher it waits for one."""
        if self.topology is None:
            return
        self.version += 1
        self.shares.follow(self.topology.tasks, self.version, self.publication.drained)
        dispatcher = self.crew.dispatcher
        if dispatcher is None or not self.crew.dispatcher_ready:
            return
        transit, admission = build_tables(
            self.epoch,
            self.version,
            self.topology,
            self.crew.fleet,
            dispatcher,
            self.closed,
            self.shares,
        )
        workers = {r.incarnation for stage, r in transit.stages.items() if stage}
        self.crew.out.extend(
            self.publication.publish(transit, admission, workers, dispatcher.incarnation, now_ns)
        )

    def reasons_not_ready(self) -> list[str]:
        """Why not every block of the topology can work, and perhaps a task; empty when all can.

        What serves is what the Dispatcher's routes name. While newer ones are being published the
        former still do, so that an update under which every task goes on makes nothing unready.
        """
        out = []
        if not self.crew.dispatcher_ready:
            out.append("the dispatcher is not ready")
        if self.unrestored is not None:
            error = self.unrestored
            text = f"{error.code}: {error.message}"
            out.append(f"the stored topology (epoch {self.epoch}) cannot be deployed: {text}")
            out += map(str, error.problems if isinstance(error, TopologyError) else ())
        if self.topology is None:
            out.append("no topology is in force: post a system update")
            return out
        routes = self.publication.in_force
        served, all_hosts = self._served(routes), self.crew.fleet.hosts()
        for block in self.topology.blocks:
            hosts = all_hosts.get(block, [])
            if block in self.closed:
                out.append(f"block {block} is closed ({self.closed[block]})")
            elif block not in served and all(r.life.state is not State.READY for r in hosts):
                states = {r.state for r in hosts} or {"missing"}
                out.append(f"block {block} has no ready worker ({', '.join(sorted(states))})")
        known = set(routes.tasks) if routes is not None else set()
        if not out and not (
            served.issuperset(self.topology.blocks) and known.issuperset(self.topology.tasks)
        ):
            out.append("the routes are being published")
        return out

    def _served(self, routes: RouteTable | None) -> set[str]:
        """Blocks that ``routes`` give to a ready worker."""
        if routes is None:
            return set()
        lives = (r.life for r in self.crew.fleet.replicas)
        ready = {n for life in lives if life.state is State.READY for n in life.stages.values()}
        return {route.block for n, route in routes.stages.items() if n in ready}
