"""LoadGen's results as figures: :mod:`~blockflow.bench.mlperf.tables` makes tables of them.

    python -m blockflow.bench.mlperf.figures OUT... --results results/mlperf.jsonl

gathers the summaries of one or several calls of ``blockflow bench`` in one result file, beside
those of other calls on the same machine.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from blockflow.bench.calibration import Steadiness, calibration_figures
from blockflow.bench.mlperf.asked import bound_text
from blockflow.bench.mlperf.document import FORMAT
from blockflow.bench.mlperf.job import disk
from blockflow.bench.mlperf.pictures import PARTS
from blockflow.bench.mlperf.report import SUMMARY
from blockflow.bench.mlperf.verdict import WHOLE_QUERY
from blockflow.bench.options import nonsense
from blockflow.bench.results import Figure, ResultFile, Run, interval_figure, same_machine
from blockflow.bench.statistics import Interval
from blockflow.core.errors import BlockFlowError

BENCHMARK = "mlperf"
RUN, TARGET, ACCURACY, VALIDATION, BLOCK, BATCH = (
    "loadgen run",
    "task's target",
    "accuracy",
    "validation test",
    "block",
    "rows per batch",
)

Document = Mapping[str, Any]


def figures_of(document: Document) -> list[Figure]:
    """Everything of a summary that a document may show; of a call that broke off every figure says
    so (``partial``)."""
    tasks = ", ".join(
        t if len(document["plan"]["weights"]) == 1 else f"{t}={w}"
        for t, w in document["plan"]["weights"].items()
    )
    found = []
    for r in document["results"]:
        if r["mode"] == "performance":
            found += [_run(r, tasks), *_targets(r, tasks), *_blocks(r, tasks), *_batches(r, tasks)]
        found += [
            Figure.of(
                *(ACCURACY, a["task"], 100 * a["top1"], "%", a["rows"]),
                {
                    "top5": None if a["top5"] is None else 100 * a["top5"],
                    "missing": a["missing"],
                    "scenario": r["scenario"],
                },
            )
            for a in r["accuracy"]
        ]
    found += [_validation(v) for v in document["validation"]]
    work = document["fixed_work"]
    if work is not None:
        found += calibration_figures(Steadiness(**work))
    if not document["partial"]:
        return found
    broken = {"partial": True, "error": document["error"]}
    return [replace(f, labels={**f.labels, **broken}) for f in found]


def _run(r: Mapping[str, Any], tasks: str) -> Figure:
    settings, latency, metric = r["settings"], r["latency_ms"], r["metric"]
    name, value, unit = ("", 0.0, "") if metric is None else metric.values()
    if r["scenario"] == "server":  # its result is the rate that was offered
        name, value, unit = "offered", settings["rate"], "queries/s"
    target = _hardest(r["tasks"])
    searched = r["found"] or {}
    return Figure(
        RUN,
        r["scenario"],
        None,
        latency.get("50.00"),
        latency.get("90.00"),
        value,
        unit,
        _timed(r),
        latency.get("99.00"),
        labels={
            **_which(r, tasks),
            "metric": name,
            "verdict": r["verdict"],
            "percentile": 100 * target["percentile"],
            "bound_ms": target["bound_ms"],
            "seen_ms": target["seen_ms"],
            "of": target["task"] if len(r["tasks"]) > 1 else "",
            "bracketed": searched.get("bracketed"),
            "precise": searched.get("precise"),
            "invalid_at": searched.get("invalid_at"),
            "invalid_s": searched.get("invalid_s"),
            "least_of": r.get("least_of", 1),
            "failed": sum(r["samples"]["failed"].values()) + r["samples"]["lost"],
            "latency_ms": dict(latency),
            "search": [
                {"rate": t["rate"], "verdict": t["verdict"], "ms": t["judged_ms"]}
                for t in r["search"]
                if t["judged_ms"] is not None
            ],
        },
    )


def _timed(r: Mapping[str, Any]) -> int:
    """Latencies that LoadGen has measured: one per query, which may have several samples."""
    for task in r["tasks"]:
        if task["task"] == WHOLE_QUERY:
            return int(task["queries"])
    return int(r["samples"]["issued"])


def _hardest(tasks: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The target that is nearest to its bound, or farthest above it."""

    def share(task: Mapping[str, Any]) -> float:
        if task["bound_ms"] is None:
            return -1.0
        return 0.0 if task["seen_ms"] is None else float(task["seen_ms"] / task["bound_ms"])

    return max(tasks, key=share)


