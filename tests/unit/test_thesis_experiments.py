"""What the thesis's experiments make of their samples, known beforehand, and what they may say."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from thesis_rig import CHAIN

from blockflow.bench.pipeline_figures import TENSORMQ, ZEROMQ, Sample
from blockflow.bench.results import Figure
from blockflow.bench.thesis import (
    batches,
    components,
    copies,
    offline,
    offline_memory,
    offline_table,
    one_client,
    pipeline_time,
    transports,
)
from blockflow.bench.thesis.beside import AGAIN
from blockflow.bench.thesis.experiment import Findings, Settings
from blockflow.bench.thesis.experiments import EXPERIMENTS
from blockflow.bench.thesis.one_client import HTTP, HTTP_JSON, OFFLINE, TWICE, Series

SETTINGS = Settings()
SMALL = Settings(quick=True, model="digits")


def by(found: Findings) -> dict[tuple[str, str, object], Figure]:
    return {(f.name, f.mode, f.labels.get("block", f.batch)): f for f in found.figures}


def whole(found: Findings) -> None:
    """It has all that the report needs."""
    assert found.says
    assert "\n" not in found.says
    assert found.tables
    assert all(len(row) in (0, len(g.heads)) for g in found.tables for row in g.rows)
    assert len({p.stem for p in found.plots}) == len(found.plots) > 0
    assert all(len(row) == len(d.heads) for d in found.data for row in d.rows)


# --- the registry --------------------------------------------------------------------------------


def test_every_experiment_has_a_name_for_files_and_says_what_it_reproduces() -> None:
    names = [e.name for e in EXPERIMENTS]
    assert len(set(names)) == len(names)
    for e in EXPERIMENTS:
        assert Path(e.name).name == e.name
        assert e.name.replace("-", "").isalnum()
        assert e.title
        assert e.of
        assert all(source.split()[0] in ("table", "figure", "eq.") for source in e.of)
    # No name begins with another one and a hyphen: their files lie in one folder.
    assert not [(a, b) for a in names for b in names if b.startswith(f"{a}-")]


# --- transports ----------------------------------------------------------------------------------


def bursts(ms: float, rounds: int = 6) -> list[list[float]]:
    return [[ms, ms, ms]] * rounds


def test_transports() -> None:
    times = {
        "string, HTTP": 2.4,
        "string, HTTP, new connection": 3.6,
        "string, ZeroMQ": 0.1,
        "tensor, HTTP": 6.0,
        "tensor, HTTP, new connection": 7.0,
        "tensor, ZeroMQ": 0.6,
        "tensor, handle": 0.2,
        "tensor, handle, copied in": 0.3,
        "string, ZeroMQ, again": 0.1,
    }
    taken = {name: bursts(ms) for name, ms in times.items()}
    found = transports.findings(taken, 602112, "resnet50")
    whole(found)
    figures = by(found)
    http = figures["string", "HTTP", None]
    assert (http.value, http.n, http.labels["thesis"]) == (2.4, 6, 1.676)  # bursts, not trips
    assert figures["tensor", "handle, copied in", None].labels["bytes"] == 602112
    assert "thesis" not in figures["tensor", "handle", None].labels
    assert figures["string: HTTP / ZeroMQ", "ratio", None].value == pytest.approx(24)
    assert figures["string: HTTP / ZeroMQ", "ratio", None].labels["thesis"] == 24
    assert figures["tensor: ZeroMQ / handle", "ratio", None].value == pytest.approx(3)
    assert figures["tensor: ZeroMQ / handle, copied in", "ratio", None].value == pytest.approx(2)
    assert ("string: ZeroMQ / handle", "ratio", None) not in figures
    assert found.says.count("24.0 times slower") == 2  # ours, and the thesis's
    assert "588 KiB" in found.says
    assert found.says.count("(thesis: ") == 2
    # A tensor is an input of the call's model; a string is of none.
    other = transports.findings(taken, 256, "digits")
    assert by(other)["string", "HTTP", None].labels["thesis"] == 1.676
    assert "thesis" not in by(other)["tensor", "HTTP", None].labels
    assert other.says.count("(thesis: ") == 1


# --- each block by itself ------------------------------------------------------------------------


SIZES = [
    offline.Size(mb + 1.0, round(mb / 4 * 1e6)) for mb in (4.0, 8.0, 12.0, 40.0)
]  # of 4 bytes each, and a MB of buffers


def test_offline() -> None:
    one = (2.0, 3.0, 4.0, 1.0)
    samples = {
        "scripted": [one] * 6,
        "traced": [tuple(2 * ms for ms in one)] * 6,
        "exported": [one] * 6,
        "scripted, again": [one] * 6,
    }
    found = offline.findings(samples, SIZES, SETTINGS)
    whole(found)
    figures = by(found)
    assert figures["forward", "traced", "block3"].value == 8.0
    assert figures["forward", "scripted", "block4"].labels["thesis"] == pytest.approx(2.563)
    assert figures["share of the sum", "traced", "block2"].value == pytest.approx(30.0)
    assert figures["sum of the blocks", "scripted", 1].labels["thesis"] == pytest.approx(
        offline_table.OFFLINE_SUM_MS
    )
    assert offline_table.OFFLINE_SUM_MS == 11.703  # as section 4.1.1 adds it up
    assert "thesis" not in figures["forward", "exported", "block1"].labels
    assert figures["parameters", "block4", "block4"].value == 10.0
    assert figures["memory of the block", "block4", "block4"].value == 41.0  # with buffers
    assert figures["memory of the block", "block1", "block1"].labels["thesis"] == 4.858
    assert "traced ones are 2.00 times slower" in found.says
    assert "exported ones not told apart" in found.says
    assert "block4 holds 62%" in found.says


def test_table_4_2_has_the_deviation_and_the_memory_of_each_form() -> None:
    times = [(2.0, 3.0, 4.0, 1.0), (4.0, 3.0, 4.0, 1.0)] * 3
    samples = dict.fromkeys((*offline.FORMS, "scripted" + AGAIN), times)
    memory = {
        (form, f"block{n}"): [100.0 * n + start for start in range(5)]
        for form in offline.FORMS
        for n in range(1, 5)
    }
    memory[offline_memory.NOTHING] = [50.0] * 5
    found = offline.findings(samples, SIZES, SETTINGS, memory)
    whole(found)
    figures = by(found)
    deviation = figures[offline.STD, "scripted", "block1"]
    assert deviation.value == pytest.approx(1.095, abs=1e-3)  # of three 2s and three 4s
    assert deviation.labels["thesis"] == 0.142
    assert figures[offline.STD, "scripted", "block4"].labels["thesis"] == 0.17
    own = figures[offline_memory.OWN, "traced", "block2"]
    assert (own.value, own.low, own.unit, own.n) == (152, 150, "MiB", 5)
    assert (own.labels["thesis"], own.labels["thesis_unit"]) == (9.536, "MB")
    assert "thesis" not in figures[offline_memory.OWN, "exported", "block2"].labels
    # All columns of the thesis's are in the figures, and so in their files.
    assert (own.labels["thesis_std"], own.labels["thesis_reserved"]) == (0.763, 26.0)
    last = figures[offline_memory.OWN, "scripted", "block4"].labels
    assert (last["thesis"], last["thesis_std"], last["thesis_reserved"]) == (75.94, 2.619, 132.0)
    processes = [figures[offline_memory.PROCESS, "scripted", f"block{n}"] for n in range(1, 5)]
    assert [f.labels["thesis"] for f in processes] == [394, 394, 424, 478]
    assert [f.labels.get("thesis_classifier") for f in processes] == [None, None, None, 396]
    assert {f.labels["thesis_unit"] for f in processes} == {"MB"}
    exported = figures[offline_memory.PROCESS, "exported", "block1"]
    assert not [label for label in exported.labels if label.startswith("thesis")]
    grid = found.tables[-1]
    assert {len(row) for row in grid.rows} == {len(grid.heads)}
    cells = [dict(zip(grid.heads, row, strict=True)) for row in grid.rows]
    assert cells[0]["beyond C"] == "52.0"
    assert [c["thesis's"] for c in cells[:4]] == ["394", "394", "424", "478 + 396"]
    assert [c["allocated (std)"] for c in cells[2:4]] == ["29.8 (0.967)", "75.9 (2.62)"]
    assert [c["reserved"] for c in cells[:4]] == ["26.0", "26.0", "56.0", "132"]
    assert {c["thesis's"] for c in cells if c["form"] == "exported"} == {""}
    assert grid.rows[-1][:3] == ("", "none (C)", "50.0")
    # Without it, what was measured before is whole all the same.
    assert len(offline.findings(samples, SIZES, SETTINGS).tables) == 2


def test_the_thesiss_offline_figures_are_those_of_its_own_model_only() -> None:
    samples = {form: [(1.0, 1.0, 1.0)] * 6 for form in (*offline.FORMS, "scripted, again")}
    found = offline.findings(samples, SIZES[:3], SMALL)
    whole(found)
    assert not [f for f in found.figures if "thesis" in f.labels]


# --- one client ----------------------------------------------------------------------------------

BLOCKS = 4


def sample(compute: float, overhead: float, transit: float = 0.0, wait: float = 0.0) -> Sample:
    """Each part the same in all blocks; two milliseconds of client and Dispatcher."""
    hops = ((transit, wait, overhead, compute),) * BLOCKS
    return Sample(BLOCKS * (transit + wait + overhead + compute) + 2.0, hops, 1.0)


def series(ways: dict[str, Sample], rounds: int = 6) -> Series:
    return Series({way: [one] * rounds for way, one in ways.items()})


def each_way(whole_tensors: float = 5.0) -> dict[str, Sample]:
    handles = sample(3.0, 0.5, 0.25, 0.25)
    return {
        OFFLINE: Sample(12.0, ((0.0, 0.0, 0.0, 3.0),) * BLOCKS),
        ZEROMQ: sample(3.0, whole_tensors, 1.0),
        TENSORMQ: handles,
        TWICE: handles,
    }


def test_pipeline_time_is_the_blocks_and_http_the_round_trip() -> None:
    http = {HTTP: Sample(160.0, ()), HTTP_JSON: Sample(320.0, ())}
    found = pipeline_time.findings(series({**each_way(), **http}), SETTINGS)
    whole(found)
    figures = by(found)
    time, trip = pipeline_time.TIME, pipeline_time.ROUND_TRIP
    assert figures[time, TENSORMQ, 1].value == 16.0
    assert figures[time, TENSORMQ, 1].labels["thesis"] == 16.0
    assert figures[trip, TENSORMQ, 1].value == 18.0
    assert figures[trip, TENSORMQ, 1].labels["thesis"] == 18.0
    assert figures[time, ZEROMQ, 1].value == 36.0
    assert figures[time, OFFLINE, 1].value == 12.0
    assert figures[time, HTTP, 1].value == 160.0
    assert figures[time, HTTP, 1].labels["note"] == "round trip of the whole model"
    assert figures[f"{HTTP} / {TENSORMQ}", "ratio", 1].value == 10.0
    assert figures[f"{ZEROMQ} / {TENSORMQ}", "ratio", 1].labels["thesis"] == 2.8
    assert "whole tensors are 2.25 times slower" in found.says
    # Ours may be quicker by HTTP: what the thesis says is never ours in the other direction.
    assert "(thesis: 11 times slower)" in found.says
    other = pipeline_time.findings(series({**each_way(), **http}), SMALL)
    assert not [f for f in other.figures if "thesis" in f.labels]


def test_components_part_overhead_from_inference_and_waiting() -> None:
    found = components.findings(series(each_way()), SETTINGS)
    whole(found)
    assert [p.stem for p in found.plots] == ["blocks", "pipeline", "inference", "overhead"]
    figures = by(found)
    assert figures["overhead", TENSORMQ, "block2"].value == 0.75  # forwarding included
    assert figures["waiting", TENSORMQ, "block2"].value == 0.25
    assert figures["inference", ZEROMQ, "block4"].value == 3.0
    assert figures["overhead, all blocks", TENSORMQ, 1].value == 3.0
    assert figures["overhead, all blocks", TENSORMQ, 1].labels["thesis"] == 2.55
    assert figures["overhead, all blocks", ZEROMQ, 1].value == 24.0
    assert figures["overhead, all blocks: zeromq / tensormq", "ratio", 1].value == 8.0
    assert figures["overhead, all blocks: p90 - p10", ZEROMQ, 1].value == 0.0
    assert "whole tensors are 8.00 times dearer" in found.says
    assert "inference times: not told apart" in found.says
    rows = found.data[0].rows
    assert len(rows) == 4 * 6 * BLOCKS  # the offline sum's blocks as well


def test_batches_show_what_grows() -> None:
    found = batches.findings(
        {1: series(each_way(5.0)), 32: series(each_way(50.0))},
        SETTINGS,
    )
    whole(found)
    figures = by(found)
    assert figures[batches.OVERHEAD, TENSORMQ, 1].value == 3.0
    assert figures[batches.OVERHEAD, TENSORMQ, 32].value == 3.0
    assert figures[batches.OVERHEAD, ZEROMQ, 32].value == 204.0
    assert (batches.OVERHEAD, OFFLINE, 32) not in figures
    assert figures[batches.TIME, OFFLINE, 32].value == 12.0
    assert figures[batches.TIME, ZEROMQ, 1].labels["thesis"] == 44.9
    assert "thesis" not in figures[batches.TIME, ZEROMQ, 32].labels
    assert figures[batches.GROWTH, ZEROMQ, 32].value == 8.5
    assert "with handles from 3.00 to 3.00 ms, not told apart (1.00 times" in found.says
    assert "from 24.0 to 204 ms, 8.50 times more (95% 8.50-8.50, n = 6)" in found.says
    assert "at batch 32 whole tensors are 68.0 times dearer" in found.says


def test_what_grows_with_the_batch_is_judged_by_the_runs_noise() -> None:
    """Handles seem to cost a sixth more with 32 rows; equal requests were as far apart."""
    apart = {**each_way(), TWICE: sample(3.0, 0.8, 0.25, 0.25)}
    dearer = {**each_way(50.0), TENSORMQ: sample(3.0, 0.625, 0.25, 0.25)}
    found = batches.findings(
        {1: series(apart), 32: series({**dearer, TWICE: dearer[TENSORMQ]})}, SETTINGS
    )
    growth = by(found)[batches.GROWTH, TENSORMQ, 32]
    assert growth.value == pytest.approx(3.5 / 3)
    assert (growth.low, growth.high, growth.n) == (growth.value, growth.value, 6)
    assert growth.labels["noise"] == pytest.approx(0.4)
    assert "from 3.00 to 3.50 ms, not told apart (1.17 times" in found.says
    assert "equal requests were apart by 40%" in found.says
    few = batches.findings({n: series(each_way(), 4) for n in (1, 32)}, SETTINGS)
    assert few.says.count("too few rounds to conclude") == 3


def test_all_sizes_of_batches_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int]] = []

    class Alone:
        def run(self, rows: int) -> tuple[float, ...]:
            asked.append((OFFLINE, rows))
            return (1.0,)

    def run_once(_client: object, way: str, x: Sequence[float]) -> Sample:
        asked.append((way, len(x)))
        return sample(1.0, 1.0)

    monkeypatch.setattr(one_client, "run_once", run_once)
    monkeypatch.setattr(one_client, "input_of", lambda _chain, rows: [0.0] * rows)
    ways: Any = one_client.Bench(CHAIN, None, Alone(), None)  # type: ignore[arg-type]
    found = ways.measure({1: 2, 4: 1}, 3, lambda: None, lambda _found: None)
    assert {rows: len(one.samples[ZEROMQ]) for rows, one in found.items()} == {1: 3, 4: 3}
    served = [rows for way, rows in asked if way == ZEROMQ]
    # Two rounds are the warm-up; no size has two rounds before the other one has its own.
    assert [sorted(served[i : i + 3]) for i in range(0, 15, 3)] == [[1, 1, 4]] * 5
    # In the process a size that was not the last one is run once more: its buffers are new.
    alone = [rows for way, rows in asked if way == OFFLINE]
    assert min(len(list(group)) for _, group in itertools.groupby(alone)) == 2


def test_the_middle_of_a_burst_is_of_every_part_by_itself() -> None:
    burst = [
        Sample(9.0, ((1.0, 2.0, 3.0, 4.0),), 0.5),
        Sample(5.0, ((1.5, 2.5, 1.0, 4.5),), 0.1),
        Sample(7.0, ((9.0, 2.1, 3.5, 4.2),), 0.3),
    ]
    assert one_client.middle(burst) == Sample(7.0, ((1.5, 2.1, 3.0, 4.2),), 0.3)
    assert one_client.middle([Sample(3.0, ())]) == Sample(3.0, ())


def test_one_round_is_enough_for_what_is_kept_of_a_failure() -> None:
    ways = {**each_way(), HTTP: Sample(160.0, ()), HTTP_JSON: Sample(320.0, ())}
    assert pipeline_time.findings(series(ways, 1), SETTINGS).figures
    assert components.findings(series(each_way(), 1), SETTINGS).figures
    one = {form: [(1.0, 1.0, 1.0, 1.0)] for form in (*offline.FORMS, "scripted, again")}
    assert offline.findings(one, SIZES, SETTINGS).figures
    trips = transports.findings(
        {
            f"{kind}, {way}": bursts(1.0, 1)
            for kind in ("string", "tensor")
            for way in (*transports.WAYS, "ZeroMQ, again")
        },
        4,
        "digits",
    )
    assert trips.figures
    assert "too few rounds" in trips.says


# --- bytes ---------------------------------------------------------------------------------------


def moved(zeromq: Sequence[float], tensormq: float) -> dict[str, list[float]]:
    n = len(zeromq)
    return {
        ZEROMQ: list(zeromq),
        TENSORMQ: [tensormq] * n,
        TWICE: [tensormq] * n,
        copies.BACKGROUND: [500.0] * n,
    }


def test_copies_are_told_in_megabytes_per_inference() -> None:
    engine = {ZEROMQ: 0.0, TENSORMQ: 4e6}
    found = copies.findings(moved([8e6] * 6, 2e3), 4, engine, 3.8e6, {}, SETTINGS)
    whole(found)
    figures = by(found)
    assert figures[copies.SOCKETS, ZEROMQ, 1].value == 8.0
    assert figures[copies.PER_BLOCK, TENSORMQ, 1].value == 500
    assert figures[copies.PER_BLOCK, TENSORMQ, 1].labels["thesis"] == 180
    assert figures[copies.SOCKETS, TENSORMQ, 1].value == pytest.approx(0.002)
    assert figures[copies.FIRST, ZEROMQ, 1].value == pytest.approx(3.8)
    assert figures[copies.FIRST, ZEROMQ, 1].labels["thesis"] == 4.5
    assert figures[copies.ENGINE, TENSORMQ, 1].value == 4.0
    assert "4000 times more" in found.says
    assert [row[3] for row in found.data[0].rows if row[0] == ZEROMQ] == [
        8e6 * n for n in range(1, 7)
    ]
    assert any("0.5 kB" in note for note in found.notes)


def test_on_a_device_the_workers_own_counts_stand_beside_it() -> None:
    over = {ZEROMQ: (2e6, 3e6), TENSORMQ: (0.0, 0.0)}
    found = copies.findings(
        moved([8e6] * 6, 2e3), 4, dict.fromkeys(copies.WAYS, 0.0), 1.0, over, SETTINGS
    )
    figures = by(found)
    assert figures[copies.TO_HOST, ZEROMQ, 1].value == 3.0
    assert figures[copies.TO_DEVICE, TENSORMQ, 1].value == 0.0
    assert figures[copies.TO_DEVICE, TENSORMQ, 1].labels["thesis"] == 0.0
