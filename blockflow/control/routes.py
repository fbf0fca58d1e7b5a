"""The two route tables of a publication, built from what runs. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from blockflow.control.fleet import Life, Replica, Role
from blockflow.control.shares import ShareBook
from blockflow.core import limits
from blockflow.core.errors import Problem, TopologyError
from blockflow.core.lifecycle import State
from blockflow.core.routing import DISPATCHER_STAGE, RouteTable, StageRoute, TaskRoute
from blockflow.core.topology import Topology
from blockflow.wire.control import Routes, encode_control

_ADDRESS_ALLOWANCE = "ipc://" + "x" * 100


def task_routes(topology: Topology | None, shares: ShareBook) -> dict[str, TaskRoute]:
    """The published tasks of a topology."""
    if topology is None:
        return {}
    return {
        name: TaskRoute(
            name=name,
            path=tuple(spec.path),
            contract=topology.contract_of(name),
            max_rows=topology.task_rows(name),
            deadline_ms=spec.deadline_ms,
            check_finite=spec.check_finite,
            share=shares.index(name),
            max_inflight_rows=spec.max_inflight_rows,
        )
        for name, spec in topology.tasks.items()
    }


def build_tables(
    epoch: int,
    version: int,
    topology: Topology | None,
    replicas: Iterable[Replica],
    dispatcher: Life,
    closed: Mapping[str, str],
    shares: ShareBook,
) -> tuple[RouteTable, RouteTable]:
    """(transit, admission): for the workers and for the Dispatcher.

    A request in flight may still visit replicas that retire and blocks that were closed to new
    work, so workers keep their addresses until nothing needs them; new requests may not take them.

    Args:
        closed: blocks that an operator drained or stopped.
        shares: of the topology's tasks.
    """
    transit: dict[int, StageRoute] = {
        DISPATCHER_STAGE: StageRoute(
            DISPATCHER_STAGE,
            "",
            dispatcher.name,
            dispatcher.incarnation,
            dispatcher.endpoint,
            topology.mode if topology is not None else "tensormq",
        )
    }
    admission = dict(transit)
    for replica in replicas:
        life = replica.life
        if life.state not in (State.READY, State.DRAINING) or replica.role is Role.CANDIDATE:
            continue
        for block, stage in life.stages.items():
            route = StageRoute(
                stage,
                block,
                replica.name,
                life.incarnation,
                life.endpoint,
                replica.spec.mode,
                replica.spec.device,
            )
            transit[stage] = route
            if replica.role is Role.ACTIVE and block not in closed:
                admission[stage] = route
    tasks = task_routes(topology, shares)
    return (
        RouteTable(epoch, version, transit, {}, shares.table()),
        RouteTable(epoch, version, admission, tasks, shares.table()),
    )


def check_size(topology: Topology) -> None:
    """Refuse a topology whose route table would not fit a control message.

    Raises:
        TopologyError: INVALID_TOPOLOGY.
    """
    name = "x" * limits.MAX_NAME_CHARS
    route = StageRoute(2**31, name, name, 2**31, _ADDRESS_ALLOWANCE, "tensormq", "cuda:10")
    stages = sum(b.replicas for b in topology.blocks.values())
    # Old and new replicas stand in one table while an update flips.
    many = dict.fromkeys(range(2 * stages + 1), route)
    shares = ShareBook()
    shares.follow(topology.tasks)
    table = RouteTable(2**31, 2**31, many, task_routes(topology, shares), shares.table())
    size = len(encode_control(Routes(table.to_dict())))
    if size > limits.MAX_CONTROL_BYTES:
        raise TopologyError(
            "INVALID_TOPOLOGY",
            "the update is too large for one route table",
            problems=[
                Problem(
                    "$",
                    f"routes of {size} bytes are over the limit of {limits.MAX_CONTROL_BYTES}",
                    "use fewer tasks, blocks or replicas",
                )
            ],
        )
