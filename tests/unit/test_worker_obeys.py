"""Worker: what it does with routes and policies that come late, or that it cannot have."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from policy_rig import profile

from blockflow.batching.facts import StageFacts
from blockflow.batching.shares import TaskShare
from blockflow.core.routing import RouteTable, StageRoute
from blockflow.tensormq.agent import Mailbox
from blockflow.wire import control
from blockflow.worker.monitor import AskKpi, Snapshot
from blockflow.worker.parts import Parts
from blockflow.worker.runner import Loaded, release_load_memory
from blockflow.worker.sampling import StageSample
from blockflow.worker.scheduler import Scheduler
from blockflow.worker.worker import Worker

ME = 7


class Delivery:
    undeliverable = 3

    def __init__(self) -> None:
        self.routes = RouteTable(0, 0)
        self.gone: list[int] = []

    def peer_gone(self, incarnation: int) -> None:
        self.gone.append(incarnation)

    def set_routes(self, table: RouteTable) -> None:
        self.routes = table


class Rig:
    """A worker without threads, sockets and blocks."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.delivery = Delivery()
        self.scheduler = Scheduler({1: {"policy": "none"}}, {1: StageFacts()})
        self.worker = Worker.__new__(Worker)
        self.worker._launch = cast(Any, SimpleNamespace(incarnation=ME, monitor_hz=0.5))
        self.done: list[Any] = []
        self.worker._agent = cast(
            Any, SimpleNamespace(send=self.told.append, heard=self.done.append)
        )
        self.worker._mailbox, self.worker._loaded, self.worker._state = Mailbox(), None, "loading"
        self.worker._adoption = cast(
            Any, SimpleNamespace(check=lambda: self.done.append("adoption"))
        )
        self.parts = cast(
            Any,
            SimpleNamespace(
                delivery=self.delivery,
                scheduler=self.scheduler,
                memory=SimpleNamespace(
                    forget_figures=lambda: self.done.append("figures forgotten"),
                    consumer=SimpleNamespace(peer_gone=self.done.append),
                    ebb=lambda now: self.done.append("memory given back"),
                ),
                ebb=lambda now: Parts.ebb(self.parts, now),
                turns=SimpleNamespace(
                    later=self.done.append, poke=lambda: self.done.append("poked")
                ),
                monitor=SimpleNamespace(
                    answer=self.done.append, set_rate=self.done.append, start=self.done.append
                ),
                endpoint="ipc://me",
                intake=SimpleNamespace(malformed=1),
                push=SimpleNamespace(pending=lambda: 4),
                runner=SimpleNamespace(
                    threads=5,
                    pool=SimpleNamespace(ebb=lambda now: self.done.append("and its buffers")),
                ),
                executor=SimpleNamespace(lanes=2, withdrawn=6, backlog=SimpleNamespace(copies=7)),
                sampler=SimpleNamespace(sample=lambda now: StageSample()),
            ),
        )

    def read(self, *letters: Any) -> None:
        for letter in letters:
            self.worker._mailbox.put(letter)
        self.worker._read_mailbox(self.parts)

    def routes(self, version: int) -> None:
        """A table by which stage 2 is the incarnation of that number."""
        route = StageRoute(2, "b", "b#0", version, f"ipc://{version}", "tensormq")
        table = RouteTable(1, version, {2: route}).to_dict()
        self.worker._set_routes(self.parts, control.Routes(table))

    def policy(self, stage: int, **spec: object) -> None:
        message = control.SetPolicy(stage, {"policy": "window", **spec}, threads=1, epoch=5)
        self.worker._set_policy(self.parts, message)


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_routes_that_were_overtaken_are_not_gone_back_to(rig: Rig) -> None:
    for version in (3, 4, 3, 2):
        rig.routes(version)
    assert rig.delivery.routes.stages[2].incarnation == 4
    assert [m.version for m in rig.told] == [3, 4]


def test_a_policy_that_cannot_be_had_is_told_and_the_old_one_stays(rig: Rig) -> None:
    rig.policy(1, no_such_option=1)
    (refused,) = rig.told
    assert isinstance(refused, control.PolicyRefused)
    assert (refused.incarnation, refused.stage, refused.epoch) == (ME, 1, 5)
    assert refused.kept == {"policy": "none"}
    assert refused.error["code"] == "INVALID_TOPOLOGY"
    rig.policy(1, max_rows=4)
    assert rig.scheduler.policy(1) == {"policy": "window", "max_rows": 4}
    assert len(rig.told) == 1


