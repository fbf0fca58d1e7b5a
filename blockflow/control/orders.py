"""The sizes of launch orders, looked at before anything is started. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from blockflow.control.fleet import WORKER_ENTRY, Life, Place, worker_launch
from blockflow.control.settings import ControlSettings
from blockflow.core import limits
from blockflow.core.errors import Problem, TopologyError
from blockflow.core.placement import WorkerSpec
from blockflow.launch.child import Order
from blockflow.repository.manifest import MAX_MANIFEST_BYTES

_LARGEST = 2**32
_FEW = limits.MAX_CONTROL_BYTES // (2 * MAX_MANIFEST_BYTES)
"""Blocks that fit for sure, whatever their manifests hold, and as much again."""


def check_orders(specs: Iterable[WorkerSpec], place: Place, settings: ControlSettings) -> None:
    """Refuse workers of whom no process could be told all of their blocks.

    Raises:
        TopologyError: INVALID_TOPOLOGY.
    """
    problems: list[Problem] = []
    for spec in {s.name: s for s in specs if len(s.stages) > _FEW}.values():
        name = f"{spec.name}#{limits.MAX_REPLICAS}"
        stages = dict.fromkeys(spec.blocks, _LARGEST)
        life = Life(name, _LARGEST, 0, stages, _LARGEST, limits.MAX_LANES, _LARGEST)
        launch = worker_launch(spec, life, place, settings, 0.0)
        size = len(Order(WORKER_ENTRY, launch.to_dict(), name).to_bytes())
        if size > limits.MAX_CONTROL_BYTES:
            problems.append(
                Problem(
                    "$.blocks",
                    f"worker {spec.name!r} has {len(stages)} blocks, and what its process is told "
                    f"of them has {size} bytes, over the limit of {limits.MAX_CONTROL_BYTES}",
                    "give them to several workers",
                )
            )
    if problems:
        raise TopologyError(
            "INVALID_TOPOLOGY", "the update is too large for a worker's start", problems=problems
        )
