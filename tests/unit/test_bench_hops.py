"""The hop benchmark's arithmetic: pairs, slopes, verdicts, tables; its chain's topology."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from blockflow.bench import hop_figures as hf
from blockflow.bench import legs
from blockflow.bench.echo_chain import (
    CONDITIONS,
    HANDLES,
    MIDDLES,
    SHORT,
    WARM,
    WAYS,
    HopSample,
    sample,
    task_name,
    topology,
)
from blockflow.bench.hop_figures import Key, Track, Tracks
from blockflow.bench.hops import FULL, HEAVY, KIB, MIB, SIZES
from blockflow.bench.kpi_reader import BYTES, COPIES, COPIES_IN, Counted, per_hop
from blockflow.bench.results import interval_figure, latency_figure
from blockflow.bench.statistics import Interval, median_interval
from blockflow.client.result import BlockTiming, Result

ROUNDS = 12
MEGABYTE = 1_000_000


def tracks(hop: float, bare: float, *, grown: float = 1.0, again: float = 1.0) -> Tracks:
    """A machine that gets slower from round to round; ``grown``: the large hop to the small."""
    out: Tracks = {}
    for i in range(ROUNDS):
        slow = 1 + i / ROUNDS
        for name, ms in ((hf.BARE, bare), (hf.AGAIN, bare * again), (hf.POLLED, bare / 2)):
            track = out.setdefault(Key(name, 0, WARM), Track())
            track.hop[i] = [ms * slow] * 3
        for size, factor in ((1024, 1.0), (MEGABYTE, grown)):
            one = hop * factor * slow
            short, long = (HopSample(one, 5 + n * one) for n in (SHORT, MIDDLES))
            track = out.setdefault(Key(HANDLES.name, size, WARM), Track())
            track.add(i, [short] * 3, [long] * 3)
    return out


def found(samples: Tracks) -> dict[tuple[str, str, object], hf.Figure]:
    figures = hf.figures(samples, {(HANDLES.name, 1024): Counted(0.0, 1.0, 1024.0)})
    return {(f.name, f.mode, f.labels.get("bytes")): f for f in figures}


def test_ratios_and_slopes_do_not_see_the_drift() -> None:
    by = found(tracks(0.14, 0.1))
    ratio = by[hf.TO_BARE, HANDLES.name, 1024]
    assert (ratio.value, ratio.low, ratio.high) == pytest.approx((1.4, 1.4, 1.4))
    assert ratio.labels["verdict"] == "met"
    assert by[hf.GROWTH, HANDLES.name, MEGABYTE].value == pytest.approx(1.0)
    slope = by[hf.SLOPE, HANDLES.name, 1024]
    assert slope.value == pytest.approx(by[hf.HOP, HANDLES.name, 1024].p50_ms, rel=0.1)
    assert by[hf.AGREE, HANDLES.name, 1024].labels["agree"]
    assert by[COPIES_IN, HANDLES.name, 1024].value == 0
    assert by[COPIES, HANDLES.name, 1024].value == 1
    assert by[BYTES, HANDLES.name, 1024].value == 1024


def test_a_hop_s_interval_is_that_of_rounds() -> None:
    """Requests of one round are alike; a machine that drifts makes rounds differ, and only these
    say how far the median may be off."""
    hop = found(tracks(0.12, 0.1))[hf.HOP, HANDLES.name, 1024]
    rounds = median_interval([0.12 * (1 + i / ROUNDS) for i in range(ROUNDS)])
    for bound in ("value", "low", "high"):
        assert getattr(hop, bound) == pytest.approx(getattr(rounds, bound))
    assert (hop.n, hop.p99_ms) == (ROUNDS, pytest.approx(0.12 * (2 - 1 / ROUNDS)))


def test_a_leg_s_interval_is_that_of_rounds() -> None:
    times = legs.LegTimes()
    drift = [1 + i / ROUNDS for i in range(ROUNDS)]
    for i, slow in enumerate(drift):
        times.there[i], times.back[i], times.whole[i] = [slow] * 8, [slow * 2] * 8, [slow * 3] * 8
    out = legs.figures({("message, ipc", KIB): times})
    assert [f.name for f in out] == [legs.THERE, legs.BACK, legs.WHOLE]
    rounds = median_interval(drift)
    for figure, factor in zip(out, (1, 2, 3), strict=True):
        assert figure.n == ROUNDS
        expected = (factor * rounds.low, factor * rounds.high)
        assert (figure.low, figure.high) == pytest.approx(expected)


def test_missed_aims_are_said() -> None:
    by = found(tracks(0.3, 0.1, grown=2.0))
    assert by[hf.TO_BARE, HANDLES.name, 1024].labels["verdict"] == "missed"
    assert by[hf.GROWTH, HANDLES.name, MEGABYTE].labels["verdict"] == "missed"


def test_a_noisy_run_concludes_nothing() -> None:
    figures = hf.figures(tracks(0.16, 0.1, again=1.3), {})
    by = {(f.name, f.labels.get("bytes")): f for f in figures}
    assert by[hf.TO_BARE, 1024].labels["verdict"] == "within noise"
    text = "\n".join(hf.remarks(figures))
    assert "30.0%" in text
    assert "nothing is concluded" in text


def test_a_slope_that_disagrees_is_said() -> None:
    samples = tracks(0.14, 0.1)
    track = samples[Key(HANDLES.name, 1024, WARM)]
    for i in track.long:  # half a millisecond per hop that nobody accounts for
        track.long[i] = [t + 0.5 * (MIDDLES - SHORT) for t in track.long[i]]
    figures = hf.figures(samples, {})
    (apart,) = (f for f in figures if f.name == hf.AGREE and f.labels["bytes"] == 1024)
    assert apart.value == pytest.approx(-0.5)
    assert not apart.labels["agree"]
    assert any("agree in 1 of 2" in line for line in hf.remarks(figures))


def test_tables_have_a_row_per_size_and_way() -> None:
    figures = hf.figures(tracks(0.14, 0.1), {(HANDLES.name, 1024): Counted(0.0, 1.0, 1024.0)})
    times = [row for row in hf.time_grid(figures).rows if row]
    assert [(row[0], row[1]) for row in times] == [
        ("", hf.BARE),
        ("", hf.AGAIN),
        ("", hf.POLLED),
        ("1 KiB", HANDLES.name),
        ("977 KiB", HANDLES.name),
    ]
    checks = [row for row in hf.check_grid(figures).rows if row]
    assert len(checks) == 2
    assert checks[0][-2:] == ("0 + 1.00", "1 KiB")
    assert [row[-1] for row in hf.aim_grid(figures).rows] == ["met", "met", "met"]
    for make in (hf.time_grid, hf.check_grid, hf.leg_grid, hf.aim_grid):
        out = io.StringIO()
        Console(file=out, width=80).print(make([*figures, *LEGS]).rich())
        assert "…" not in out.getvalue(), "something is cut on a terminal of 80 columns"
    (by_message, by_slot) = hf.leg_grid(LEGS).rows
    assert by_message == ("1 MiB", "message, ipc", "", "", "2.00", "", "1")
    assert by_slot == ("1 MiB", "slot, ipc", "0.500", "", "1.00", "0.50 (0.500-0.500)", "1")


LEGS = [
    latency_figure(legs.WHOLE, "message, ipc", None, [2.0], {"bytes": MIB}),
    latency_figure(legs.THERE, "slot, ipc", None, [0.5], {"bytes": MIB}),
    latency_figure(legs.WHOLE, "slot, ipc", None, [1.0], {"bytes": MIB}),
    interval_figure(legs.RATIO, "slot, ipc", None, Interval(0.5, 0.5, 0.5, 1), "x", {"bytes": MIB}),
]


def result(hop: float, compute: float, blocks: int) -> Result:
    timings = tuple(BlockTiming(f"b{i}", hop / 2, 0.0, hop / 2, compute, i) for i in range(blocks))
    values: dict[str, object] = dict.fromkeys(Result.__dataclass_fields__, 0.0)
    values |= {"task": "t", "value": None, "dtype": "uint8", "timings": timings, "epoch": 1}
    return Result(**{**values, "request_id": b""})  # type: ignore[arg-type]


def test_a_sample_leaves_out_the_ends_of_the_path_and_all_computing() -> None:
    one = sample(result(hop=0.2, compute=10.0, blocks=5), total_ms=52.0)
    assert one == HopSample(pytest.approx(0.2), pytest.approx(2.0))


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
def test_the_chain_has_a_task_for_everything_that_is_measured(transport: str) -> None:
    ways = [w for w in WAYS if w.transport == transport]
    wanted = topology(ways, SIZES)
    names = {b["name"] for b in wanted["blocks"]}
    for way in ways:
        for size in SIZES:
            for condition in CONDITIONS:
                for count in (SHORT, MIDDLES):
                    path = wanted["tasks"][task_name(way, size, condition, count)]["path"]
                    assert len(path) == count + 2
                    assert set(path) <= names
        hosts = {b["worker"] for b in wanted["blocks"] if b["name"] in path}
        assert len(hosts) == (1 if way.together else MIDDLES + 2)
    assert wanted["transport"] == transport


def test_one_system_has_one_transport() -> None:
    with pytest.raises(ValueError, match="one transport"):
        topology(WAYS, SIZES)


def test_copies_are_counted_per_request_and_block() -> None:
    grown = {
        "a": {"requests": 4, "copies_in": 2, "copies_out": 4, "bytes_out": 400},
        "b": {"requests": 4, "copies_in": 0, "copies_out": 0, "bytes_out": 0},
    }
    assert per_hop(grown, ["a", "b"]) == Counted(0.25, 0.5, 50.0)


def test_heavy_ways_take_part_now_and_then() -> None:
    assert FULL.takes_part(1, KIB, True, "idle")
    assert FULL.takes_part(4, HEAVY, True, WARM)
    assert not FULL.takes_part(5, HEAVY, True, WARM)
    assert not FULL.takes_part(4, HEAVY, True, "idle")
    assert FULL.takes_part(5, HEAVY, False, "idle")


def test_few_rounds_conclude_nothing() -> None:
    few = tracks(0.14, 0.1)
    for track in few.values():
        for rounds in (track.hop, track.short, track.long):
            for number in range(1, ROUNDS):
                rounds.pop(number, None)
    figures = hf.figures(few, {})
    assert {f.labels["verdict"] for f in figures if "verdict" in f.labels} == {"within noise"}
    assert {row[4] for row in hf.check_grid(figures).rows if row} == {""}
    text = "\n".join(hf.remarks(figures))
    assert "some aims have only 1" in text
    assert "cases" not in text
