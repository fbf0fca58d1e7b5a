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
from blockflow.bench.statistics import Interval
from blockflow.bench.thesis import (
    batches,
    components,
    copies,
    offline,
    offline_memory,
    one_client,
    pipeline_time,
    transports,
)
from blockflow.bench.thesis.bars import draw_bars
from blockflow.bench.thesis.beside import AGAIN, Rounds, beside_grid, compared, in_turn, thesis
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


# --- what they have in common --------------------------------------------------------------------


def test_the_thesiss_figure_stands_beside_ours() -> None:
    ours = Figure("time", "handles", 1, 2.0, 3.0, 2.0, "ms", 5, low=1.9, high=2.1)
    theirs = thesis(ours, 16.0, "figure 4.3", "a GPU")
    assert theirs.labels == {"thesis": 16.0, "of": "figure 4.3", "note": "a GPU"}
    assert thesis(ours, None, "figure 4.3").labels == {"of": "figure 4.3"}
    grid = beside_grid("Figure 4.3", [theirs, ours])
    assert grid.rows[0] == ("time", "handles", "1", "2.00", "1.90-2.10", "16.0", "ms", "5")
    assert grid.rows[1][5] == ""
    draw_bars([theirs, ours], "ms", log=True)


def test_ways_take_turns_and_the_warm_up_does_not_count() -> None:
    seen: list[str] = []
    rounds: list[None] = []

    def sample(name: str) -> int:
        seen.append(name)
        return len(seen)

    ways = {name: lambda name=name: sample(name) for name in "abc"}
    found = in_turn(ways, 3, lambda: rounds.append(None), broken=lambda _found: None, warm_up=1)
    assert len(seen) == 12
    assert len(rounds) == 4
    assert seen[3:] == ["a", "b", "c", "b", "c", "a", "c", "a", "b"]
    assert {name: len(samples) for name, samples in found.items()} == {"a": 3, "b": 3, "c": 3}
    assert min(s for samples in found.values() for s in samples) == 4


def test_what_was_measured_before_a_failure_is_handed_over_by_whole_rounds() -> None:
    left = [7]  # samples until the system dies
    kept: list[dict[str, list[int]]] = []

    def sample() -> int:
        left[0] -= 1
        if left[0] < 0:
            raise ConnectionError("it died")
        return left[0]

    with pytest.raises(ConnectionError):
        in_turn({"a": sample, "b": sample, "c": sample}, 5, lambda: None, broken=kept.append)
    assert [{n: len(s) for n, s in found.items()} for found in kept] == [{"a": 2, "b": 2, "c": 2}]
    kept.clear()
    left[0] = 2
    with pytest.raises(ConnectionError):
        in_turn({"a": sample, "b": sample, "c": sample}, 5, lambda: None, broken=kept.append)
    assert kept == []


def test_nothing_is_concluded_inside_the_noise() -> None:
    clear = Interval(2.8, 2.7, 2.9, 20)
    assert compared(clear) == "2.80 times slower (95% 2.70-2.90, n = 20)"
    assert compared(Interval(0.5, 0.4, 0.625, 20)).startswith("2.00 times faster (95% 1.60-2.50")
    assert compared(clear, noise=2.0).startswith("not told apart (2.80 times")
    assert compared(Interval(1.05, 0.98, 1.1, 20)).startswith("not told apart")
    assert "too few rounds" in compared(Interval(9.0, 8.0, 10.0, 4))


def test_rounds_know_their_noise_and_leave_enough_for_a_conclusion() -> None:
    rounds = Rounds({"a": [1.0] * 6, "a" + AGAIN: [1.25] * 6, "b": [2.0] * 6})
    assert rounds.noise == pytest.approx(0.25)
    assert rounds.ratio("a", "b").value == 2.0
    assert rounds.compared("a", "b").startswith("2.00 times slower")
    warming = Rounds({"a": [9.0, 8.0, 7.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]})
    assert warming.cut == 3
    assert Rounds({"a": [9.0, 9.0, 1.0, 1.0, 1.0, 1.0]}).cut == 1
    assert Rounds({}).cut == 0


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
    found = transports.findings({name: bursts(ms) for name, ms in times.items()}, 602112)
    whole(found)
    figures = by(found)
    http = figures["string", "HTTP", None]
    assert (http.value, http.n, http.labels["thesis"]) == (2.4, 18, 1.676)
    assert figures["tensor", "handle, copied in", None].labels["bytes"] == 602112
    assert "thesis" not in figures["tensor", "handle", None].labels
    assert figures["string: HTTP / ZeroMQ", "ratio", None].value == pytest.approx(24)
    assert figures["string: HTTP / ZeroMQ", "ratio", None].labels["thesis"] == 24
    assert figures["tensor: ZeroMQ / handle", "ratio", None].value == pytest.approx(3)
    assert figures["tensor: ZeroMQ / handle, copied in", "ratio", None].value == pytest.approx(2)
    assert ("string: ZeroMQ / handle", "ratio", None) not in figures
    assert "24.0 times slower" in found.says
    assert "588 KiB" in found.says


