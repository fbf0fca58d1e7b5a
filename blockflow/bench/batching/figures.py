"""The batching benchmark's figures: what they are called, and how they follow from visits. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from scipy.special import stdtrit

from blockflow.bench.batching.plan import (
    BATCHSIZE,
    DELAYBATCH,
    SERIAL,
    ZEROBATCH,
)
from blockflow.bench.batching.traffic import Cell
from blockflow.bench.results import (
    LESS_IS_BETTER,
    MORE_IS_BETTER,
    Figure,
    interval_figure,
    latency_figure,
)
from blockflow.bench.statistics import (
    LEVEL,
    MIN_PAIRS,
    Interval,
    Verdict,
    judge,
    judge_value,
    percentile,
    ratio_interval,
)

TIME = "mean time"
RATE = "throughput"
OVER = "over the bound"
TIME_RATIO, TAIL_RATIO, RATE_RATIO = "time ratio", "p99 ratio", "throughput ratio"
CAPACITY = "capacity"
SIMULATED = "simulated mean time"
PEAK, PEAK_RATIO = "peak within the bound", "peak ratio"
TEST, TEST_RATIO = "time of a test", "test time ratio"
SATURATED, OF_BOUND = "saturated throughput", "saturated, of the bound"
PEAK_OF_BOUND = "peak, of the bound"
CLOSED, CLOSED_RATIO = "closed-loop throughput", "closed-loop throughput ratio"
CANDIDATE = "delay tried"
SERVED = "served to profiled"
DISTURBED = "disturbed visits"
SATURATED_RATIO = "saturated ratio"
_MORE_IS_BETTER = frozenset(
    {RATE_RATIO, PEAK_RATIO, OF_BOUND, PEAK_OF_BOUND, CLOSED_RATIO, SATURATED_RATIO}
)
"""Among the ratios."""
MEMORY, MEMORY_RATIO = "memory", "PSS, of the full models'"
ALONE_RATIO = "time alone to none"
SIMULATED_TAIL, SIMULATED_OVER = "simulated p99", "simulated over the bound"
SIMULATED_PEAK = "simulated peak"
BEST, POSSIBLE = "best policy", "no policy"
"""What the best policy of ``optimum.py`` reaches, and what none can be faster than."""
ROW, SPLIT, TEST_POSSIBLE = "time of a row", "whole to halves", "least time of a test"
NOTE = "note"

Paper = Mapping[tuple[str, str, str], float]
"""(name of the ratio, load, base) -> the paper's change, -0.26 for 26% less."""

LBCI_PAPER: Paper = {
    (TIME_RATIO, "1", SERIAL): -0.2612,
    (TIME_RATIO, "2", BATCHSIZE): -0.5243,
    (TIME_RATIO, "3", BATCHSIZE): -0.1943,
    (RATE_RATIO, "1", SERIAL): 0.203,
    (RATE_RATIO, "2", BATCHSIZE): 0.1696,
    (RATE_RATIO, "3", BATCHSIZE): 0.0956,
    (TEST_RATIO, "small", SERIAL): -0.2276,
    (TEST_RATIO, "medium", SERIAL): -0.1008,
    (TEST_RATIO, "big", SERIAL): -0.0432,
}
LBCI_PAPER_CLOSED: Mapping[str, float] = {SERIAL: 0.203, BATCHSIZE: 0.1696}
"""Its largest gains in throughput over each of the two, at whatever load."""

LBCI_PAPER_OVER = ("3", 11.67)
"""A load, and per cent of the batches over the bound there."""

DVABATCH_PAPER: Paper = {
    (TIME_RATIO, "low", ZEROBATCH): -0.161,
    (TIME_RATIO, "medium", ZEROBATCH): -0.390,
    (TIME_RATIO, "high", ZEROBATCH): -0.577,
    (TIME_RATIO, "low", DELAYBATCH): -0.354,
    (TIME_RATIO, "medium", DELAYBATCH): -0.473,
    (TIME_RATIO, "high", DELAYBATCH): -0.485,
    (TAIL_RATIO, "low", ZEROBATCH): -0.169,
    (TAIL_RATIO, "medium", ZEROBATCH): -0.274,
    (TAIL_RATIO, "high", ZEROBATCH): -0.537,
    (TAIL_RATIO, "low", DELAYBATCH): -0.452,
    (TAIL_RATIO, "medium", DELAYBATCH): -0.451,
    (TAIL_RATIO, "high", DELAYBATCH): -0.292,
}
"""Means over all of the paper's models, on a GPU: shown beside ours, no aim of any one model."""

