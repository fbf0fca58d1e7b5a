"""KpiReader: what the workers count themselves, between two moments of a benchmark."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from blockflow.control.system import System
from blockflow.launch.process_kpi import private_and_shared

_WAIT_S = 10.0
_LOOK_S = 0.05

Kpis = Mapping[str, Mapping[str, Any]]
"""Block name -> its StageKpi, summed over the replicas for what is counted here."""

_COUNTS = ("requests", "copies_out", "bytes_out")


@dataclass(frozen=True, slots=True)
class Counted:
    """Per hop, that is per request and block: copies and bytes of the output."""

    copies: float
    bytes: float


class KpiReader:
    """Reads a running system's status.

    Args:
        system: of this process.
    """

    def __init__(self, system: System) -> None:
        self._system = system

    def now(self) -> Kpis:
        """The latest KPIs; they may be a quarter of a second old."""
        out: dict[str, dict[str, float]] = {}
        for worker in self._system.status()["workers"]:
            for stage in worker["stages"]:
                sums = out.setdefault(stage["block"], dict.fromkeys(_COUNTS, 0.0))
                for name in _COUNTS:
                    sums[name] += stage["kpi"].get(name, 0)
        return out

    def since(self, before: Kpis, requests: Mapping[str, int]) -> Kpis:
        """The growth since ``before``, once every block of ``requests`` has counted as many.

        Raises:
            TimeoutError: they never do.
        """
        end = time.monotonic() + _WAIT_S
        while time.monotonic() < end:
            now = self.now()
            grown = {
                block: {
                    n: now.get(block, {}).get(n, 0) - before.get(block, {}).get(n, 0)
                    for n in _COUNTS
                }
                for block in requests
            }
            if all(grown[b]["requests"] >= n for b, n in requests.items()):
                return grown
            time.sleep(_LOOK_S)
        raise TimeoutError("the workers' KPIs do not show the requests that were made")

    def pss_mib(self, blocks: Sequence[str]) -> float:
        """Proportional memory of all processes that host any of these blocks, in MiB."""
        pids = {
            worker["pid"]
            for worker in self._system.status()["workers"]
            if worker["pid"] is not None and not set(worker["blocks"]).isdisjoint(blocks)
        }
        return sum(private_and_shared(pid)[1] for pid in pids) / 2**20


def per_hop(grown: Kpis, blocks: Sequence[str]) -> Counted:
    """Means over these blocks' requests."""
    requests = sum(grown[b]["requests"] for b in blocks)
    return Counted(
        sum(grown[b]["copies_out"] for b in blocks) / requests,
        sum(grown[b]["bytes_out"] for b in blocks) / requests,
    )
