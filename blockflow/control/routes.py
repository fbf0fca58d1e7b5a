"""The two route tables of a publication, built from what runs. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from blockflow.batching.lengths import within_classes
from blockflow.batching.registry import batch_rows
from blockflow.control.fleet import Life, Replica, Role
from blockflow.control.shares import ShareBook
from blockflow.core import limits
from blockflow.core.errors import Problem, TopologyError
from blockflow.core.lifecycle import State
from blockflow.core.model import Contract
from blockflow.core.routing import DISPATCHER_STAGE, CanaryRoute, RouteTable, StageRoute, TaskRoute
from blockflow.core.specs import TaskSpec
from blockflow.core.topology import Topology
from blockflow.wire.client import description_body
from blockflow.wire.control import Routes, encode_control

_BOUNDS_ALLOWANCE = 1024
_ADDRESS_ALLOWANCE = "ipc://" + "x" * 100
_REASON_CHARS = 200


def served_contract(topology: Topology, task: str) -> Contract:
    """What a task takes and gives as it is batched now: nothing is longer than the last length
    class on its way."""
    paths = tuple(map(tuple, topology.tasks[task].paths))
    known: dict[Any, Contract] = topology.memo.setdefault("contracts", {})
    if paths not in known:  # thousands of tasks may go a dozen ways
        policies = {
            block: topology.blocks[block].batching.model_dump(mode="json")
            for path in paths
            for block in path
        }
        contract = topology.contract_of(task)
        known[paths] = within_classes(contract, paths, topology.infos, policies)
    return known[paths]


def task_routes(topology: Topology, shares: ShareBook) -> dict[str, TaskRoute]:
    """The published tasks of a topology."""
    routes: dict[str, TaskRoute] = topology.memo.setdefault("routes", {})
    for name in topology.tasks:
        route, share = routes.get(name), shares.index(name)
        if route is None:
            routes[name] = _task_route(topology, name, share)
        elif route.share != share:
            routes[name] = replace(route, share=share)
    return dict(routes)


def _task_route(topology: Topology, name: str, share: int) -> TaskRoute:
    spec = topology.tasks[name]
    return TaskRoute(
        name=name,
        path=tuple(spec.path),
        contract=served_contract(topology, name),
        max_rows=topology.task_rows(name),
        deadline_ms=spec.deadline_ms,
        check_finite=spec.check_finite,
        share=share,
        max_inflight_rows=spec.max_inflight_rows,
        canary=_canary(spec),
        batch_rows=batch_rows(topology, name),
        cpu_latency_us=spec.cpu_latency_us,
    )


def _canary(spec: TaskSpec) -> CanaryRoute | None:
    canary = spec.canary
    return None if canary is None else CanaryRoute(tuple(canary.path), canary.share)


def build_tables(
    epoch: int,
    version: int,
    topology: Topology,
    fleet: Iterable[Replica],
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
            topology.mode,
        )
    }
    admission = dict(transit)
    replicas = list(fleet)
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
                _replayable(topology, block),
                replica.spec.full_slots if replica.spec.mode == "tensormq" else 0,
            )
            transit[stage] = route
            if replica.role is Role.ACTIVE and block not in closed:
                admission[stage] = route
    tasks = task_routes(topology, shares)
    running = {r.block for r in admission.values()}
    down = _down(topology, replicas, closed, running)
    return (
        RouteTable(epoch, version, transit, {}, shares.table()),
        RouteTable(epoch, version, admission, tasks, shares.table(), down),
    )


def _replayable(topology: Topology, block: str) -> bool:
    spec = topology.blocks.get(block)
    return spec is None or spec.replayable


def _down(
    topology: Topology,
    replicas: Iterable[Replica],
    closed: Mapping[str, str],
    running: Collection[str],
) -> dict[str, str]:
    """The blocks that nothing will bring back by itself, each with the reason."""
    active = [r for r in replicas if r.role is Role.ACTIVE]
    down: dict[str, str] = {}
    for block in topology.blocks:
        if block in closed:
            opens = "undrain" if closed[block] == "drain" else "restart"
            down[block] = (
                f"an operator closed it ({closed[block]}); `blockflow {opens} {block}` opens it"
            )
        elif block not in running:
            hosts = [r for r in active if block in r.spec.blocks]
            if hosts and all(r.given_up for r in hosts):
                down[block] = f"it was given up: {hosts[0].given_up}"[:_REASON_CHARS]
    return down


def check_size(topology: Topology) -> None:
    """Refuse a topology whose route table would not fit a control message, or of whose tasks
    clients could not be told.

    Raises:
        TopologyError: INVALID_TOPOLOGY.
    """
    name = "x" * limits.MAX_NAME_CHARS
    route = StageRoute(
        2**31, name, name, 2**31, _ADDRESS_ALLOWANCE, "tensormq", "cuda:10", True, 2**16
    )
    stages = sum(b.replicas for b in topology.blocks.values())
    shares = ShareBook()
    shares.follow(topology.tasks)
    tasks = task_routes(topology, shares)
    down = dict.fromkeys(topology.blocks, "x" * _REASON_CHARS)

    def size_of(count: int, tasks: Mapping[str, TaskRoute], down: Mapping[str, str]) -> int:
        stages = dict.fromkeys(range(count + 1), route)
        table = RouteTable(2**31, 2**31, stages, tasks, shares.table(), down)
        return len(encode_control(Routes(table.to_dict())))

    # As of build_tables: old and new replicas stand in that of the workers while an update flips.
    size = max(size_of(2 * stages, {}, {}), size_of(stages, tasks, down))
    if size > limits.MAX_CONTROL_BYTES:
        raise _too_large("route table", "routes", size, limits.MAX_CONTROL_BYTES)
    body = description_body(2**31, (t.to_dict() for t in tasks.values()), {})
    size = sum(map(len, body)) + _BOUNDS_ALLOWANCE
    if size > limits.MAX_DESCRIPTION_BYTES:
        what = "contracts and paths of all tasks"
        raise _too_large("description", what, size, limits.MAX_DESCRIPTION_BYTES)


def _too_large(message: str, what: str, size: int, most: int) -> TopologyError:
    return TopologyError(
        "INVALID_TOPOLOGY",
        f"the update is too large for one {message}",
        problems=[
            Problem(
                "$",
                f"{what} of {size} bytes are over the limit of {most}",
                "use fewer tasks, blocks or replicas",
            )
        ],
    )
