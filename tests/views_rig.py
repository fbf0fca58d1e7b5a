"""What is told of a world, held against the served document."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from control_rig import World
from jsonschema import Draft202012Validator

from blockflow.control.kpis import KpiBook
from blockflow.control.rest.answers import _SYSTEM_STATES
from blockflow.control.rest.schemas import components
from blockflow.control.views import Views
from blockflow.core.metrics import ProcessKpi
from blockflow.wire.control import Stats
from tests.rest_rig import closed

COMPONENTS = closed(components())
PROCESS = asdict(ProcessKpi(7, 2.5, 0.0, 6, 5, 4, 3, 2))


def fits(name: str, document: Any) -> Any:
    """It is of the form that is promised, and has nothing that is not."""
    schema = {"$ref": f"#/components/schemas/{name}", "components": {"schemas": COMPONENTS}}
    Draft202012Validator(schema).validate(document)
    return document


class Told:
    """Views of a world as it is now, with the figures that its processes have sent."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.kpis = KpiBook()
        self.pings: dict[int, float] = {}

    @property
    def views(self) -> Views:
        return Views(self.world.brain, self.kpis, self.pings, self.world.now)

    def state(self) -> str:
        assert self.views.state() in _SYSTEM_STATES
        return self.views.state()

    def block(self, name: str) -> dict[str, Any]:
        return fits("Block", self.views.block(name))

    def task(self, name: str) -> dict[str, Any]:
        (found,) = (fits("Task", t) for t in self.views.tasks() if t["name"] == name)
        return found

    def worker(self, name: str) -> dict[str, Any]:
        return fits("Worker", self.views.worker(name))

    def dispatcher(self) -> dict[str, Any]:
        return fits("Dispatcher", self.views.worker("dispatcher"))

    def says(self, name: str, **extra: Any) -> None:
        """Its process has sent figures now, of one stage."""
        incarnation = self.world.incarnation(name)
        life = self.world.brain.crew.find(incarnation)
        assert life is not None
        stages = [
            {"stage": number, "engine": f"e-{block}", "precision": f"p-{block}", "rows": 7}
            for block, number in life.stages.items()
        ]
        stats = Stats(incarnation, self.world.now, stages, PROCESS, extra)
        topology = self.world.brain.realm.topology
        self.kpis.add(incarnation, name, stats, 0.0, () if topology is None else topology.tasks)
