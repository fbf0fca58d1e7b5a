"""Two revisions, visit by visit: order, warm-up, noise, verdicts, and the report of it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockflow.bench.calibration import NAME as CALIBRATION
from blockflow.bench.calibration import Steadiness, calibration_figures
from blockflow.bench.compare.arms import values_of
from blockflow.bench.compare.judgement import (
    MIN_PAIRS,
    Arm,
    Change,
    Comparison,
    Metric,
    Visit,
    compare_arms,
    order,
)
from blockflow.bench.compare.report import figures, remarks, verdict_grid
from blockflow.bench.doc_tables import TABLES
from blockflow.bench.docs import Stored, render
from blockflow.bench.overload_figures import Depth, Ended, Load
from blockflow.bench.overload_figures import figures as overload_figures
from blockflow.bench.results import LESS_IS_BETTER, MORE_IS_BETTER, Figure, ResultFile
from blockflow.bench.statistics import warm_up

TIME = Metric("latency, x", "ms", False)
RATE = Metric("throughput, x", "1/s", True)
SIZE = Metric("USS, x", "MiB", False)
RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"
TITLES = ("HEAD~1 (aaa)", "working tree (bbb)")


def visits(rounds: int, value: Callable[[Arm, int], dict[Metric, float]]) -> list[Visit]:
    return [Visit(arm, 1.0, value(arm, i // 2)) for i, arm in enumerate(order(rounds))]


def one(rounds: int, metric: Metric, base: Sequence[float], tree: Sequence[float]) -> Comparison:
    arms = {Arm.BASE: base, Arm.TREE: tree}
    (found,) = compare_arms(visits(rounds, lambda arm, i: {metric: arms[arm][i]}))
    return found


def noisy(rounds: int, middle: float, share: float, seed: int) -> list[float]:
    rng = random.Random(seed)
    return [middle * (1 + rng.uniform(-share, share)) for _ in range(rounds)]


def test_arms_take_turns_so_that_neighbours_are_equal_and_drift_cancels() -> None:
    assert "".join(arm[0] for arm in order(4)) == "bttbbttb"
    places = {arm: [i for i, a in enumerate(order(4)) if a is arm] for arm in Arm}
    assert sum(places[Arm.BASE]) == sum(places[Arm.TREE])


def test_a_clear_change_is_told_in_its_direction() -> None:
    base, slower = noisy(8, 10, 0.01, 1), noisy(8, 12, 0.01, 2)
    assert one(8, TIME, base, slower).change is Change.SLOWER
    assert one(8, TIME, slower, base).change is Change.FASTER
    assert one(8, RATE, base, slower).change is Change.FASTER
    assert one(8, RATE, slower, base).change is Change.SLOWER
    found = one(8, SIZE, base, slower)
    assert found.change is Change.SLOWER
    assert found.change.word(SIZE.unit) == "larger"
    assert Change.FASTER.word(SIZE.unit) == "smaller"
    assert Change.FASTER.word(TIME.unit) == "faster"


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000))
def test_equal_arms_with_noise_of_a_tenth_are_not_told_apart_by_a_hundredth(seed: int) -> None:
    found = one(8, TIME, noisy(8, 10, 0.1, seed), noisy(8, 10.1, 0.1, seed + 1))
    # What is claimed must be outside the run's own noise, whatever the draw.
    assert found.ratio is not None
    if found.change is Change.SLOWER:
        assert found.ratio.low > 1 + found.noise
    if found.change is Change.FASTER:
        assert found.ratio.high <= 1 - found.noise


def test_a_change_inside_the_noise_of_an_arm_beside_itself_is_not_concluded() -> None:
    # Every pair says "3% slower"; but neighbouring visits of the same arm differ by a tenth.
    base = [10.0, 11.0, 10.0, 11.0, 10.0, 11.0, 10.0, 11.0]
    found = one(8, TIME, base, [b * 1.03 for b in base])
    assert found.ratio is not None
    assert found.ratio.low == pytest.approx(1.03)
    assert found.noise > 0.03
    assert found.change is Change.NOISE


def test_a_machine_that_was_slower_for_one_arm_forbids_a_conclusion() -> None:
    def made(fixed: float) -> list[Visit]:
        return [
            Visit(arm, fixed if arm is Arm.TREE else 1.0, {TIME: t, SIZE: t})
            for arm in order(8)
            for t in [11.0 if arm is Arm.TREE else 10.0]
        ]

    assert [c.change for c in compare_arms(made(1.0))] == [Change.SLOWER] * 2
    # The fixed work says that all of the tenth is the machine's. Memory is not the clock's matter.
    assert [c.change for c in compare_arms(made(1.1))] == [Change.NOISE, Change.SLOWER]


def test_with_too_few_rounds_nothing_is_concluded() -> None:
    few = MIN_PAIRS - 1
    found = one(few, TIME, [10.0] * few, [20.0] * few)
    assert found.change is Change.NOISE
    assert "too few rounds" in found.note
    assert one(MIN_PAIRS, TIME, [10.0] * 5, [20.0] * 5).change is Change.SLOWER


def test_a_warm_up_is_found_and_left_out_of_both_arms() -> None:
    assert warm_up([30.0, 10.0, 10.1, 9.9, 10.0, 10.1]) == 1
    assert warm_up([30.0, 20.0, *[10.0, 10.1] * 4]) == 2
    assert warm_up([10.0] * 6) == 0
    assert warm_up([0.1] * 7) == 0
    assert warm_up([1.0, 0.0] * 9) == 0  # one less would spread less, and tell less
    assert warm_up([1.0]) == 0
    # At most a third: a change in the middle of a run is no warm-up.
    assert warm_up([30.0] * 5 + [10.0]) <= 2
    found = one(8, TIME, [50.0, *[10.0] * 7], [12.0] * 8)
    assert found.warm_up == 1
    assert found.base == 10.0
    assert found.ratio is not None and found.ratio.n == 7
    assert found.noise == 0.0


@pytest.mark.parametrize("rounds", [5, 6, 7])
def test_a_warm_up_leaves_enough_to_conclude(rounds: int) -> None:
    steady = [10.0 + 0.01 * (i % 2) for i in range(rounds - 2)]
    found = one(rounds, TIME, [30.0, 20.0, *steady], [60.0, 40.0, *(2 * x for x in steady)])
    assert found.warm_up == rounds - 5
    assert found.ratio is not None and found.ratio.n == 5
    assert "too few" not in found.note


def test_a_metric_that_one_arm_lacks_is_said_and_no_failure() -> None:
    def value(arm: Arm, i: int) -> dict[Metric, float]:
        return {TIME: 1.0} if arm is Arm.BASE else {TIME: 1.0, RATE: 2.0}

    same, new = compare_arms(visits(6, value))
    assert same.note == ""
    assert (new.base, new.tree, new.ratio) == (None, 2.0, None)
    assert "not in the base" in new.note
    (gone,) = compare_arms(visits(6, lambda arm, i: {RATE: 2.0} if arm is Arm.BASE else {}))
    assert "not in the tree" in gone.note
    assert gone.base == 2.0


def test_values_without_a_ratio_and_metrics_with_gaps_get_no_verdict() -> None:
    assert "not positive" in one(6, TIME, [0.0] * 6, [1.0] * 6).note

    def value(arm: Arm, i: int) -> dict[Metric, float]:
        return {} if arm is Arm.TREE and i == 2 else {TIME: 1.0}

    (found,) = compare_arms(visits(6, value))
    assert found.note == "missing in 1 of 6 rounds"


def test_an_unpaired_last_visit_does_not_count() -> None:
    whole = visits(6, lambda arm, i: {TIME: 1.0})
    (found,) = compare_arms(whole[:-1])
    assert found.ratio is not None and found.ratio.n == 5
    assert compare_arms([]) == []


def figure(name: str, unit: str, **labels: object) -> Figure:
    return Figure(name, "way", 1, None, None, 2.0, unit, 3, labels=labels)


def test_a_metric_is_told_by_its_labels_but_not_by_what_is_judged() -> None:
    plain = Metric.of(figure("latency", "ms", engine="exported", bytes=16))
    assert plain == Metric("latency, way, 1 row, exported, 16", "ms", False)
    judged = Metric.of(figure("latency", "ms", goal=1.05, verdict="met", noise=0.1))
    assert judged == Metric("latency, way, 1 row", "ms", False)
    assert Metric.of(figure("of the bound", "x", at_least=True)).more_is_better
    assert Metric.of(figure("throughput", "1/s")).more_is_better
    # Whatever is counted per second: more of it is no slowing down.
    assert Metric.of(figure("saturation", "rows/s")).more_is_better
    assert Metric.of(figure("hop", "s")).more_is_better is False
    # A ratio says nothing by itself: its goal does, or whoever has measured it.
    assert Metric.of(figure("share", "x", verdict="met", goal=1.1)).more_is_better is False
    assert Metric.of(figure("share", "x")).more_is_better is None
    told = {more: Metric.of(figure("share", "x", **label)) for more, label in _DIRECTIONS.items()}
    assert {more: metric.more_is_better for more, metric in told.items()} == {
        True: True,
        False: False,
    }
    assert {metric.text for metric in told.values()} == {"share, way, 1 row"}
    not_run = Figure("not run", "x", None, None, None, 0.0, "1", 0)
    fixed = Figure("fixed work", "begin", None, 1.0, None, 1.0, "ms", 1)
    assert values_of([not_run, fixed]) == {}


_DIRECTIONS = {True: MORE_IS_BETTER, False: LESS_IS_BETTER}


def test_a_goodput_that_halves_is_told_whatever_the_limit_was() -> None:
    def visit(arm: Arm, i: int) -> dict[Metric, float]:
        per_s = 100 if arm is Arm.BASE else 50
        load = Load(3.0, 300.0, 4.0, 0.0, limit=20 + 3 * i + (arm is Arm.TREE))
        load.ended = [Ended(n / per_s, n / per_s + 0.02, "ok") for n in range(4 * per_s)]
        load.depths = [Depth(0.25 * n, 9 + (n + i) % 3, 5) for n in range(16)]
        return values_of(overload_figures([load], [(0.2 * n + 0.01 * i, 99.0) for n in range(9)]))

    found = {c.metric.text: c for c in compare_arms(visits(6, visit))}
    assert found["goodput, 3x, 1 row"].change is Change.SLOWER
    assert set(found) == {
        f"{name}, 3x, 1 row" for name in ("goodput", "answer", "in flight", "queued")
    }
    assert not any(c.note for c in found.values())


def test_what_was_found_beside_a_figure_does_not_tell_which_it_is() -> None:
    for label in ({"agree": True}, {"agree": False}, {"visits": 13}, {"failed": "OVERLOADED"}):
        assert Metric.of(figure("hop", "ms", bytes=16, **label)).text == "hop, way, 1 row, 16"


def test_figures_that_only_a_fraction_tells_apart_are_metrics_of_their_own() -> None:
    alike = [figure("ratio", "x", base="serial", gap=gap, paper=0.77) for gap in (1.0, 2.5)]
    assert [m.text for m in values_of(alike)] == [
        "ratio, way, 1 row, serial, gap 1",
        "ratio, way, 1 row, serial, gap 2.5",
    ]
    assert [m.text for m in values_of(alike[:1])] == ["ratio, way, 1 row, serial"]
    # Nobody knows which of these would be compared with which.
    assert values_of([figure("ratio", "x", gap=1.0)] * 2) == {}


@pytest.mark.parametrize("file", sorted(RESULTS.glob("*.jsonl")), ids=lambda p: p.stem)
def test_no_stored_figure_takes_the_place_of_another(file: Path) -> None:
    for run in ResultFile(file, file.stem).runs():
        kept = [f for f in run.figures if f.n and f.name != CALIBRATION and "at_s" not in f.labels]
        assert len(values_of(run.figures)) == len(kept)


def test_a_ratio_is_judged_in_its_own_direction() -> None:
    grown = {Arm.BASE: 2.0, Arm.TREE: 3.0}
    for label, change in ((MORE_IS_BETTER, "better"), (LESS_IS_BETTER, "worse"), ({}, "different")):
        metric = Metric.of(figure("ratio", "x", **label))
        (found,) = compare_arms(visits(8, lambda arm, _i, m=metric: {m: grown[arm]}))
        assert found.change.word(metric.unit) == change
        (found,) = compare_arms(visits(8, lambda _arm, _i, m=metric: {m: 2.0}))
        assert found.change is Change.NOISE


def test_the_direction_may_be_told_by_one_revision_alone() -> None:
    silent, told = (Metric.of(figure("ratio", "x", **label)) for label in ({}, MORE_IS_BETTER))
    for base, tree in ((silent, told), (told, silent)):
        arms = {Arm.BASE: {base: 2.0}, Arm.TREE: {tree: 3.0}}
        (found,) = compare_arms(visits(8, lambda arm, _i, arms=arms: arms[arm]))
        assert found.change is Change.FASTER
    # Whoever changed the direction knows why.
    arms = {
        Arm.BASE: {Metric.of(figure("ratio", "x", **LESS_IS_BETTER)): 2.0},
        Arm.TREE: {told: 3.0},
    }
    (found,) = compare_arms(visits(8, lambda arm, _i: arms[arm]))
    assert found.change is Change.FASTER


def test_a_rate_is_compared_as_one_whatever_its_unit() -> None:
    rate = Metric.of(figure("saturation", "rows/s"))
    more = {Arm.BASE: 100.0, Arm.TREE: 120.0}
    (found,) = compare_arms(visits(8, lambda arm, _i: {rate: more[arm]}))
    assert found.change is Change.FASTER
    # A machine that was quicker in one arm is noise for it as for any other rate.
    drifting = [
        Visit(v.arm, 1.0 if v.arm is Arm.BASE else 0.7, v.values)
        for v in visits(8, lambda arm, _i: {rate: more[arm]})
    ]
    (found,) = compare_arms(drifting)
    assert found.change is Change.NOISE


def reported() -> list[Comparison]:
    text = "latency, tensormq, 1 row, exported"
    metrics = [Metric(text, "ms", False), Metric("worker USS, tensormq", "MiB", False), RATE]

    def value(arm: Arm, i: int) -> dict[Metric, float]:
        found = {metrics[0]: 10.0, metrics[1]: 50.0 if arm is Arm.BASE else 40.0}
        return found | ({RATE: 1.0} if arm is Arm.TREE else {})

    return compare_arms(visits(6, value))


def test_the_report_shows_ratio_noise_and_verdict() -> None:
    found = reported()
    made = figures(found, TITLES)
    table = verdict_grid(made)
    assert table.title == "working tree (bbb) beside HEAD~1 (aaa): 1 row, exported"
    assert table.rows[0] == (
        "latency, tensormq",
        *("10.0 ms", "10.0", "1.000 (1.00-1.00)", "0.0%", "6", "within noise"),
    )
    assert table.rows[1][-1] == "smaller"
    assert table.rows[2] == ("throughput, x", "-", "1.00", "-", "", "", "-")
    lines = remarks(found, Steadiness(1.0, 1.0, 0.1))
    assert lines[0] == "1 faster, 0 slower, 0 different, 1 within noise, 1 not compared"
    assert lines[1] == "not in the base, nothing to compare with: throughput, x"
    assert [f.labels["verdict"] for f in made] == ["within noise", "faster", "none"]
    assert [Figure.from_dict(f.to_dict()) for f in made] == made


def test_a_ratio_of_too_few_rounds_is_shown_without_a_verdict() -> None:
    few = verdict_grid(figures([one(2, TIME, [10.0] * 2, [20.0] * 2)], TITLES))
    (row,) = few.rows
    assert (row[3], row[-1]) == ("2.000 (2.00-2.00)", "-")


def test_documents_show_what_a_stored_comparison_says(tmp_path: Path) -> None:
    flaw = "partial result, ended early after 13 of 16 visits: a | b\nmany more words " + "x" * 500
    made = figures(reported(), TITLES, flaw)
    steady = calibration_figures(Steadiness(1.0, 1.0, 0.1))
    target = ResultFile(tmp_path / "compare.jsonl", "compare", "make bench-compare BASE=HEAD~1")
    target.write([*made, *steady])
    stored = Stored.read(target.path)
    assert stored is not None
    names = ("revisions", "verdicts", "notes")
    assert {f"compare.{name}" for name in names} == {n for n in TABLES if n.startswith("compare.")}
    body = [f"<!-- results: compare.{name} -->" for name in names]
    lines = ["<!-- if: compare -->", *body, "<!-- end -->"]
    page = render("\n".join(lines), {"compare": stored}, frozenset())
    assert (
        "| working tree (bbb) | HEAD~1 (aaa) | 1 row, exported | 1 | 0 | 0 | 1 | 1 "
        "| partial result, ended early after 13 of 16 visits: a / b many more words [...] |"
    ) in page
    row = "| worker USS, tensormq | 50.0 MiB | 40.0 | 0.800 (0.800-0.800) | 0.0% | 6 | smaller |"
    assert row in page
    assert "| throughput, x | not in the base, nothing to compare with |" in page
    assert "fixed work |" not in page
    assert page.count("<sub>`make bench-compare BASE=HEAD~1`, ") == len(names)
    # A section without results is left out; tables without rows are too.
    assert "compare" not in render("\n".join(lines), {}, frozenset()).partition("\n")[2]
    whole = [f for f in figures(reported(), TITLES) if "note" not in f.labels]
    assert TABLES["compare.notes"].make([*whole, *steady]).rows == []
    assert TABLES["compare.revisions"].make(whole).rows[0][-1] == ""
    for name in names:
        assert TABLES[f"compare.{name}"].make(steady).rows == []
