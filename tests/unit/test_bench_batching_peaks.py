"""Peaks and disturbed visits: what holds, what a search believes, what is measured again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from batching_rig import cell, searched
from rich.progress import Progress

from blockflow.bench.batching import figures as f
from blockflow.bench.batching.peaks import Search, peak_figures, search_peaks, within
from blockflow.bench.batching.plan import DELAYBATCH, DVABATCH, LOAD, TINY, ZEROBATCH
from blockflow.bench.batching.rig import Further, Rig
from blockflow.bench.batching.steady import Steady, Tally, disturbance
from blockflow.bench.batching.traffic import Cell
from blockflow.bench.statistics import Interval

# --- what holds -----------------------------------------------------------------------------------


def test_a_probe_holds_if_all_is_answered_in_time_and_nothing_piles_up() -> None:
    good = cell(10.0, 50.0)
    assert within(good, 50.0)
    assert not within(good, 49.0)
    assert not within(cell(10.0, failed=("OVERLOADED",)), 50.0)
    assert not within(cell(), 50.0)
    # All of it in time, but the later half is not, or would not be for long.
    assert not within(replace(cell(*[1.0] * 200, 60.0), later_ms=(1.0, 60.0)), 50.0)
    assert not within(replace(good, growth=0.2), 50.0)


@pytest.mark.parametrize("start", [20.0, 100.0, 400.0])
def test_a_search_brackets_the_peak_and_probes_both_ends_twice(start: float) -> None:
    search = searched(100.0, start, 12)
    assert search.found is not None
    assert search.found.low <= 100.0 <= search.found.high
    assert search.found.high / search.found.low < 1.05
    assert search.confirmed
    assert search.found.n == search.made <= 13


def test_a_rate_whose_probes_disagree_is_decided_by_a_third() -> None:
    search = Search(100.0, 2)
    told(search, True)  # at 100
    assert search.rate > 100.0
    told(search, False)
    assert search.rate == 100.0  # confirmed before it is believed
    told(search, False)
    assert search.rate == 100.0
    told(search, False)
    assert search.fails == 100.0
    assert search.found is None  # once of three is not enough
    assert search.rate < 100.0
    told(search, True, True, True, True)
    assert search.found is not None
    assert search.found.value < search.found.high == 100.0


def test_a_search_whose_only_rate_turns_out_too_high_goes_on_below() -> None:
    """Seen: the last of all probes said so, and the arm was told to have kept the bound in none."""
    search = Search(100.0, 5, confirming=2)
    while not search.done:
        search.tell(search.rate < 90.0 or search.made == 0)
    assert search.made > 7
    assert search.confirmed
    assert search.found is not None
    assert search.found.value < 90.0 < search.found.high <= 100.0


@pytest.mark.parametrize("lie", range(8))
@pytest.mark.parametrize("start", [70.0, 95.0, 130.0])
def test_one_disturbed_probe_neither_makes_a_peak_nor_caps_it(start: float, lie: int) -> None:
    """Whatever it was that was probed in that moment. Up to a half above, a probe that is too fast
    may hold by chance; far above none does."""
    search = Search(start, 5)
    while not search.done:
        holds = search.rate <= 100.0
        chance = search.made == lie and search.rate < 150.0
        search.tell(holds is not chance)
    assert search.confirmed
    assert search.found is not None
    assert search.found.low <= 100.0 <= search.found.high
    assert search.found.high / search.found.low < 1.31


def test_nothing_is_concluded_from_a_peak_that_is_not_confirmed() -> None:
    search = Search(100.0, 1, confirming=0)
    told(search, True)
    assert search.done
    (peak, why) = peak_figures(LOAD, {ZEROBATCH: search}, 300.0, [])
    assert peak.labels["confirmed"] is False
    assert "nothing is concluded" in why.mode
    both = {ZEROBATCH: searched(50.0, 40.0, 8), DVABATCH: search}
    found = peak_figures(LOAD, both, 300.0, [ZEROBATCH], {DVABATCH: 1.0})
    (ratio,) = [g for g in found if g.name == f.PEAK_RATIO]
    assert ratio.low is not None and ratio.low > 1.5
    assert ratio.labels["verdict"] == "within noise"


def test_an_arm_that_never_keeps_the_bound_has_missed_its_aim() -> None:
    searches = {ZEROBATCH: searched(50.0, 40.0, 8), DVABATCH: searched(0.0, 40.0, 8)}
    found = peak_figures(LOAD, searches, 300.0, [ZEROBATCH], {DVABATCH: 1.0})
    (ratio,) = [g for g in found if g.name == f.PEAK_RATIO]
    assert (ratio.value, ratio.labels["verdict"]) == (0.0, "missed")
    assert any(g.name == f.NOTE and g.mode.startswith(DVABATCH) for g in found)
    assert not [g for g in found if g.name == f.PEAK and g.mode == DVABATCH]
    share = searches[DVABATCH].beside(Interval(100.0, 90.0, 110.0, 5))
    assert (share.value, share.low) == (0.0, 0.0)
    assert share.high < 0.9


def test_nor_from_one_that_held_and_failed_again_wherever_it_was_probed() -> None:
    search = Search(100.0, 1)
    while not search.done:
        search.tell(search.made == 0)
    assert search.found is None
    assert search.held
    assert not search.sure
    searches = {ZEROBATCH: searched(50.0, 40.0, 8), DVABATCH: search}
    found = peak_figures(LOAD, searches, 300.0, [ZEROBATCH], {DVABATCH: 1.0})
    (ratio,) = [g for g in found if g.name == f.PEAK_RATIO]
    assert ratio.labels["verdict"] == "within noise"
    (why,) = [g for g in found if g.name == f.NOTE and g.mode.startswith(DVABATCH)]
    assert "nothing is concluded" in why.mode


def told(search: Search, *held: bool) -> None:
    for one in held:
        search.tell(one)


def test_peaks_are_beside_the_bases_and_judged() -> None:
    searches = {
        ZEROBATCH: searched(50.0, 40.0, 8),
        DVABATCH: searched(100.0, 40.0, 8),
        DELAYBATCH: searched(0.0, 40.0, 8),
    }
    figures = peak_figures(LOAD, searches, 300.0, [ZEROBATCH, DELAYBATCH], {DVABATCH: 1.0})
    found = {(g.name, g.mode): g for g in figures}
    ratio = found[f.PEAK_RATIO, DVABATCH]
    assert ratio.value == pytest.approx(2.0, rel=0.1)
    assert (ratio.labels["base"], ratio.labels["verdict"]) == (ZEROBATCH, "met")
    worse = peak_figures(
        LOAD,
        {ZEROBATCH: searches[DVABATCH], DVABATCH: searches[ZEROBATCH]},
        300.0,
        [ZEROBATCH],
        {DVABATCH: 1.0},
    )
    assert [g.labels["verdict"] for g in worse if g.name == f.PEAK_RATIO] == ["missed"]
    assert (f.PEAK, DELAYBATCH) not in found  # nothing held, and that is said
    assert any(name == f.NOTE and mode.startswith(DELAYBATCH) for name, mode in found)


def test_searches_end_one_by_one_each_probe_with_a_seed_of_its_own() -> None:
    seeds: dict[str, list[int]] = {"a": [], "b": []}
    limits = {"a": 100.0, "b": 0.0}

    def probe(arm: str, rate: float, seed: int) -> Cell:
        seeds[arm].append(seed)
        return cell(1.0 if rate <= limits[arm] else 1e3)

    searches = {arm: Search(80.0, 3, confirming=3) for arm in limits}
    search_peaks(rig(), "x", {"a": {}, "b": {}}, searches, probe, 50.0)
    assert searches["a"].confirmed
    assert len(seeds["a"]) == 5  # three, and one for each end
    assert len(seeds["b"]) == 6  # nothing to be found
    assert all(len(set(mine)) == len(mine) for mine in seeds.values())


# --- rounds ---------------------------------------------------------------------------------------


class NoSystem:
    """Takes what it is told."""

    def apply(self, _topology: Any) -> None:
        pass


def rig(steady: Steady | None = None) -> Rig:
    system: Any = NoSystem()
    client: Any = None
    calm = steady or Steady(0, work=lambda: 1.0)
    return Rig(Path("blocks"), system, client, Progress(disable=True), calm)


@pytest.mark.parametrize(
    ("decided_at", "seconds", "rounds"), [(2, 60.0, 3), (5, 60.0, 5), (99, 60.0, 9), (99, 0.0, 3)]
)
def test_what_is_undecided_is_visited_again_within_its_time(
    decided_at: int, seconds: float, rounds: int
) -> None:
    further = Further(9, seconds, lambda found: len(found["a"]) >= decided_at)
    found = rig().take_turns("x", {"a": {}, "b": {}}, 3, lambda _arm, turn: turn, further)
    assert found == {"a": list(range(rounds)), "b": list(range(rounds))}


def test_further_rounds_end_with_their_seconds() -> None:
    never: Callable[[Any], bool] = lambda _: False  # noqa: E731
    further = Further(9, 10.0, never)
    assert further.wanted(8, 9.9, {})
    assert not further.wanted(8, 10.0, {})
    assert not further.wanted(9, 0.0, {})
    allowed = Further.of(replace(TINY, stretch=3, spare_seconds=7.0), 5, never)
    assert (allowed.most, allowed.seconds) == (15, 7.0)


# --- disturbed visits -----------------------------------------------------------------------------


def steadily(times: Sequence[float], patience: int) -> tuple[Steady, list[float]]:
    """Fixed work that takes these times, and the pauses that are made."""
    left, pauses = iter(times), list[float]()
    return Steady(patience, work=lambda: next(left), pause=pauses.append), pauses


def test_a_disturbed_visit_is_repeated_and_that_is_counted() -> None:
    #               first    | disturbed  | repeated
    work = [1.0, 1.0, 1.0, 1.8, 1.0, 1.01]
    steady, pauses = steadily(work, 2)
    values = iter(["first", "disturbed", "repeated"])
    assert steady.visit(lambda: next(values), "a") == "first"
    assert steady.visit(lambda: next(values), "b") == "repeated"
    tally = steady.take()
    assert (tally.visits, tally.discarded, tally.kept) == (
        2,
        ["b: fixed work 1.80 times as long"],
        [],
    )
    assert len(pauses) == 1
    by = {g.mode: g for g in tally.figures(LOAD) if g.name == f.DISTURBED}
    assert (by["discarded"].value, by["kept"].value, by["kept"].n) == (1.0, 0.0, 2)
    assert "1 more were discarded" in tally.figures(LOAD)[-1].mode
    assert steady.take() == Tally()


def test_patience_ends_and_the_visit_counts_but_not_silently() -> None:
    steady, _ = steadily([1.0, 1.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0], 2)
    steady.visit(lambda: None, "calm")
    steady.visit(lambda: None, "busy")
    tally = steady.take()
    assert (len(tally.discarded), len(tally.kept), tally.visits) == (2, 1, 2)


def test_a_machine_that_became_slower_for_good_is_not_measured_thrice() -> None:
    steady, _ = steadily([1.0] * 30 + [1.5] * 500, 2)
    for i in range(15):
        steady.visit(lambda: None, str(i))
    assert steady.take().discarded == []
    for i in range(40):
        steady.visit(lambda: None, str(i))
    assert len(steady.take().discarded) <= 3 + 40 / 4


def test_a_sender_that_was_late_disturbs_its_visit() -> None:
    late = replace(cell(1.0), lag_ms=427.0)
    assert "427" in disturbance(1.0, late.lag_ms)
    assert disturbance(1.0, 20.0) == disturbance(1.2, 0.0) == ""
    visits = iter([late, cell(2.0)])
    steady, _ = steadily([1.0] * 4, 1)
    assert steady.visit(lambda: next(visits), "a").times_ms == (2.0,)
    assert steady.take().discarded == ["a: sender 427 ms late"]
