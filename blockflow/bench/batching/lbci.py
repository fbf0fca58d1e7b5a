"""LBCI's experiment: AlexNet as a chain in one worker, beside serial and static batches.

Single-sample requests at four loads, and tests of multi-sample requests (section 4.2 of the paper).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from statistics import fmean
from typing import Any

from blockflow.bench.batching.figures import (
    CLOSED,
    CLOSED_RATIO,
    LBCI_PAPER,
    LBCI_PAPER_CLOSED,
    LBCI_PAPER_OVER,
    OVER,
    SIMULATED_OVER,
    TEST,
    TEST_RATIO,
    decided,
    note,
    over_aim,
    ratio_figure,
)
from blockflow.bench.batching.ladder import Ladder, Rivalry
from blockflow.bench.batching.plan import (
    BATCHSIZE,
    GAP_ROWS,
    LBCI_ARM,
    LBCI_LOADS,
    SERIAL,
    SIZES,
    STATIC,
    T_OPT_ROWS,
)
from blockflow.bench.batching.predict import simulated, stretched
from blockflow.bench.batching.rig import TASK, Further, Policy
from blockflow.bench.batching.traffic import replay, saturate
from blockflow.bench.results import Figure, interval_figure, latency_figure
from blockflow.bench.simulation.arrivals import Arrival
from blockflow.bench.statistics import ratio_interval
from blockflow.client.collector import OK
from blockflow.core import limits
from blockflow.core.errors import make_error

REQUESTS = 10
"""Of a multi-sample test."""
STRETCHED = "LBCI, times as served"
_TOLD = 1.0
"""Per cent over the bound that need a reason."""
_PARTS = ("wait_ms", "compute_ms")


def policies(t_opt_ms: float) -> dict[str, Policy]:
    """The three arms. The static batch is a window that nothing but ten rows closes."""
    return {
        SERIAL: {"policy": "none"},
        BATCHSIZE: {
            "policy": "window",
            "max_rows": STATIC,
            "max_delay_ms": limits.MAX_DEADLINE_MS,
        },
        LBCI_ARM: {"policy": "lbci", "t_opt_ms": t_opt_ms},
    }


def measure(ladder: Ladder) -> list[Figure]:
    """Both kinds of requests, and a closed loop."""
    t_opt_ms = T_OPT_ROWS * ladder.alone_ms
    arms = policies(t_opt_ms)
    window = {"policy": "window", "max_rows": ladder.batch}
    found = ladder.measure_capacity(arms[SERIAL], window)
    rivalry = Rivalry(LBCI_ARM, (SERIAL, BATCHSIZE), LBCI_PAPER, LBCI_PAPER)
    load, most = LBCI_PAPER_OVER
    climbed = [
        over_aim(g, most) if (g.name, g.mode, g.labels.get("load")) == (OVER, LBCI_ARM, load) else g
        for g in ladder.climb(arms, LBCI_LOADS, t_opt_ms, STATIC, rivalry)
    ]
    found += climbed
    found += _over(ladder, climbed, arms[LBCI_ARM], t_opt_ms)
    text = (
        f"t_opt is {t_opt_ms:.0f} ms, {T_OPT_ROWS} times one sample's {ladder.alone_ms:.1f}; "
        f"serial capacity {ladder.serial:.1f}/s, in batches of {ladder.batch} "
        f"{ladder.batched:.1f}/s; above its capacity serial's queue grows for as long as a "
        "visit lasts"
    )
    found.append(note(ladder.experiment, text))
    found += _closed_loop(ladder, arms)
    return found + _multi_sample(ladder, {a: arms[a] for a in (SERIAL, LBCI_ARM)})


def _over(
    ladder: Ladder, climbed: Sequence[Figure], policy: Policy, t_opt_ms: float
) -> list[Figure]:
    """Why queries are over the bound: what the simulator says with profiled times, and with times
    as long as they are in the running system."""
    measured = {
        (g.name, g.labels["load"]): g
        for g in climbed
        if g.mode == LBCI_ARM and g.name in (OVER, SIMULATED_OVER)
    }
    out: list[Figure] = []
    slower = stretched(ladder.profiles, ladder.stretch)
    stretch = [round(ladder.stretch(rows), 2) for rows in (1, ladder.batch)]
    for load, share in LBCI_LOADS.items():
        rate = share * ladder.batched
        visits = range(ladder.plan.repeats)
        runs = [
            simulated(
                slower, policy, ladder.queries(rate, i + 1, STATIC), ladder.max_rows, i, t_opt_ms
            )
            for i in visits
        ]
        over = 100 * fmean(r.over for r in runs)
        labels = {**ladder.labels(load, rate), "stretch": stretch}
        out.append(Figure.of(SIMULATED_OVER, STRETCHED, over, "%", len(runs), labels))
        if measured[OVER, load].value < _TOLD and load != LBCI_PAPER_OVER[0]:
            continue
        wait, compute = (fmean(getattr(r.times, of) for r in runs) for of in _PARTS)
        text = (
            f"at load {load} {measured[OVER, load].value:.1f}% of LBCI's queries took longer than "
            f"t_opt, waiting included; simulated with the profiled times "
            f"{measured[SIMULATED_OVER, load].value:.1f}%, with times as served ({stretch[0]} "
            f"times as long for a row, {stretch[1]} for {ladder.batch}) {over:.1f}%: there one "
            f"waits {wait:.0f} ms and computes {compute:.0f} on average, and LBCI bounds a batch "
            "and those that join it, not the wait before it begins"
        )
        if load == LBCI_PAPER_OVER[0]:
            text += f"; the paper has {LBCI_PAPER_OVER[1]}% of its batches"
        out.append(note(ladder.experiment, text))
    return out


def _closed_loop(ladder: Ladder, arms: Mapping[str, Policy]) -> list[Figure]:
    """Rows per second with always the same number under way: what each can serve. In the open loop
    an arm answers what is offered, and none can answer more."""
    plan, under_way = ladder.plan, 2 * ladder.batch
    queries = ladder.queries(1.0, 0, 2 * ladder.batch)

    def visit(_arm: str, _turn: int) -> float:
        client, inputs = ladder.rig.client, ladder.inputs
        return saturate(client, queries, inputs, under_way, plan.seconds, STATIC)

    labels = {"experiment": ladder.experiment, "load": "closed loop", "under_way": under_way}

    def ratios(rates: Mapping[str, list[float]]) -> list[Figure]:
        return [
            ratio_figure(
                CLOSED_RATIO,
                LBCI_ARM,
                base,
                ratio_interval(rates[base], rates[LBCI_ARM]),
                labels,
                {(CLOSED_RATIO, "closed loop", base): gain},
                1 + gain,
                at_least=True,
            )
            for base, gain in LBCI_PAPER_CLOSED.items()
        ]

    rates = ladder.rig.take_turns(
        f"{ladder.experiment}: closed loop",
        {arm: ladder.topology(policy) for arm, policy in arms.items()},
        plan.repeats,
        visit,
        Further.of(plan, plan.repeats, lambda found: decided(ratios(found))),
    )
    each = [
        interval_figure(CLOSED, arm, None, values, "1/s", labels) for arm, values in rates.items()
    ]
    return each + ratios(rates)


def _multi_sample(ladder: Ladder, arms: dict[str, Policy]) -> list[Figure]:
    """Ten requests at even gaps; the time until the last is answered."""
    topologies = {arm: ladder.topology(policy) for arm, policy in arms.items()}
    gap_ns = round(GAP_ROWS * ladder.alone_ms * 1e6)
    plan = ladder.plan
    out: list[Figure] = []
    for size, largest in SIZES.items():
        rng = Random(f"{size}")
        tests = [
            [Arrival(i * gap_ns, TASK, rng.randint(1, largest), None) for i in range(REQUESTS)]
            for _ in range(plan.stretch * plan.tests)
        ]

        def visit(_arm: str, turn: int, tests: list[list[Arrival]] = tests) -> float:
            records = replay(ladder.rig.client, tests[turn], ladder.inputs)
            failed = sorted({r.outcome for r in records} - {OK})
            if failed:
                raise make_error(failed[0], "a multi-sample request failed", where="LBCI")
            return max(r.done_ms for r in records)

        labels = {"experiment": ladder.experiment, "load": size, "largest": largest}
        goal = 1 + LBCI_PAPER[TEST_RATIO, size, SERIAL]

        def ratio(
            found: Mapping[str, list[float]],
            labels: Mapping[str, Any] = labels,
            goal: float = goal,
        ) -> Figure:
            pairs = ratio_interval(found[SERIAL], found[LBCI_ARM])
            return ratio_figure(TEST_RATIO, LBCI_ARM, SERIAL, pairs, labels, LBCI_PAPER, goal)

        what = f"{ladder.experiment}: {size} requests"
        further = Further.of(plan, plan.tests, lambda found: decided([ratio(found)]))
        found = ladder.rig.take_turns(what, topologies, plan.tests, visit, further)
        out += [latency_figure(TEST, arm, None, found[arm], labels) for arm in arms]
        out.append(ratio(found))
    return out