def _targets(r: Mapping[str, Any], tasks: str) -> list[Figure]:
    return [
        Figure.of(
            *(TARGET, t["task"], t["seen_ms"] or 0.0, "" if t["seen_ms"] is None else "ms"),
            t["samples"],
            {
                **_which(r, tasks),
                "percentile": 100 * t["percentile"],
                "bound_ms": t["bound_ms"],
                "queries": t["queries"],
                "needed": t["needed"],
                "verdict": t["verdict"],
            },
        )
        for t in r["tasks"]
    ]


def _blocks(r: Mapping[str, Any], tasks: str) -> list[Figure]:
    return [
        Figure.of(
            BLOCK,
            b["block"],
            sum(b[f"{part}_ms"] for part in PARTS),
            "ms",
            b["count"],
            {**_which(r, tasks), **{part: b[f"{part}_ms"] for part in PARTS}},
        )
        for b in r["blocks"]
    ]


def _which(r: Mapping[str, Any], tasks: str) -> dict[str, str]:
    """What tells a run from others of the same file."""
    return {"scenario": r["scenario"], "tasks": tasks, "kind": r["kind"], "asked": _asked(r)}


def _asked(r: Mapping[str, Any]) -> str:
    """The bounds that a run had to keep, each once: ``p99 <= 50 ms``; '' without any."""
    bounds = dict.fromkeys(
        bound_text(100 * t["percentile"], t["bound_ms"])
        for t in r["tasks"]
        if t["bound_ms"] is not None
    )
    return ", ".join(bounds)


def run_of(f: Figure) -> tuple[object, ...]:
    """Which run of a file a figure is of."""
    scenario = f.mode if f.name == RUN else f.labels["scenario"]
    return (scenario, *(f.labels.get(k) for k in ("tasks", "kind", "asked")))


def _batches(r: Mapping[str, Any], tasks: str) -> list[Figure]:
    return [
        Figure.of(BATCH, b["block"], b["mean"], "rows", b["batches"], _which(r, tasks))
        for b in r["batches"]
    ]


def _validation(v: Mapping[str, Any]) -> Figure:
    labels = {"scenario": v["scenario"], "outcome": v["outcome"]}
    if "ratio" in v:
        return interval_figure(VALIDATION, v["test"], None, Interval(**v["ratio"]), "x", labels)
    compared = v.get("compared", 0)
    share = 100 * (compared - v["differing"]) / compared if compared else 0.0
    return Figure.of(VALIDATION, v["test"], share, "%", compared, labels)


def gather(outs: Sequence[Path], target: Path) -> int:
    """Write the figures of several calls' folders as one result file; how many there are.

    Other calls on this machine whose figures it holds already stay in it.

    Raises:
        RequestError: INVALID_REQUEST for a folder without a summary, summaries of several
            machines, or a file of something else.
        SystemError_: NO_SPACE.
    """
    # A folder that is named twice is one call.
    documents = [_read(out / SUMMARY) for out in dict.fromkeys(out.resolve() for out in outs)]
    try:
        machines = {d["machine"]["cpu"] for d in documents}
        runs = [Run(figures_of(d), d["machine"], d["date"], d["command"]) for d in documents]
    except (KeyError, TypeError, ValueError, AttributeError) as exc:
        raise nonsense(f"a summary is not whole: {exc!r}", ", ".join(map(str, outs))) from exc
    if len(machines) > 1:
        raise nonsense("these runs were made on different machines", str(target))
    file = ResultFile(target, BENCHMARK)
    try:
        former = file.runs()
    except (KeyError, TypeError, ValueError, AttributeError) as exc:
        raise nonsense(f"this is no file of figures: {exc!r}", str(target)) from exc
    again = {run.command for run in runs}
    kept = [
        r for r in former if r.command not in again and same_machine(r.machine, runs[0].machine)
    ]
    with disk(target):
        return file.write_runs([*kept, *runs])


def _read(path: Path) -> Document:
    try:
        found: Document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as exc:
        raise nonsense(f"no summary of `blockflow bench`: {exc}", str(path)) from exc
    version = found.get("format") if isinstance(found, dict) else None
    if version != FORMAT:
        raise nonsense(f"the summary has format {version}, not {FORMAT}", str(path), "run it again")
    if not (found.get("results") or found.get("validation")):
        raise nonsense("nothing was measured in this call", str(path))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m blockflow.bench.mlperf.figures", description=__doc__
    )
    parser.add_argument("out", type=Path, nargs="+", help="folder of a call (its --out)")
    parser.add_argument("--results", type=Path, default=Path("results/mlperf.jsonl"))
    args = parser.parse_args(argv)
    try:
        count = gather(args.out, args.results)
    except BlockFlowError as exc:
        sys.stderr.write(f"{exc}\n")
        return 2
    sys.stdout.write(f"{count} figures: {args.results}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
