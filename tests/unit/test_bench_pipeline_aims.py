"""The aims of ``make bench``: a verdict per row, planted misses, results that lack something."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from blockflow.bench import pipeline_aims as aims
from blockflow.bench import pipeline_figures as pf
from blockflow.bench import worker_start
from blockflow.bench.client_import import CLIENT_IMPORT
from blockflow.bench.doc_tables import TABLES
from blockflow.bench.docs import Stored
from blockflow.bench.kpi_reader import COPIES, COPIES_IN, Counted
from blockflow.bench.pipeline_figures import Sample, Series
from blockflow.bench.reliability.promise import NOT_MEASURED
from blockflow.bench.results import Figure, latency_figure
from blockflow.bench.worker_start import measure_start, start_figures

STORED = Path(__file__).resolve().parents[2] / "docs" / "results" / "bench.jsonl"
ROUNDS = 6
HOP_MS = 0.39
IN_PROCESS_MS = 100.0
START = {"start_ms": 390.0, "load_ms": 100.0, "uss_mib": 19.0}
ALL_AIMS = (*aims.OF_ENGINES, *aims.OF_WORKERS, *aims.OF_CLIENT)
ALL_ROWS = [(aim.mode, aim.rows) for aim in ALL_AIMS]

Row = tuple[str, int | None]


def sample(way: str, rows: int, hop_ms: float, changed: Mapping[Any, float]) -> Sample:
    """Four equal hops; ``changed`` overrides the share of the parts and the ratio to (a)."""
    total = IN_PROCESS_MS * changed.get((way, rows), 1.02)
    parts = changed.get(("parts", way, rows), 0.96) * total
    hop = (hop_ms / 4, 0.0, 3 * hop_ms / 4, 20.0)
    return Sample(total, (hop,) * 4, parts - 4 * sum(hop))


def run(
    *,
    hops: Mapping[int, float] | None = None,
    less: float = 6.0,
    again: float = 1.0,
    engine: str = "exported",
    start: Mapping[str, float] | None = None,
    imported_ms: float = 100.0,
    copies: Counted | None = None,
    at: Mapping[Any, float] | None = None,
) -> list[Figure]:
    """All figures of a run that meets every aim, but for what the arguments say."""
    changed = at or {}
    found: list[Figure] = []
    for rows in aims.BATCHES:
        hop_ms = (hops or {}).get(rows, HOP_MS)
        series = Series(rows, {"engine": engine, "precision": "fp32", "model": "resnet50"})
        one = {
            pf.IN_PROCESS: Sample(IN_PROCESS_MS, ((0.0, 0.0, 0.0, 25.0),) * 4),
            pf.AGAIN: Sample(IN_PROCESS_MS * again, ((0.0, 0.0, 0.0, 25.0),) * 4),
            pf.TENSORMQ: sample(pf.TENSORMQ, rows, hop_ms, changed),
            pf.ZEROMQ: sample(pf.ZEROMQ, rows, hop_ms * less, changed),
            pf.ONE_WORKER: sample(pf.ONE_WORKER, rows, hop_ms, changed),
            pf.TENSORMQ_AWAKE: sample(
                pf.TENSORMQ_AWAKE, rows, changed.get(("hop", rows), HOP_MS), changed
            ),
            pf.ONE_WORKER_AWAKE: sample(pf.ONE_WORKER_AWAKE, rows, HOP_MS, changed),
        }
        series.latency = {way: [s] * ROUNDS for way, s in one.items()}
        series.counted = {pf.TENSORMQ: copies or Counted(0.0, 0.0, 2048.0)}
        found += series.figures()
    found += start_figures([{**START, "start_ms": 200.0}, {**START, **(start or {})}])
    return [*found, latency_figure(CLIENT_IMPORT, "client", None, [90.0, imported_ms])]


def verdicts(found: list[Figure]) -> dict[Row, str]:
    """What the table says, by aim and rows."""
    return {(row[1], int(row[2]) if row[2] else None): row[-1] for row in aims.aim_grid(found).rows}


def test_a_run_that_meets_every_aim_says_so() -> None:
    assert verdicts(run()) == dict.fromkeys(ALL_ROWS, "met")
    assert len(aims.judged(run())) == len(ALL_ROWS) == 24


MISSES: list[tuple[Row, dict[str, Any]]] = [
    (("tensormq: hop, ms", 1), {"hops": {1: 0.41}}),
    (("tensormq: hop, ms", 8), {"hops": {8: 0.41}}),
    (("tensormq: hop, ms", 32), {"hops": {32: 0.41}}),
    (("tensormq: hop growth", 32), {"hops": {1: 0.2, 32: 0.23}}),
    *((("tensormq: latency", n), {"at": {(pf.TENSORMQ, n): 1.11}}) for n in (1, 8, 32)),
    *((("one-worker: latency", n), {"at": {(pf.ONE_WORKER, n): 1.04}}) for n in (1, 8, 32)),
    (("zeromq/tensormq: hop", 8), {"less": 4.9}),
    *((("tensormq, awake: hop, ms", n), {"at": {("hop", n): 0.41}}) for n in (1, 8, 32)),
    *(
        ((f"{way}: latency", n), {"at": {(way, n): 1.11}})
        for way in (pf.TENSORMQ_AWAKE, pf.ONE_WORKER_AWAKE)
        for n in (1, 8, 32)
    ),
    *(
        (("parts to whole, off", None), {"at": {("parts", way, rows): share}})
        for way, rows, share in [
            (pf.TENSORMQ, 1, 0.94),
            (pf.ZEROMQ, 8, 0.94),
            (pf.ONE_WORKER, 32, 1.06),
        ]
    ),
    (("ready beside load, ms", None), {"start": {"start_ms": 401.0}}),
    (("private memory, MB", None), {"start": {"uss_mib": 19.2}}),
    (("imported, ms", None), {"imported_ms": 301.0}),
]


@pytest.mark.parametrize(("row", "change"), MISSES)
def test_a_planted_miss_is_found_in_its_row_and_in_no_other(
    row: Row, change: dict[str, Any]
) -> None:
    assert verdicts(run(**change)) == {**dict.fromkeys(ALL_ROWS, "met"), row: "missed"}


def test_a_miss_is_planted_for_every_row() -> None:
    assert {row for row, _ in MISSES} == set(ALL_ROWS)


def test_what_the_runs_own_noise_hides_is_not_concluded() -> None:
    found = verdicts(run(again=1.03, hops=dict.fromkeys(aims.BATCHES, 0.41), less=4.9))
    assert found["tensormq: hop, ms", 1] == found["zeromq/tensormq: hop", 8] == "within noise"
    assert found["one-worker: latency", 8] == "within noise"
    # Neither the parts of a request nor a start are told from anything by that noise.
    assert found["parts to whole, off", None] == found["ready beside load, ms", None] == "met"
    assert verdicts(run(again=1.03, hops={1: 0.42}))["tensormq: hop, ms", 1] == "missed"


def test_growth_is_as_uncertain_as_both_of_its_sides() -> None:
    found = run()
    for i, f in enumerate(found):
        if (f.name, f.mode, f.batch) == (pf.HOP, pf.TENSORMQ, 32):
            wide = {**f.to_dict(), "low": HOP_MS, "high": 0.45}
            found[i] = Figure.from_dict(wide)
    assert verdicts(found)["tensormq: hop growth", 32] == "within noise"


def test_the_parts_miss_if_they_do_on_any_way() -> None:
    """A way whose interval reaches farther, but that may have met, hides none that has missed."""
    found = run(at={("parts", pf.TENSORMQ, 1): 0.93})
    for i, f in enumerate(found):
        if (f.name, f.mode, f.batch) == (pf.ACCOUNTED, pf.ZEROMQ, 1):
            found[i] = Figure.from_dict({**f.to_dict(), "low": 0.90, "high": 0.97})
    assert verdicts(found)["parts to whole, off", None] == "missed"
    wide = [f for f in found if (f.name, f.mode, f.batch) != (pf.ACCOUNTED, pf.TENSORMQ, 1)]
    assert verdicts(wide)["parts to whole, off", None] == "within noise"


def test_older_results_are_shown_with_what_they_lack() -> None:
    old = [f for f in run() if f.name not in (pf.LESS, COPIES_IN)]
    lacking = {("zeromq/tensormq: hop", 8): NOT_MEASURED}
    assert verdicts(old) == {**dict.fromkeys(ALL_ROWS, "met"), **lacking}
    older = [f for f in old if f.name != COPIES]
    lacking["tensormq: hop growth", 32] = NOT_MEASURED
    assert verdicts(older) == {**dict.fromkeys(ALL_ROWS, "met"), **lacking}
    assert verdicts([]) == dict.fromkeys(ALL_ROWS, NOT_MEASURED)
    assert aims.judged([]) == []


@pytest.mark.parametrize("copies", [Counted(1.0, 0.0, 2048.0), Counted(0.0, 0.25, 2048.0)])
def test_growth_is_not_judged_where_copies_are_part_of_it(copies: Counted) -> None:
    assert verdicts(run(copies=copies))["tensormq: hop growth", 32] == NOT_MEASURED


def test_the_stored_results_are_rendered() -> None:
    stored = Stored.read(STORED)
    assert stored is not None
    rows = TABLES["bench.aims"].make(stored.figures).rows
    assert len(rows) == len(ALL_ROWS)
    assert {row[-1] for row in rows} <= {"met", "missed", "within noise", NOT_MEASURED}
    assert {row[0] for row in rows} == {"exported", aims.WORKER, aims.CLIENT}


def test_verdicts_are_stored_and_shown_as_they_were() -> None:
    found = run()
    found += aims.judged(found)
    again = [Figure.from_dict(json.loads(json.dumps(f.to_dict()))) for f in found]
    assert aims.aim_grid(again) == aims.aim_grid(run())
    (less,) = (f for f in again if f.mode == "zeromq/tensormq: hop")
    assert (less.name, less.batch, less.unit) == (aims.AIM, 8, "x")
    assert less.labels["at_least"] and less.labels["goal"] == 5.0
    assert less.labels["model"] == "resnet50"
    then = [f for f in again if f is not less]
    then.append(Figure.from_dict({**less.to_dict(), "labels": {**less.labels, "goal": 4.0}}))
    shown = {row[1]: row for row in aims.aim_grid(then).rows}
    assert shown["zeromq/tensormq: hop"][5] == ">= 4"
    # They are no figures of a start, and none of what the other pipeline benchmark aims at.
    started = [*(f.name for f in start_figures([START])), CLIENT_IMPORT]
    assert [row[0] for row in pf.start_grid(found).rows] == started
    assert pf.aim_grid(found) == pf.aim_grid(run())


def test_every_engine_has_its_own_rows_and_the_table_fits_a_terminal() -> None:
    found = [*run(), *run(engine="openvino-bf16", less=4.9)]
    parts = aims.aim_grid([*found, *aims.judged(found)]).split("of")
    of = ["exported", "openvino-bf16", aims.WORKER, aims.CLIENT]
    assert [p.title.partition(": ")[2] for p in parts] == of
    by = {p.title.partition(": ")[2]: {r[0]: r[-1] for r in p.rows} for p in parts}
    assert by["exported"]["zeromq/tensormq: hop"] == "met"
    assert by["openvino-bf16"]["zeromq/tensormq: hop"] == "missed"
    assert len(by[aims.WORKER]) == 2
    bare = [f for f in found if f.name != pf.LESS]
    for part in (*parts, *aims.aim_grid(bare).split("of")):
        out = io.StringIO()
        Console(file=out, width=80).print(part.rich())
        assert "…" not in out.getvalue(), "something is cut on a terminal of 80 columns"


def test_a_worker_is_measured_when_it_has_come_to_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it gives back after the update is not its own: once in ten starts it was counted."""
    sizes = [30, 30, 30, 18, 17, 18]
    monkeypatch.setattr(worker_start, "_LOOK_S", 0)
    monkeypatch.setattr(
        worker_start,
        "private_and_shared",
        lambda _pid: (sizes.pop(0) if len(sizes) > 1 else sizes[0], 0),
    )
    assert worker_start.idle_private(1) == 17


def test_memory_that_cannot_be_read_is_no_small_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_start, "private_and_shared", lambda _pid: (0, 0))
    worker = {"worker": "extra0", "pid": 1, "start_ms": 80.0, "load_ms": 10.0}
    system: Any = SimpleNamespace(
        settings=SimpleNamespace(repository=tmp_path),
        apply=lambda _topology: None,
        status=lambda: {"workers": [worker]},
    )
    starts = measure_start(system, {"blocks": []}, ["block1"], 1)
    assert starts == [{"start_ms": 80.0, "load_ms": 10.0}]
    told = verdicts(start_figures(starts))
    assert told["private memory, MB", None] == NOT_MEASURED
    assert told["ready beside load, ms", None] == "met"