DVABATCH_PAPER_PEAK = 2.12
"""Its largest gain in peak throughput, with diverse inputs."""

CLOSE = 0.02
"""A ratio whose interval reaches no farther to either side: nobody would wait for more."""
_AIMED = frozenset({TIME_RATIO, TEST_RATIO, CLOSED_RATIO, OF_BOUND, ALONE_RATIO})
"""What is measured until it is decided."""
_INTERIM = 0.001
"""How often a look before the last one may be wrong."""
_Z = 1.96
"""Standard errors on either side that make an interval of 95%."""

Labels = Mapping[str, Any]


def time_figures(arm: str, cells: Sequence[Cell], labels: Labels) -> list[Figure]:
    """One arm at one load: mean time of all queries, throughput, share over the bound.

    The intervals are those over the visits.
    """
    times = [t for c in cells for t in c.times_ms]
    queries = sum(c.offered for c in cells)
    over = share_over(cells)
    failed = sorted({code for c in cells for code in c.failed})
    more = {**labels, **({"failed": ", ".join(failed)} if failed else {})}
    told = {**more, "visits": over.n, **LESS_IS_BETTER}
    out = [
        interval_figure(RATE, arm, None, [c.rows_per_s for c in cells], "1/s", more),
        interval_figure(OVER, arm, None, replace(over, n=queries), "%", told),
    ]
    if times:
        some = [c.times_ms for c in cells if c.times_ms]
        mean = pooled([sum(each) for each in some], [len(each) for each in some])
        told = {**more, "lag_ms": round(max(c.lag_ms for c in cells), 3)}
        every = latency_figure(TIME, arm, None, times, told)
        out.append(replace(every, value=mean.value, low=mean.low, high=mean.high))
    return out


def share_over(cells: Sequence[Cell]) -> Interval:
    """Per cent of all queries that were over the bound."""
    found = pooled([c.over * c.offered for c in cells], [c.offered for c in cells])
    low, high = max(0.0, found.low), min(1.0, found.high)
    return Interval(100 * found.value, 100 * low, 100 * high, found.n)


def pooled(parts: Sequence[float], wholes: Sequence[float]) -> Interval:
    """The sum of ``parts`` to that of ``wholes``, a number of each per visit.

    Queries of one visit share its queue, so only visits are repeats: the interval is that of the
    ratio estimator (Cochran, "Sampling Techniques", 1977, section 6.4) with Student's factor; of a
    few their extremes.
    """
    x, y = np.asarray(wholes, dtype=np.float64), np.asarray(parts, dtype=np.float64)
    value, n = float(y.sum() / x.sum()), len(x)
    if n < MIN_PAIRS:
        each = [value, *(y / x).tolist()]
        return Interval(value, min(each), max(each), n)
    error = float(np.sqrt(((y - value * x) ** 2).sum() / (n - 1) / n) / x.mean())
    reach = float(stdtrit(n - 1, (1 + LEVEL) / 2)) * error
    return Interval(value, value - reach, value + reach, n)


def over_aim(figure: Figure, most: float) -> Figure:
    """A share over the bound beside the most that it may be, in per cent."""
    n = figure.labels["visits"]
    low, high = figure.low, figure.high
    if low is None or high is None:
        raise ValueError("a share without an interval cannot be judged")
    verdict = judge(Interval(figure.value, low, high, n), most)
    more = {"goal": most, "at_least": False, "verdict": verdict.value}
    return replace(figure, labels={**figure.labels, **more})


