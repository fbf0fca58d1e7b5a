"""KpiReader: what the workers count themselves, between two moments of a benchmark."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from blockflow.bench.grid import digits
from blockflow.bench.results import Figure
from blockflow.control.system import System
from blockflow.launch.process_kpi import private_and_shared

_WAIT_S = 10.0
_LOOK_S = 0.05

Kpis = Mapping[str, Mapping[str, Any]]
"""Block name -> its StageKpi, summed over the replicas for what is counted here."""

COPIES_IN, COPIES, BYTES = "copies of inputs per hop", "copies per hop", "bytes per hop"
"""Figures: copies of inputs, and of outputs (under the name that stored results know)."""

_COUNTS = ("requests", "copies_in", "copies_out", "bytes_out")


@dataclass(frozen=True, slots=True)
class Counted:
    """Per hop, that is per request and block.

    Attributes:
        inputs: copies of the input.
        outputs: copies of the output.
        bytes: of the output.
    """

    inputs: float
    outputs: float
    bytes: float

    def named(self) -> tuple[tuple[str, float, str], ...]:
        """Name, value and unit of each figure."""
        return (COPIES_IN, self.inputs, "1"), (COPIES, self.outputs, "1"), (BYTES, self.bytes, "B")


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

    def mean(name: str) -> float:
        return sum(grown[b][name] for b in blocks) / requests

    return Counted(mean("copies_in"), mean("copies_out"), mean("bytes_out"))


def copies_text(inputs: Figure | None, outputs: Figure | None) -> str:
    """A table's cell: copies of inputs + of outputs, or of outputs alone in older results."""
    if outputs is None:
        return ""
    text = digits(outputs.value)
    return text if inputs is None else f"{digits(inputs.value)} + {text}"
