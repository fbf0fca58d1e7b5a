"""Predicted times: tables, LBCI's curves, what joining is worth; and what a policy knows of a
stage."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from policy_rig import MS, profile

from blockflow.batching import costs as made_by
from blockflow.batching.costs import Costs, FittedCosts, at, measured
from blockflow.batching.facts import LENGTH, StageFacts
from blockflow.batching.joining import Arrivals, Lines, _Ahead, gain
from blockflow.batching.sliced import merged
from blockflow.core.launchspec import StageSpec
from blockflow.core.model import BlockInfo, Contract, Padding, TensorSpec
from blockflow.core.profile import Point, StageProfile

FLAT = StageFacts("flat", 32, 1, profile({1: 10.0, 2: 20.0, 4: 40.0}))
CHEAPER = StageFacts("cheaper", 32, 1, profile({1: 10.0, 2: 12.0, 4: 16.0}, spread=0.2))


def test_lines_follow_the_table() -> None:
    costs = Costs({1: FLAT, 2: CHEAPER}, 8)
    assert costs.known
    line = costs.line((1, 2))
    assert [line[b] // MS for b in range(6)] == [0, 20, 32, 44, 56, 68]
    assert at(line, 8) == 104 * MS and at(line, 16) == 208 * MS
    assert costs.fluctuation((1,)) == 0 and costs.fluctuation((1, 2)) == 0.2


def test_a_bound_is_the_most_of_any_batch_up_to_the_rows() -> None:
    falls = StageFacts("falls", 32, 1, profile({1: 1.0, 2: 9.0, 3: 2.0, 4: 20.0}))
    costs = Costs({1: falls, 2: FLAT}, 4)
    assert [costs.bound((1,), None, rows) // MS for rows in (1, 2, 3, 4, 8)] == [1, 9, 9, 20, 40]
    assert Costs({1: falls}, 3).bound((1,), None, 6) == 18 * MS
    assert costs.bound((1, 2), None, 3) == 39 * MS
    assert {s: line[3] // MS for s, line in costs.bounds((1, 2), None).items()} == {1: 9, 2: 30}


def test_nothing_is_known_without_a_profile_for_the_threads() -> None:
    other = StageFacts("other", 32, 2, profile({1: 10.0}))
    assert not measured(other) and not Costs({1: FLAT, 2: other}, 4).known
    costs = FittedCosts({1: other, 2: StageFacts()}, 4)
    assert costs.line((1, 2)) == [0] * 5 and costs.fluctuation((1, 2)) == 0
    assert not Costs({}, 1).known


def test_fitted_lines_follow_the_curve() -> None:
    s = {b: (20 - 4) / (1 + (b / 3) ** 1.5) + 4 for b in (1, 2, 4, 8, 16, 32)}
    facts = StageFacts("x", 64, 1, profile({b: b * t for b, t in s.items()}))
    line = FittedCosts({1: facts}, 64).line((1,))
    for b in (1, 3, 11, 24, 50):  # measured or not
        assert line[b] / MS == pytest.approx(b * ((20 - 4) / (1 + (b / 3) ** 1.5) + 4), rel=0.01)


def test_no_curve_makes_larger_batches_cheaper_than_the_last_slope() -> None:
    """The classifier of AlexNet: its curve flattens where the measurements end, and falls."""
    times = {1: 15.3, 2: 22.0, 4: 32.0, 8: 48.8, 16: 48.0, 32: 52.8}
    facts = StageFacts("fc", 256, 1, profile(times))
    fitted, table = (c({1: facts}, 256).line((1,)) for c in (FittedCosts, Costs))
    assert all(fitted[b] >= table[b] for b in range(33, 257))
    assert table[256] > 1.5 * table[32]


def test_a_curve_that_misses_is_not_used() -> None:
    wild = StageFacts("wild", 8, 1, profile({1: 10.0, 2: 90.0, 4: 20.0, 8: 200.0}))
    assert FittedCosts({1: wild}, 8).line((1,)) == Costs({1: wild}, 8).line((1,))


def test_lengths_count() -> None:
    points = tuple(
        Point(1, rows, n, 5, ms, ms, ms, ms, ms, ms, 0.0, 0)
        for rows, n, ms in ((1, 16, 2.0), (2, 16, 4.0), (1, 64, 8.0), (2, 64, 16.0))
    )
    measured_at = StageProfile("enc", "0" * 64, "echo", "fp32", "here", points)
    facts = StageFacts("enc", 4, 1, measured_at, (0,), (1, 64), pads=True)
    for costs in (Costs({1: facts}, 4), FittedCosts({1: facts}, 4)):
        assert costs.line((1,), 16)[2] == 4 * MS
        assert costs.line((1,), 40)[1] == 5 * MS
        assert costs.line((1,))[1] == 8 * MS  # the longest, to be safe
    assert facts.length((40, 3)) == 40 and StageFacts().length((40,)) is None


def strided(name: str, gives: str, lengths: tuple[int, int]) -> StageFacts:
    """A block whose times grow with the length, as a launch tells of it."""
    taken = TensorSpec("float32", ("rows", name, 3), {name: lengths})
    given = TensorSpec("float32", ("rows", gives, 3), {name: lengths})
    info = BlockInfo("b", "1", "0" * 64, "echo", Contract(taken, given), 0, 0)
    points = tuple(
        Point(1, rows, n, 5, *[float(rows * n)] * 6, 0.0, 0) for rows in (1, 2) for n in lengths
    )
    table = StageProfile("b", "0" * 64, "echo", "fp32", "here", points)
    return StageFacts.of(StageSpec(1, info, "echo", "fp32", {}, profile=table.to_dict()))


def test_a_stage_behind_a_stride_costs_what_it_takes() -> None:
    trunk, head = strided("length", "(length - 4)//8", (8, 80)), strided("frames", "frames", (1, 9))
    assert trunk.carried(44) == 5 and head.carried(5) == 5 and trunk.carried(None) is None
    assert trunk.carried(4) == 1, "a length is one at least"
    costs = Costs({1: trunk, 2: head}, 4)
    assert costs.line((1, 2), 44)[2] == 2 * (44 + 5) * MS
    assert costs.line((2,), 5)[2] == 2 * 5 * MS
    one = merged([trunk, head])
    assert one.carries == trunk.carries
    assert Costs({1: one}, 4).line((1,), 80)[2] == 2 * (80 + 9) * MS
    twice = merged([trunk, strided("frames", "frames//2", (1, 9))])
    assert twice.carried(44) == 2


def test_what_is_remembered_is_bounded_by_its_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each length has lines of its own, as long as a batch may have rows."""
    monkeypatch.setattr(made_by, "_KEPT_TIMES", 100)
    facts = {1: strided("length", "length", (1, 80)), 2: strided("length", "length", (1, 80))}
    costs = Costs(facts, 8)
    for length in range(1, 40):
        lines = [costs.line((1,), length), costs.line((1, 2), length)]
        assert costs.bound((1, 2), length, 2) == 4 * length * MS == lines[1][2]
        kept = [*costs._lines.values(), *(line for line, _ in costs._bounds.values())]
        kept += [line for _, bounds in costs._bounds.values() for line in bounds.values()]
        kept += [line for parts in costs._parts.values() for line in parts]
        assert sum(map(len, kept)) <= 100
    assert costs.line((1, 2), 39) is lines[1]


