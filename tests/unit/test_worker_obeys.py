"""Worker: what it does with routes and policies that come late, or that it cannot have."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from blockflow.batching.facts import StageFacts
from blockflow.core.routing import RouteTable, StageRoute
from blockflow.wire import control
from blockflow.worker.scheduler import Scheduler
from blockflow.worker.worker import Worker

ME = 7


class Delivery:
    def __init__(self) -> None:
        self.routes = RouteTable(0, 0)

    def set_routes(self, table: RouteTable) -> None:
        self.routes = table


class Rig:
    """A worker without threads, sockets and blocks."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.delivery = Delivery()
        self.scheduler = Scheduler({1: {"policy": "none"}}, {1: StageFacts()})
        self.worker = Worker.__new__(Worker)
        self.worker._launch = cast(Any, SimpleNamespace(incarnation=ME))
        self.worker._agent = cast(Any, SimpleNamespace(send=self.told.append))
        self.parts = cast(
            Any,
            SimpleNamespace(
                delivery=self.delivery,
                scheduler=self.scheduler,
                memory=SimpleNamespace(forget_figures=lambda: None),
                turns=SimpleNamespace(later=lambda job: None),
            ),
        )

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