def failures(arm: str, cells: Sequence[Cell]) -> str:
    """Which errors an arm's visits had, for the tables' readers; "" where all was answered."""
    failed = sorted({code for c in cells for code in c.failed})
    lost = sum(c.offered - len(c.times_ms) for c in cells)
    if not failed:
        return ""
    return f"{lost} of {arm}'s {sum(c.offered for c in cells)} queries failed: {', '.join(failed)}"


def against(
    arm: str,
    cells: Sequence[Cell],
    base: str,
    others: Sequence[Cell],
    labels: Labels,
    paper: Paper,
    goals: Paper | None,
    *,
    tail: bool = False,
) -> list[Figure]:
    """``arm`` beside ``base`` at one load, visit by visit: mean time, 99th percentile, throughput.

    The aim for the time is that of ``goals``, else to be no slower; without ``goals`` there is
    none. With ``tail`` the 99th percentile has the same aim. Throughput has none: queries come
    however fast they are answered, so it says how far the base keeps up. ``possible`` is what a
    policy that answers all that comes would have.

    Visits of which either side answered nothing are left out. Whoever loses queries is faster with
    the others: an arm that has lost any has missed its aims, and beside a base that has the most
    that can be said is that they are met.
    """
    pairs = [(o, c) for o, c in zip(others, cells, strict=True) if o.times_ms and c.times_ms]
    if not pairs:
        return []
    values = {
        TIME_RATIO: [(o.mean_ms, c.mean_ms) for o, c in pairs],
        TAIL_RATIO: [(percentile(o.times_ms, 99), percentile(c.times_ms, 99)) for o, c in pairs],
        RATE_RATIO: [(o.rows_per_s, c.rows_per_s) for o, c in pairs],
    }
    lost = {side: any(c.failed for c in those) for side, those in ((arm, cells), (base, others))}
    out = []
    for name, both in values.items():
        found = ratio_interval([b for b, _ in both], [a for _, a in both])
        goal = None
        if goals is not None and (name == TIME_RATIO or (tail and name == TAIL_RATIO)):
            goal = 1 + goals.get((name, labels["load"], base), 0.0)
        more = dict(labels)
        if name == RATE_RATIO and all(o.due_per_s for o, _ in pairs):
            kept_up = ratio_interval([b for b, _ in both], [o.due_per_s for o, _ in pairs])
            more["possible"] = round(kept_up.value, 4)
        figure = ratio_figure(name, arm, base, found, more, paper, goal)
        out.append(_with_losses(figure, ours=lost[arm], theirs=lost[base]))
    return out


def _with_losses(figure: Figure, *, ours: bool, theirs: bool) -> Figure:
    """The same, judged by what either side has lost."""
    verdict = figure.labels.get("verdict")
    if verdict is None or not (ours or theirs):
        return figure
    if ours:
        verdict = Verdict.MISSED.value
    elif verdict == Verdict.MISSED:
        verdict = Verdict.NOISE.value
    return replace(figure, labels={**figure.labels, "verdict": verdict, "failed": True})


def decided(found: Sequence[Figure]) -> bool:
    """Whether more visits would tell nothing: each aim for the time is met or missed, so clearly
    that looking after every visit does not make it so, or it is within the noise and its ratio is
    known within two per cent on either side. The latter concludes nothing, so it may be by chance.
    """
    return all(_settled(f) for f in found if f.name in _AIMED and "verdict" in f.labels)


def _settled(figure: Figure) -> bool:
    labels = figure.labels
    if labels["verdict"] == Verdict.NOISE:
        return width_of(figure) <= CLOSE
    if labels.get("failed") and labels["verdict"] == Verdict.MISSED:
        return True  # what was lost stays lost
    noise, at_least = labels.get("noise", 0.0), labels["at_least"]
    sure = interim(figure.interval)
    return judge(sure, labels["goal"], noise, at_least=at_least) == labels["verdict"]


