"""One more worker: how soon it is there, and how big it is."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from blockflow.bench.results import Figure, latency_figure
from blockflow.control.system import System
from blockflow.launch.process_kpi import private_and_shared
from blockflow.repository.repository import BlockRepository

READY, READY_WITHOUT_LOAD, USS = (
    "worker ready",
    "worker ready but for artifact load",
    "worker USS without state",
)

_LOOK_S = 0.05
_STILL = 4
"""So many looks that find no less in a row."""
_LOOKS = 40


def measure_start(
    system: System, base: Mapping[str, Any], blocks: Sequence[str], count: int
) -> list[dict[str, float]]:
    """Add one worker at a time for one more of ``blocks`` to the topology ``base``.

    ``start_ms`` runs from the order to launch until Ready; ``load_ms`` is the artifact's share;
    ``uss_mib`` the private memory of the idle process beyond its block's parameters and buffers,
    which is left out where the kernel does not tell.
    """
    out = []
    repository = BlockRepository(system.settings.repository)
    for i in range(count):
        block = blocks[i % len(blocks)]
        name = f"extra{i}"
        extra = {"name": name, "block": block, "threads": 1}
        system.apply({**base, "blocks": [*base["blocks"], extra]})
        worker = next(w for w in system.status()["workers"] if w["worker"] == name)
        uss = idle_private(worker["pid"])
        one = {"start_ms": worker["start_ms"], "load_ms": worker["load_ms"]}
        if uss:
            one["uss_mib"] = (uss - repository.info(block).state_bytes) / 2**20
        out.append(one)
        system.apply(base)
    return out


def idle_private(pid: int) -> int:
    """Private bytes of a worker that has come to rest; 0 where they cannot be read.

    What the readiness probe's forward has left, megabytes, it gives back when it has its routes: an
    update does not wait for that.
    """
    least, _ = private_and_shared(pid)
    still = 0
    for _ in range(_LOOKS):
        if still == _STILL or not least:
            break
        time.sleep(_LOOK_S)
        now, _ = private_and_shared(pid)
        still = 0 if now < least else still + 1
        least = min(now, least)
    return least


def start_figures(starts: Sequence[Mapping[str, float]]) -> list[Figure]:
    """How fast one more worker is there, and how big it is (the largest)."""
    without = [s["start_ms"] - s["load_ms"] for s in starts]
    out = [
        latency_figure(READY, "tensormq", None, [s["start_ms"] for s in starts]),
        latency_figure(READY_WITHOUT_LOAD, "tensormq", None, without),
    ]
    sizes = [s["uss_mib"] for s in starts if "uss_mib" in s]
    if sizes:
        out.append(Figure.of(USS, "tensormq", max(sizes), "MiB", len(sizes)))
    return out
