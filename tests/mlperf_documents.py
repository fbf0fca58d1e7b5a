"""Summaries of ``blockflow bench`` as it writes them."""

from __future__ import annotations

from typing import Any

from blockflow.bench.mlperf.document import FORMAT

MACHINE = {"cpu": "a CPU", "cores": 2, "memory_gib": 4, "kernel": "6", "python": "3"}


def result(scenario: str, **more: Any) -> dict[str, Any]:
    return {
        "scenario": scenario,
        "mode": "performance",
        "kind": "short",
        "partial": False,
        "broke_off": False,
        "verdict": "VALID",
        "reasons": [],
        "settings": {
            "rate": 120.0,
            "targets": {"a": {"percentile": 0.99, "latency_ms": 15.0}},
            "min_duration_s": 5.0,
            "min_queries": 662,
            "samples_per_query": 8,
        },
        "metric": {"name": "p90 latency", "value": 2.5, "unit": "ms"},
        "latency_ms": {"50.00": 2.0, "90.00": 2.5, "99.00": 3.0},
        "judged_ms": 3.0,
        "tasks": [target("a", 15.0, 3.0)],
        "samples": {"issued": 700, "failed": {"BLOCK_FAILED": 1}, "lost": 1},
        "blocks": [
            {
                "block": "trunk",
                "count": 700,
                "transit_ms": 0.1,
                "wait_ms": 0.2,
                "overhead_ms": 0.3,
                "compute_ms": 1.4,
            }
        ],
        "batches": [
            {"block": "trunk", "batches": 200, "rows": 700, "looks": [3.0, 4.0], "mean": 3.5}
        ],
        "accuracy": [],
        "search": [],
        "found": None,
        **more,
    }


def target(task: str, bound_ms: float | None, seen_ms: float | None, **more: Any) -> dict[str, Any]:
    return {
        "task": task,
        "percentile": 0.99,
        "bound_ms": bound_ms,
        "seen_ms": seen_ms,
        "samples": 700,
        "queries": 350,
        "needed": 662,
        "verdict": "too few",
        **more,
    }


def searched(**found: Any) -> dict[str, Any]:
    told = {
        "bracketed": True,
        "precise": True,
        "precision": 0.05,
        "invalid_at": 126.0,
        "invalid_s": None,
        **found,
    }
    trial = {
        "folder": "server-01",
        "rate": 126.0,
        "kind": "short",
        "verdict": "INVALID",
        "reasons": ["late"],
        "metric": {"name": "completed", "value": 119.0, "unit": "queries/s"},
        "latency_ms": {},
        "judged_ms": 17.5,
    }
    return {"found": told, "search": [trial]}


def document(**more: Any) -> dict[str, Any]:
    top = {"task": "a", "rows": 360, "missing": 0, "top1": 0.975, "top5": None}
    return {
        "format": FORMAT,
        "command": "blockflow bench --task a",
        "date": "2026-01-02",
        "official": False,
        "full_length": False,
        "partial": False,
        "error": None,
        "machine": MACHINE,
        "fixed_work": {"begin_ms": 1.0, "end_ms": 1.02, "spread": 0.03},
        "system": {},
        "data": {"a": {"origin": "somewhere", "rows": 360, "labels": True}},
        "plan": {"weights": {"a": 2, "b": 1}, "seed": 1},
        "results": [
            result("single-stream"),
            result("server", accuracy=[top]),
            result("server", mode="accuracy", accuracy=[top], blocks=[], batches=[], tasks=[]),
        ],
        "validation": [
            {
                "test": "accuracy",
                "scenario": "server",
                "outcome": "FAILED",
                "why": "3 of 30 answers",
                "compared": 30,
                "differing": 3,
            },
            {
                "test": "caching",
                "scenario": "server",
                "outcome": "PASSED",
                "why": "as quick",
                "ratio": {"value": 1.01, "low": 0.98, "high": 1.04, "n": 5},
            },
            {"test": "seeds", "scenario": "server", "outcome": "UNDECIDED", "why": "it broke off"},
        ],
        **more,
    }