def test_a_policy_for_a_stage_that_is_not_here_changes_nothing(rig: Rig) -> None:
    rig.policy(9, max_rows=4)
    assert rig.told == [] and rig.scheduler.policy(1) == {"policy": "none"}


def test_the_dead_are_told_to_who_sends_and_to_who_reads(rig: Rig) -> None:
    rig.read(control.PeerGone(12))
    assert rig.delivery.gone == [12] and rig.done == [12, "poked"]


def test_a_ping_is_heard_and_the_monitor_gets_its_rate_and_its_answers(rig: Rig) -> None:
    rig.read(control.Ping(8), control.Monitor(2.5), AskKpi())
    *done, answer = rig.done
    assert done == [8, "adoption", "memory given back", "and its buffers", 2.5, "poked"]
    assert isinstance(answer, Snapshot)
    assert answer.counters == {
        "malformed": 1,
        "undeliverable": 3,
        "unsent": 4,
        "threads": 5,
        "lanes": 2,
        "withdrawn": 6,
        "backlog_copies": 7,
    }


def test_a_defect_in_another_thread_ends_it(rig: Rig) -> None:
    with pytest.raises(RuntimeError, match="broken"):
        rig.read(RuntimeError("broken"))


def test_who_is_to_drain_before_it_has_loaded_is_loading_still(rig: Rig) -> None:
    for message in (control.Drain(), control.Undrain()):
        rig.read(message)
        assert rig.worker._state == "loading"
    rig.read(Loaded(1.0, 1.0))
    for message, state in ((control.Drain(), "draining"), (control.Undrain(), "ready")):
        rig.read(message)
        assert rig.worker._state == state


@pytest.mark.parametrize(("asked", "state"), [(True, "draining"), (False, "ready")])
def test_who_was_told_to_drain_while_it_loaded_drains_when_it_is_ready(
    rig: Rig, asked: bool, state: str
) -> None:
    rig.worker._drain_asked, rig.worker._loaded = asked, Loaded(2.0, 3.0)
    rig.worker._ready(rig.parts)
    assert rig.worker._state == state and rig.done == [0.5]
    assert rig.told == [control.Ready(ME, "ipc://me", load_ms=2.0, warm_ms=3.0)]


def test_what_the_probe_has_left_goes_with_the_first_table_that_is_published(rig: Rig) -> None:
    rig.routes(0)  # by which the probe goes
    assert rig.done == []
    for version in (1, 2):
        rig.routes(version)
    assert rig.done == ["figures forgotten", release_load_memory]


def test_a_policy_counts_on_the_threads_and_the_profile_that_it_was_told(rig: Rig) -> None:
    measured = profile({1: 2.0})
    message = control.SetPolicy(1, {"policy": "window"}, 3, measured.to_dict(), epoch=5)
    rig.worker._set_policy(rig.parts, message)
    assert rig.scheduler.facts[1] == StageFacts(threads=3, profile=measured)
    # A Manager that has taken over while the repository is away tells it again, without.
    rig.worker._set_policy(rig.parts, replace(message, profile={}))
    assert rig.scheduler.facts[1].profile == measured
    rig.worker._set_policy(rig.parts, replace(message, profile={}, threads=2))
    assert rig.scheduler.facts[1] == StageFacts(threads=2)
    broken = control.SetPolicy(1, {"policy": "none"}, 3, {"points": "none"}, epoch=6)
    rig.worker._set_policy(rig.parts, broken)
    (refused,) = rig.told
    assert isinstance(refused, control.PolicyRefused) and refused.epoch == 6


def test_tables_that_are_none_change_nothing_and_shares_reach_the_policies(rig: Rig) -> None:
    for table in ({}, {"version": "x"}, {"stages": 3}):
        rig.worker._set_routes(rig.parts, control.Routes(cast(Any, table)))
    assert rig.told == [] and rig.delivery.routes.version == 0
    shares = [TaskShare(weight=2.0).to_dict()]
    table = RouteTable(1, 1, {}, shares=tuple(shares)).to_dict()
    rig.worker._set_routes(rig.parts, control.Routes(table))
    assert rig.scheduler._shares == (TaskShare(weight=2.0),)
