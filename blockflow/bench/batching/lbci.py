"""LBCI's experiment: AlexNet as a chain in one worker, beside serial and static batches.

Single-sample requests at four loads, and tests of multi-sample requests (section 4.2 of the paper).
"""

from __future__ import annotations

from random import Random

from blockflow.bench.batching.figures import (
    LBCI_PAPER,
    LBCI_PAPER_OVER,
    OVER,
    TEST,
    TEST_RATIO,
    against,
    note,
    ratio_figure,
)
from blockflow.bench.batching.ladder import Ladder
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
from blockflow.bench.batching.rig import TASK, Policy
from blockflow.bench.batching.traffic import replay
from blockflow.bench.results import Figure, latency_figure
from blockflow.bench.simulation.arrivals import Arrival
from blockflow.bench.statistics import ratio_interval
from blockflow.client.collector import OK
from blockflow.core import limits
from blockflow.core.errors import make_error

REQUESTS = 10
"""Of a multi-sample test."""


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
    """Both kinds of requests."""
    t_opt_ms = T_OPT_ROWS * ladder.alone_ms
    arms = policies(t_opt_ms)
    window = {"policy": "window", "max_rows": ladder.batch}
    found = ladder.measure_capacity(arms[SERIAL], window)
    figures, visits = ladder.climb(arms, LBCI_LOADS, t_opt_ms, STATIC)
    found += figures
    for load, share in LBCI_LOADS.items():
        labels = ladder.labels(load, share * ladder.batched)
        for base in (SERIAL, BATCHSIZE):
            pair = visits[load, LBCI_ARM], visits[load, base]
            found += against(LBCI_ARM, pair[0], base, pair[1], labels, LBCI_PAPER, LBCI_PAPER)
    over = next(
        g.value
        for g in figures
        if g.name == OVER and g.mode == LBCI_ARM and g.labels["load"] == LBCI_PAPER_OVER[0]
    )
    found.append(
        note(
            ladder.experiment,
            f"at load {LBCI_PAPER_OVER[0]} {over:.1f}% of LBCI's queries were over the bound, "
            f"waiting included; the paper has {LBCI_PAPER_OVER[1]}% of its batches",
        )
    )
    found.append(
        note(
            ladder.experiment,
            f"t_opt is {t_opt_ms:.0f} ms, {T_OPT_ROWS} times one sample's {ladder.alone_ms:.1f}; "
            f"serial capacity {ladder.serial:.1f}/s, in batches of {ladder.batch} "
            f"{ladder.batched:.1f}/s; above its capacity serial's queue grows for as long as a "
            "visit lasts",
        )
    )
    return found + _multi_sample(ladder, {a: arms[a] for a in (SERIAL, LBCI_ARM)})


def _multi_sample(ladder: Ladder, arms: dict[str, Policy]) -> list[Figure]:
    """Ten requests at even gaps; the time until the last is answered."""
    topologies = {arm: ladder.topology(policy) for arm, policy in arms.items()}
    gap_ns = round(GAP_ROWS * ladder.alone_ms * 1e6)
    out: list[Figure] = []
    for size, largest in SIZES.items():
        rng = Random(f"{size}")
        tests = [
            [Arrival(i * gap_ns, TASK, rng.randint(1, largest), None) for i in range(REQUESTS)]
            for _ in range(ladder.plan.tests)
        ]

        def visit(_arm: str, turn: int, tests: list[list[Arrival]] = tests) -> float:
            records = replay(ladder.rig.client, tests[turn], ladder.inputs)
            failed = sorted({r.outcome for r in records} - {OK})
            if failed:
                raise make_error(failed[0], "a multi-sample request failed", where="LBCI")
            return max(r.done_ms for r in records)

        what = f"{ladder.experiment}: {size} requests"
        found = ladder.rig.take_turns(what, topologies, ladder.plan.tests, visit)
        labels = {"experiment": ladder.experiment, "load": size, "largest": largest}
        out += [latency_figure(TEST, arm, None, found[arm], labels) for arm in arms]
        ratio = ratio_interval(found[SERIAL], found[LBCI_ARM])
        goal = 1 + LBCI_PAPER[TEST_RATIO, size, SERIAL]
        out.append(ratio_figure(TEST_RATIO, LBCI_ARM, SERIAL, ratio, labels, LBCI_PAPER, goal))
    return out
