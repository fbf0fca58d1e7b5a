"""What was asked of a run, in a reader's words, from its summary. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from blockflow.bench.mlperf.settings import Mode, Scenario
from blockflow.bench.numerals import given


def bound_text(percentile: float, bound_ms: float) -> str:
    """``p99 <= 50 ms``."""
    return f"p{percentile:g} <= {given(bound_ms)} ms"


def asked_text(result: Mapping[str, Any], data: Mapping[str, Mapping[str, Any]]) -> str:
    """How long a run was to be, and each task's bound: ``at least 5 s and 662 queries; a: p99 <=
    15 ms``. An accuracy run goes through the data, however long that takes."""
    settings = result["settings"]
    if result["mode"] == Mode.ACCURACY:
        rows = _count(sum(one["rows"] for one in data.values()), "row", "rows")
        # A last query that is not full repeats some of them: there may be more samples than rows.
        several = result["scenario"] == Scenario.MULTISTREAM
        whole = f", in whole queries of {settings['samples_per_query']} samples" if several else ""
        return f"all data once: {rows}{whole}"
    bounds = [
        f"{task}: {bound_text(t['percentile'] * 100, t['latency_ms'])}"
        for task, t in settings["targets"].items()
        if t["latency_ms"] is not None
    ]
    return "; ".join([_length(result["scenario"], settings), *bounds])


def _length(scenario: str, settings: Mapping[str, Any]) -> str:
    least, time = settings["min_queries"], f"at least {given(settings['min_duration_s'])} s"
    queries = _count(least, "query", "queries")
    match scenario:
        case Scenario.OFFLINE:  # the count is of samples: its one query has them all
            return f"{time} and {_count(least, 'sample', 'samples')}, in one query"
        case Scenario.MULTISTREAM:
            return f"{time} and {queries} of {settings['samples_per_query']} samples"
        case _:
            return f"{time} and {queries}"


def _count(number: int, one: str, several: str) -> str:
    return f"{number} {one if number == 1 else several}"