def interim(found: Interval) -> Interval:
    """What a decision before the last visit has to rest on.

    Of two equal things a 95% interval that is looked at ten times shows a difference three times
    as often as one that is looked at once. So only the last look has it; all before have one of
    99.9% (Haybittle 1971, Peto et al., "Design and analysis of randomized clinical trials requiring
    prolonged observation of each patient", British Journal of Cancer 34, 1976), and what is
    concluded in the end is wrong hardly more often than if nobody had looked. From the median to
    the farther bound is taken for 1.96 standard errors, of which Student's distribution says how
    many are needed: what is clear from the beginning needs few visits. Where all values lie at
    either of two places on both sides of the goal, this is still too often sure.
    """
    errors = max(found.value - found.low, found.high - found.value) / _Z
    reach = float(stdtrit(found.n - 1, 1 - _INTERIM / 2)) * errors if found.n > 1 else float("inf")
    return Interval(found.value, found.value - reach, found.value + reach, found.n)


def width_of(figure: Figure) -> float:
    """Half of a figure's interval as a share of its value; extremes of a few samples are none."""
    if figure.low is None or figure.high is None or figure.n < MIN_PAIRS:
        return float("inf")
    return Interval(figure.value, figure.low, figure.high, figure.n).relative_width


def ratio_figure(
    name: str,
    arm: str,
    base: str,
    found: Interval,
    labels: Labels,
    paper: Paper | None = None,
    goal: float | None = None,
    *,
    at_least: bool = False,
    noise: float = 0.0,
    sure: bool = True,
) -> Figure:
    """A ratio with what the paper says of it, and the verdict where there is a goal.

    ``noise`` is how far two equal things look apart in this run: so near the goal nothing is told.
    Nor is it where something else makes the ratio not ``sure``.
    """
    more: dict[str, Any] = {**labels, "base": base}
    more |= MORE_IS_BETTER if name in _MORE_IS_BETTER else LESS_IS_BETTER
    told = (paper or {}).get((name, str(labels.get("load", "")), base))
    if told is not None:
        more["paper"] = round(1 + told, 4)
    if goal is not None:
        more["goal"] = round(goal, 4)
        more["at_least"] = at_least
        if name == MEMORY_RATIO:  # looked at once, of processes that stand still
            verdict = judge_value(found.value, goal, at_least=at_least)
        else:
            verdict = judge(found, goal, noise, at_least=at_least)
        more["verdict"] = (verdict if sure else Verdict.NOISE).value
    return interval_figure(name, arm, None, found, "x", more)


def note(experiment: str, text: str) -> Figure:
    """Something a reader must know, beside the tables."""
    return Figure.of(NOTE, text, 0.0, "1", 0, {"experiment": experiment})


def load_verdicts(
    found: Sequence[Figure],
    experiment: str,
    arm: str,
    bases: Collection[str] = (),
    name: str = TIME_RATIO,
) -> dict[str, Verdict]:
    """One verdict per load: met if every aim is, missed if any is, or if the arm answered nothing.

    Args:
        found: all figures.
        experiment, arm: whose.
        bases: beside whom; none: beside all.
    """
    by: dict[str, list[str]] = {}
    here = [f for f in found if f.labels.get("experiment") == experiment]
    mine = [f for f in here if f.mode == arm]
    for f in mine:
        if f.name == name and "verdict" in f.labels and (not bases or f.labels["base"] in bases):
            by.setdefault(f.labels["load"], []).append(f.labels["verdict"])
    if not bases or any(f.mode in bases for f in here):
        answered = {f.labels["load"] for f in mine if f.name == TIME}
        silent = {f.labels["load"] for f in mine if f.name == OVER} - answered
        by |= {load: [Verdict.MISSED] for load in silent}
    return {load: together(verdicts) for load, verdicts in by.items()}


def together(verdicts: Sequence[str]) -> Verdict:
    """Of several aims: missed if any is, met if all are."""
    if Verdict.MISSED in verdicts:
        return Verdict.MISSED
    return Verdict.MET if all(v == Verdict.MET for v in verdicts) else Verdict.NOISE


def enough(verdicts: Collection[str], wanted: int) -> Verdict:
    """Whether so many are met; what cannot be told may still be either."""
    met = sum(v == Verdict.MET for v in verdicts)
    if met >= wanted:
        return Verdict.MET
    missed = sum(v == Verdict.MISSED for v in verdicts)
    return Verdict.MISSED if len(verdicts) - missed < wanted else Verdict.NOISE
