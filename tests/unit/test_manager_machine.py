"""Random lives of a system against the Brain: whatever happens, it comes to rest as it should."""

from __future__ import annotations

from typing import Any

from control_rig import World
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from blockflow.control.events import Exited
from blockflow.control.fleet import Role
from blockflow.control.heartbeat import Hang
from blockflow.control.threads import ThreadBook
from blockflow.control.update import Kind
from blockflow.core.errors import BlockError, BlockFlowError
from blockflow.core.lifecycle import State
from blockflow.core.placement import desired_workers, plan_workers
from blockflow.wire.control import PeerGone

BLOCKS = ["a", "b", "c"]
CORES = 5


class BrainMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world = World(CORES).up()
        self.wanted: dict[str, int] = {}
        self.there: set[int] = set()
        self.told: set[tuple[int, int]] = set()
        self.read = 0

    @rule(
        counts=st.dictionaries(st.sampled_from(BLOCKS), st.integers(1, 2), min_size=1),
        digest=st.sampled_from(["x", "y"]),
    )
    def apply(self, counts: dict[str, int], digest: str) -> None:
        blocks = [{"name": b, "replicas": n} for b, n in counts.items()]
        tasks = {f"t-{b}": [b] for b in counts}
        try:
            self.world.apply(blocks, tasks, digests=dict.fromkeys(BLOCKS, digest))
        except BlockFlowError as e:
            if e.code != "UPDATE_IN_PROGRESS":
                raise

    @rule(block=st.sampled_from(BLOCKS), kind=st.sampled_from(list(Kind)[2:]))
    def operate(self, block: str, kind: Kind) -> None:
        brain = self.world.brain
        try:
            if kind is Kind.RESTART:
                self.world.do(lambda now: brain.restart(block, now))
            else:
                self.world.do(lambda now: brain.close(block, kind, now))
        except BlockFlowError as e:
            if e.code not in ("UPDATE_IN_PROGRESS", "UNKNOWN_BLOCK", "INVALID_REQUEST"):
                raise

    @rule(data=st.data())
    def kill(self, data: Any) -> None:
        if self.world.alive:
            name = data.draw(st.sampled_from(self.world.names()))
            self.world.die(name)

    @rule(data=st.data())
    def manager_dies(self, data: Any) -> None:
        names = st.lists(st.sampled_from(self.world.names() or [""]), unique=True, max_size=2)
        self.world.succeed(killed=[n for n in data.draw(names) if n])

    @rule(data=st.data())
    def manager_dies_with_it(self, data: Any) -> None:
        """It has seen the death, and written it down."""
        if self.world.alive:
            dead = self.world.incarnation(data.draw(st.sampled_from(self.world.names())))
            del self.world.alive[dead]
            self.world.brain.handle(Exited(dead, -9), self.world.now)
            self.world.succeed()

    @rule(seconds=st.floats(0.01, 90))
    def wait(self, seconds: float) -> None:
        self.world.pass_time(seconds)

    @rule(name=st.sampled_from(["a#0", "b#0", "c#1", "dispatcher"]))
    def mute(self, name: str) -> None:
        self.world.mute ^= {name}

    @rule(name=st.sampled_from(["a#0", "b#0", "c#1"]))
    def break_start(self, name: str) -> None:
        if self.world.start_fails.pop(name, None) is None:
            self.world.start_fails[name] = BlockError("LOAD_FAILED", "no")

    @rule(name=st.sampled_from(["a#0", "b#0", "c#1"]))
    def break_probe(self, name: str) -> None:
        if self.world.probe_fails.pop(name, None) is None:
            self.world.probe_fails[name] = BlockError("OUTPUT_MISMATCH", "no")

    @rule(data=st.data())
    def hang(self, data: Any) -> None:
        if self.world.alive:
            incarnation = data.draw(st.sampled_from(sorted(self.world.alive)))
            self.world.brain.condemn(Hang(incarnation, "hung"), self.world.now)
            self.world.settle()

    @rule()
    def busy(self) -> None:
        self.world.busy = True

    @rule()
    def idle(self) -> None:
        if "dispatcher" in self.world.names():
            self.world.let_drain()

    @rule()
    def disk(self) -> None:
        self.world.disk_full = not self.world.disk_full

    @invariant()
    def names_are_unique_among_the_living(self) -> None:
        names = [life.name for life in self.world.brain.crew.lives()]
        assert len(names) == len(set(names))

    @invariant()
    def every_process_is_known(self) -> None:
        known = {life.incarnation for life in self.world.brain.crew.lives()}
        assert known == set(self.world.alive)

    @invariant()
    def the_living_are_told_who_died(self) -> None:
        """Those who were there when the one before this rule came, and can hear."""
        world, before = self.world, self.there
        for sent in world.sent(PeerGone, self.read):
            self.told.add((sent.incarnation, sent.message.incarnation))  # type: ignore[attr-defined]
        self.read, self.there = len(world.log), set(world.alive)
        heard = {life.incarnation for life in world.brain.crew.lives() if life.connected}
        survivors = self.there & before & heard
        assert all((i, dead) in self.told for dead in before - self.there for i in survivors)

    @invariant()
    def new_requests_go_to_active_replicas_of_the_epoch(self) -> None:
        realm = self.world.brain.realm
        if realm.topology is None or not realm.crew.dispatcher_ready:
            return
        if realm.publication.flipped == realm.version:
            stages = self.world.admitted_stages()
            assert {s["block"] for s in stages} <= set(realm.topology.blocks)
            for stage in stages:
                replica = realm.crew.fleet.by_incarnation(stage["incarnation"])
                assert replica is not None and replica.role is Role.ACTIVE
                assert replica.life.state is State.READY

    @invariant()
    def threads_told_do_not_outnumber_the_cores(self) -> None:
        """Whoever may compute: not those of an update that has not been adopted."""
        seats = [r for r in self.world.brain.crew.fleet if r.role is not Role.CANDIDATE]
        told = sum(r.life.threads * r.life.lanes for r in seats if r.life.connected)
        assert told <= max(CORES, len(seats))

    @invariant()
    def threads_are_told_as_soon_as_they_may_be(self) -> None:
        """Who forgets what it saw last finds nothing to tell."""
        brain = self.world.brain
        ThreadBook(brain.crew, CORES).tell(settled=brain.runner.settled)
        assert brain.crew.out == []

    def teardown(self) -> None:
        """Make the world good again: the system must come to rest in what was asked for."""
        world = self.world
        world.mute.clear()
        world.start_fails.clear()
        world.probe_fails.clear()
        world.disk_full = False
        world.busy = False
        world.pass_time(300)
        brain = world.brain
        assert brain.runner.settled
        assert brain.crew.dispatcher_ready
        realm = brain.realm
        if realm.topology is None:
            assert world.names() == ["dispatcher"]
            return
        assert all(r.role is Role.ACTIVE for r in brain.crew.fleet)
        cores = range(CORES)
        workers = desired_workers(realm.topology, cores)
        planned = plan_workers(workers, cores).shares
        wanted = {w.name: n for w, n in zip(workers, planned, strict=True)}
        told = {r.name: (r.life.threads, r.life.lanes) for r in brain.crew.fleet}
        assert told == {r.name: wanted[r.spec.name] for r in brain.crew.fleet}
        heard = world.computing()
        assert heard == {n: threads for n, (threads, _) in told.items() if n in heard}
        expected = {}
        for name, spec in realm.topology.blocks.items():
            hosts = brain.crew.fleet.hosting(name)
            assert len(hosts) == spec.replicas
            up = sum(r.wanted for r in hosts)
            assert up == sum(not r.life.reaped for r in hosts)
            if up and name not in realm.closed:
                expected[name] = up
        assert world.admitted_blocks() == expected
        brain.shutdown(world.now)
        world.settle()
        world.pass_time(60)
        assert world.gone
        assert not world.alive


TestBrainMachine = BrainMachine.TestCase
TestBrainMachine.settings = settings(
    max_examples=45,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
