"""Plan: what a call of ``blockflow bench`` asks for. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from blockflow.bench.mlperf.counts import CONFIDENCE
from blockflow.bench.mlperf.presets import Preset
from blockflow.bench.mlperf.rates import CONFIRMATIONS, SERVER_RUNS
from blockflow.bench.mlperf.search import RUNS
from blockflow.bench.mlperf.settings import (
    DEADLINE_S,
    SAMPLES_PER_QUERY,
    Mode,
    Scenario,
    Target,
)
from blockflow.bench.mlperf.validation import TOLERANCE, Check
from blockflow.bench.options import nonsense


@dataclass(frozen=True, slots=True)
class Plan:
    """What a call asks for.

    Attributes:
        address, client_keys: of the Dispatcher; '' for the defaults.
        weights: task -> how often it is asked.
        scenarios: in this order.
        modes: of each scenario.
        out: folder of logs and report.
        short: runs for development, which are marked as such.
        duration_s, queries: in place of the official or the short figures.
        data: see :func:`~blockflow.bench.mlperf.data.load_inputs`.
        preprocess: task -> ``module:function``; tasks without one take the data as it is.
        presets, latency_ms, percentile: per task.
        rate: queries per second of the server scenario; None searches for the highest VALID one.
        precision, search_runs, confirmations: of the search, and the rates that are confirmed.
        server_runs: of the result's rate, all VALID, of which the least is the result.
        samples_per_query: of multistream.
        rows: of one request at most (offline, multistream); 0 = what the task takes, and no more.
        in_flight: offline, requests under way.
        seed: of LoadGen, and of synthetic data.
        deadline_s: of each request.
        confidence: that the percentile is known to within its margin: how many queries there are.
        checks: validation tests of each scenario.
        tolerance: by how much the quicker of two ways may be quicker in them, as a share.
    """

    weights: Mapping[str, int]
    scenarios: Sequence[Scenario]
    modes: Sequence[Mode]
    out: Path
    address: str = ""
    client_keys: str = ""
    short: bool = False
    duration_s: float | None = None
    queries: int | None = None
    data: str = "synthetic"
    preprocess: Mapping[str, str] = field(default_factory=dict)
    presets: Mapping[str, Preset] = field(default_factory=dict)
    latency_ms: Mapping[str, float] = field(default_factory=dict)
    percentile: Mapping[str, float] = field(default_factory=dict)
    rate: float | None = None
    precision: float = 0.05
    search_runs: int = RUNS
    confirmations: int = CONFIRMATIONS
    server_runs: int = SERVER_RUNS
    samples_per_query: int = SAMPLES_PER_QUERY
    rows: int = 0
    in_flight: int = 16
    seed: int = 1
    deadline_s: float = DEADLINE_S
    confidence: float = CONFIDENCE
    checks: Sequence[Check] = ()
    tolerance: float = TOLERANCE

    def check(self, scenario: Scenario, targets: Mapping[str, Target]) -> None:
        """Raise INVALID_REQUEST for a server scenario without a bound: then every rate is VALID."""
        if scenario is not Scenario.SERVER or Mode.PERFORMANCE not in self.modes:
            return
        for task, target in targets.items():
            if target.latency_ms is None:
                raise nonsense(
                    f"the server scenario needs a latency bound, and {task!r} has none",
                    "--target-latency-ms",
                    "for example --target-latency-ms 15, or --preset object-detection-heavy",
                )

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON."""
        return {**asdict(self), "out": str(self.out)}