# --- each block by itself ------------------------------------------------------------------------


def test_offline() -> None:
    one = (2.0, 3.0, 4.0, 1.0)
    samples = {
        "scripted": [one] * 6,
        "traced": [tuple(2 * ms for ms in one)] * 6,
        "exported": [one] * 6,
        "scripted, again": [one] * 6,
    }
    found = offline.findings(samples, [4.0, 8.0, 12.0, 40.0], SETTINGS)
    whole(found)
    figures = by(found)
    assert figures["forward", "traced", "block3"].value == 8.0
    assert figures["forward", "scripted", "block4"].labels["thesis"] == pytest.approx(2.563)
    assert figures["share of the sum", "traced", "block2"].value == pytest.approx(30.0)
    assert figures["sum of the blocks", "scripted", 1].labels["thesis"] == pytest.approx(
        offline.OFFLINE_SUM_MS
    )
    assert "thesis" not in figures["forward", "exported", "block1"].labels
    assert figures["parameters", "block4", "block4"].value == 10.0
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
    found = offline.findings(samples, [4.0, 8.0, 12.0, 40.0], SETTINGS, memory)
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
    grid = found.tables[-1]
    assert grid.rows[0][3] == "52.0"
    assert grid.rows[0][-2:] == ("4.86 MB", "26.0 MB")
    assert grid.rows[-1][:3] == ("", "none (C)", "50.0")
    # Without it, what was measured before is whole all the same.
    assert len(offline.findings(samples, [4.0, 8.0, 12.0, 40.0], SETTINGS).tables) == 2


def test_the_thesiss_offline_figures_are_those_of_its_own_model_only() -> None:
    samples = {form: [(1.0, 1.0, 1.0)] * 6 for form in (*offline.FORMS, "scripted, again")}
    found = offline.findings(samples, [1.0, 1.0, 1.0], SMALL)
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
    found = ways.measure((1, 4), 3, lambda: None, lambda _found: None)
    assert {rows: len(one.samples[ZEROMQ]) for rows, one in found.items()} == {1: 3, 4: 3}
    served = [rows for way, rows in asked if way == ZEROMQ]
    # Two rounds are the warm-up; no size has two rounds before the other one has its own.
    assert [set(served[i : i + 2]) for i in range(0, 10, 2)] == [{1, 4}] * 5
    # In the process a size that was not the last one is run once more: its buffers are new.
    alone = [rows for way, rows in asked if way == OFFLINE]
    assert min(len(list(group)) for _, group in itertools.groupby(alone)) == 2


def test_one_round_is_enough_for_what_is_kept_of_a_failure() -> None:
    ways = {**each_way(), HTTP: Sample(160.0, ()), HTTP_JSON: Sample(320.0, ())}
    assert pipeline_time.findings(series(ways, 1), SETTINGS).figures
    assert components.findings(series(each_way(), 1), SETTINGS).figures
    one = {form: [(1.0, 1.0, 1.0, 1.0)] for form in (*offline.FORMS, "scripted, again")}
    assert offline.findings(one, [1.0] * 4, SETTINGS).figures
    trips = transports.findings(
        {
            f"{kind}, {way}": bursts(1.0, 1)
            for kind in ("string", "tensor")
            for way in (*transports.WAYS, "ZeroMQ, again")
        },
        4,
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
    found = copies.findings(moved([8e6] * 6, 2e3), engine, 3.8e6, {}, SETTINGS)
    whole(found)
    figures = by(found)
    assert figures[copies.SOCKETS, ZEROMQ, 1].value == 8.0
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
        moved([8e6] * 6, 2e3), dict.fromkeys(copies.WAYS, 0.0), 1.0, over, SMALL
    )
    figures = by(found)
    assert figures[copies.TO_HOST, ZEROMQ, 1].value == 3.0
    assert figures[copies.TO_DEVICE, TENSORMQ, 1].value == 0.0
    assert figures[copies.TO_DEVICE, TENSORMQ, 1].labels["thesis"] == 0.0