def test_what_joining_is_worth() -> None:
    def worth(costs: Costs, behind: int) -> float:
        lines = Lines(costs.line((1,)), costs.line((2,)), costs.line((2,)), costs.line((1, 2)))
        return gain(lines, 1, 1, behind, 0.0) / MS

    flat = Costs({1: FLAT, 2: FLAT}, 16)
    # Apart the first ends at 10 and the other at 10 + 20; together both end at 10 + 20.
    assert worth(flat, 0) == pytest.approx(10 + 30 - 2 * 30)
    cheap = Costs({1: CHEAPER, 2: CHEAPER}, 16)
    # Together both end at 10 + 12.
    assert worth(cheap, 0) == pytest.approx(10 + 30 - 2 * 22)
    # One more waits: apart it shares a batch with the newcomer and ends at 34, else at 22 + 20.
    assert worth(cheap, 1) == pytest.approx(10 + 2 * 34 - (2 * 22 + 42))


@settings(deadline=None)
@given(
    fixed=st.integers(20, 200),
    each=st.integers(0, 20),
    busy=st.floats(0.1, 0.8),
    joining=st.integers(1, 4),
    behind=st.integers(1, 4),
)
def test_joining_counts_who_comes_after(
    fixed: int, each: int, busy: float, joining: int, behind: int
) -> None:
    """Beside batch after batch until nothing of the difference is left; for costs along a line."""
    rate = busy / max(each, 1)
    whole = [0, *(fixed + each * b for b in range(1, 400))]
    rest = [t // 2 for t in whole]
    catch_up = [t - r for t, r in zip(whole, rest, strict=True)]
    steady = fixed / (1 - rate * each)
    assume(rate * steady >= 1 and behind + rate * whole[8] < 300)

    def cost(time: float, here: int, queue: float) -> float:
        total = (here - 1.5 * rate * steady + rate * time / 2) * time
        for _ in range(300):
            time = fixed + each * queue
            total += (queue - 1.5 * rate * steady + rate * time / 2) * time
            queue = rate * time
        return total

    alone, together = rest[2], catch_up[joining] + rest[2 + joining]
    here = 2 + joining + behind
    apart = cost(alone, here, joining + behind + rate * alone)
    expected = apart - cost(together, here, behind + rate * together)
    found = gain(Lines(catch_up, rest, rest, whole), 2, joining, behind, rate)
    assert found == pytest.approx(expected, rel=1e-6, abs=1e-3)


def test_what_waits_for_a_free_engine_costs_by_the_times_of_the_queues_that_are_compared() -> None:
    curved = [0, 10, 12, 30, 70]
    assert _Ahead.of(curved, (3.0, 1.0), 0.0).square == (30 - 10) / 2, "each of two more takes 10"
    assert _Ahead.of(curved, (2.0, 2.0), 0.0).square == 30 - 12
    assert _Ahead.of(curved, (0.0, 0.5), 0.0).square == 12 - 10, "no batch is less than a row"


def test_where_perhaps_nobody_waits_it_costs_what_lies_between_nobody_and_one() -> None:
    line = [0, *(8 + 2 * b for b in range(1, 9))]
    ahead = _Ahead.of(line, (1.0, 2.0), 0.01)
    nobody, perhaps, one = (ahead.cost(0, 0, queue) for queue in (0.0, 0.25, 1.0))
    assert one - nobody == pytest.approx(ahead.stay)
    assert perhaps == pytest.approx(nobody + 0.25 * ahead.stay)
    # Whoever comes to an idle engine stays for his own run, and where one is always under way
    # for half of that as well.
    stays = [_Ahead.of(line, (1.0, 2.0), rate).stay for rate in (0.0, 0.0999, 0.1001)]
    assert stays == pytest.approx([10, 15, 15], rel=0.01)


def test_the_rate_of_the_last_arrivals() -> None:
    arrivals = Arrivals()
    assert arrivals.rate(5) == 0
    arrivals.add(7, 10)
    assert arrivals.rate(20) == 0, "one arrival says nothing"
    arrivals.add(2, 20)
    assert arrivals.rate(30) == 2 / 20 and arrivals.rate(10) == 0
    for i in range(16):
        arrivals.add(3, 1000 + 10 * i)
    assert arrivals.rate(1150) == 15 * 3 / 150


def test_facts_of_a_stage_that_is_launched() -> None:
    spec = TensorSpec("int64", ("rows", "length"), {"length": (1, 512)})
    contract = Contract(spec, TensorSpec("float32", ("rows", 16)))
    info = BlockInfo("encoder", "1", "0" * 64, "pt2", contract, 1, 4, padding=Padding("length"))
    table = replace(
        profile({1: 2.0}), points=profile({1: 2.0}).points + profile({1: 1.5}, threads=2).points
    )
    found = StageFacts.of(StageSpec(3, info, max_rows=8, profile=table.to_dict()), 2)
    assert (found.block, found.max_rows, found.threads) == ("encoder", 8, 2)
    assert found.length_dims == (0,) and found.lengths == (1, 512) and found.pads
    assert found.profile == profile({1: 1.5}, threads=2), "no more than set-policy brings"
    found = StageFacts.of(StageSpec(3, info, profile=table.to_dict()), 3)
    assert found.profile is None
    found = StageFacts.of(StageSpec(3, replace(info, padding=None)))
    assert found.length_dims == (0,) and not found.pads
    few = TensorSpec("float32", ("rows", 4), {"rows": (1, 63)})
    fixed = Contract(few, TensorSpec("float32", ("rows", 4)))
    info = BlockInfo("fixed", "1", "0" * 64, "pt2", fixed, 1, 4)
    found = StageFacts.of(StageSpec(3, info))
    assert found.length_dims == () and not found.pads and found.profile is None
    assert found.exported_rows == 63
    picture = TensorSpec("float32", ("rows", "height", 3, "width"), {"width": (4, 64)})
    info = BlockInfo("wide", "1", "0" * 64, "pt2", Contract(picture, picture), 1, 4)
    wide = StageFacts.of(StageSpec(3, replace(info, padding=Padding("width", -1))))
    assert wide.length_dims == (2,) and wide.lengths == (4, 64), "not the first one"
    pixels = TensorSpec("float32", ("rows", "height*width"), {})
    sides = TensorSpec("float32", ("rows", "height", "width"), {"height": (1, 9), "width": (1, 9)})
    info = BlockInfo("flat", "1", "0" * 64, "pt2", Contract(sides, pixels), 1, 4)
    assert StageFacts.of(StageSpec(3, info)).carries == LENGTH, "one dim alone does not tell"
    with pytest.raises(ValueError, match="not a profile"):
        StageFacts.of(StageSpec(3, info, profile={"points": []}))
