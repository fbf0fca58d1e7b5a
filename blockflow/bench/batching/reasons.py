"""Reasons: why a policy gains here what it gains, in virtual time and from the measured profiles.

What does a row cost, by the batch it is in? What would the best policy there is
gain over ZeroBatch (``optimum.py``), and what can none gain (``oracle.py``)? Where would a split
pay? What becomes of the 99th percentile and of the peak, which joins can make worse? What do length
classes give, whatever the policy? By how much can a test of multi-sample requests get shorter, by
the gap between them, and what does LBCI's own bound keep from it? And the counter-experiment: the
same policy code with costs like those of the paper's device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random

from blockflow.bench.batching.diversity import policies
from blockflow.bench.batching.figures import (
    BEST,
    DVABATCH_PAPER,
    LBCI_PAPER,
    PEAK_RATIO,
    POSSIBLE,
    ROW,
    SIMULATED,
    SIMULATED_PEAK,
    SIMULATED_TAIL,
    SPLIT,
    TEST_POSSIBLE,
    TEST_RATIO,
    TIME_RATIO,
)
from blockflow.bench.batching.ladder import mean_alone_ms
from blockflow.bench.batching.lbci import REQUESTS
from blockflow.bench.batching.optimum import best_mean, zerobatch_mean
from blockflow.bench.batching.oracle import least_end, least_mean, lines_of, split_gain
from blockflow.bench.batching.plan import (
    BOUND_ROWS,
    DELAYBATCH,
    DELAYS,
    DVABATCH,
    DVABATCH_LOADS,
    GAP_ROWS,
    LARGEST,
    LBCI_ARM,
    LOOSE,
    REASONS,
    SERIAL,
    SIZES,
    T_OPT_ROWS,
    ZEROBATCH,
    Diversity,
    Plan,
)
from blockflow.bench.batching.predict import last_exit_ms
from blockflow.bench.batching.rig import TASK, Policy
from blockflow.bench.results import Figure
from blockflow.bench.simulation.arrivals import Arrival
from blockflow.bench.simulation.example import made_up
from blockflow.bench.simulation.experiment import Cell, Experiment, Runner
from blockflow.bench.simulation.system import chain
from blockflow.core import limits
from blockflow.core.profile import StageProfile

BOTH_LANES = "DVABatch, 2 lanes"
DEVICE, DEVICE_OPERATOR = "device", "device, operators"
DEVICE_ROWS = 64
_DEVICE_MS = 10.0
_FLAT_TO = 8
GAPS = (1.0, 2.0, GAP_ROWS, 5.0)
_CELL = Cell(0, 0, 1)
_TOO_MUCH = 1.5
"""Of the capacity: no peak lies above."""
_HALVINGS = 9

Step = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Case:
    """Blocks, and what is asked of them.

    Attributes:
        name: on every figure.
        batch: rows at most.
        arms: policy and lanes of each.
        lengths: of the queries, in text form; '' where blocks have fixed dims.
        measured: on this machine, not made up.
        delays: ms of further windows, by the arm's name: whether one of them raises the peak.
    """

    name: str
    profiles: Sequence[StageProfile]
    batch: int
    arms: Mapping[str, tuple[Policy, int]]
    lengths: str = ""
    measured: bool = True
    delays: Mapping[str, float] = field(default_factory=dict)

    @property
    def alone_ms(self) -> float:
        """A query's mean compute."""
        return mean_alone_ms(self.profiles, self.lengths)

    @property
    def capacity(self) -> float:
        """Queries per second in full batches; one by one where lengths differ, for there a full
        batch costs what its padding makes it cost."""
        if self.lengths:
            return 1e3 / self.alone_ms
        return 1e3 * self.batch / sum(p.ms(self.batch) for p in self.profiles)


def device(name: str, flat_to: Sequence[int]) -> list[StageProfile]:
    """Blocks of a made-up device whose batches take no longer than one row up to a size, and grow
    in proportion from there: what the paper says of its GPUs' operators."""
    each = _DEVICE_MS / len(flat_to)

    def ms(rows: int, most: int) -> float:
        return each * max(1.0, rows / most)

    return [
        made_up(f"{name}-{i + 1}", partial(ms, most=n), DEVICE_ROWS) for i, n in enumerate(flat_to)
    ]


def cases(measured: Mapping[str, Sequence[StageProfile]], plan: Plan) -> list[Case]:
    """The measured models (by experiment) and the made-up device.

    There the paper's ZeroBatch runs one batch at a time and DVABatch overlaps two, which a device
    that one batch does not fill computes side by side; both with one lane show the joins alone.
    """
    out = [
        _delayed(
            Case(
                name,
                profiles,
                plan.diversities[name].bs_max,
                _arms(plan.diversities[name]),
                plan.diversities[name].lengths,
            )
        )
        for name, profiles in measured.items()
    ]
    rows = DEVICE_ROWS
    for name, blocks, kinds in (
        (DEVICE, [_FLAT_TO] * 4, ["load"]),
        (DEVICE_OPERATOR, [2 * _FLAT_TO] * 2 + [_FLAT_TO // 4] * 2, ["load", "operator"]),
    ):
        mine = _dvabatch(rows, kinds)
        arms = {ZEROBATCH: (_window(rows), 1), DVABATCH: (mine, 1), BOTH_LANES: (mine, 2)}
        out.append(Case(name, device("device", blocks), rows, arms, measured=False))
    return out


def _arms(one: Diversity) -> dict[str, tuple[Policy, int]]:
    """ZeroBatch, as in the paper, and DVABatch; where lengths differ, ZeroBatch with the same
    classes and ``none`` as well. All of them beside ZeroBatch, which comes first."""
    arms = policies(one, {}, padded=True)
    return {arm: (arms[arm], 1) for arm in dict.fromkeys([ZEROBATCH, *arms])}


def _delayed(case: Case) -> Case:
    """With DelayBatch, which waits the least of the delays that are tried. The longer ones cost
    more at every load, and are there for the peak, for which DelayBatch is tuned."""
    if case.lengths:
        return case
    _, least, *longer = [d * case.alone_ms for d in DELAYS]
    window = {**_window(case.batch), "max_delay_ms": least}
    return replace(
        case,
        arms={**case.arms, DELAYBATCH: (window, 1)},
        delays={f"{DELAYBATCH}, {ms:.3g} ms": ms for ms in longer},
    )


def measure(
    measured: Mapping[str, Sequence[StageProfile]],
    plan: Plan,
    step: Step,
) -> list[Figure]:
    """All figures.

    Args:
        measured: profiles by experiment; those of the last one, ``operator``, also serve the
            multi-sample tests.
        step: is called after each of :func:`steps`.
    """
    found: list[Figure] = []
    for case in cases(measured, plan):
        if not case.lengths:
            found += _rows(case)
            found += _splits(case)
        for load, share in DVABATCH_LOADS.items():
            found += _load(case, load, share, plan.simulated)
            step()
        if case.measured:
            found += _peaks(case, plan.simulated)
            step()
    for profiles in list(measured.values())[-1:]:
        for gap in GAPS:
            found += _multi_sample(profiles, gap, plan.simulated // 500 + 1)
            step()
    return found


def steps(measured: Mapping[str, Sequence[StageProfile]], plan: Plan) -> int:
    """How often :func:`measure` calls back."""
    return len(cases(measured, plan)) * len(DVABATCH_LOADS) + len(measured) + len(GAPS)


def _window(rows: int) -> Policy:
    return {"policy": "window", "max_rows": rows}


def _dvabatch(rows: int, kinds: Sequence[str]) -> Policy:
    return {"policy": "dvabatch", "bs_max": rows, "policies": list(kinds)}


def _rows(case: Case) -> list[Figure]:
    """What a row costs at each measured size, per block."""
    out = []
    for profile in case.profiles:
        for b in profile.rows_measured():
            labels = {"experiment": REASONS, "model": case.name, "rows": b}
            ms = profile.ms(b) / b
            out.append(Figure.of(ROW, profile.block, ms, "ms", 1, labels, batch=b))
    return out


def _splits(case: Case) -> list[Figure]:
    """T_remain(i, n) / 2 T_remain(i, n/2) before each block."""
    lines = lines_of(case.profiles, case.batch)
    out = []
    for level, profile in enumerate(case.profiles):
        n = 2
        while n <= case.batch:
            labels = {"experiment": REASONS, "model": case.name, "rows": n}
            value = split_gain(lines, level, n)
            out.append(Figure.of(SPLIT, profile.block, value, "x", 1, labels, batch=n))
            n *= 2
    return out


def _load(case: Case, load: str, share: float, queries: int) -> list[Figure]:
    """Every arm at one load, the best and the bound."""
    rate = share * case.capacity
    labels = {"experiment": REASONS, "model": case.name, "load": load, "rate": rate}
    means: dict[str, float] = {}
    out: list[Figure] = []
    arrivals: list[float] = []
    for arm, (policy, lanes) in case.arms.items():
        runner = Runner(_experiment(case, policy, lanes, rate, queries))
        run = runner.run(_CELL)
        means[arm] = run.times.mean_ms
        for name, value in ((SIMULATED, run.times.mean_ms), (SIMULATED_TAIL, run.times.p99_ms)):
            figure = Figure.of(name, arm, value, "ms", run.results, labels)
            out.append(figure)
        if not arrivals:
            arrivals = [q.at_ns / 1e6 for q in runner.workload(_CELL).queries()]
    lines = [] if case.lengths else lines_of(case.profiles, case.batch)
    if lines:
        lanes = max(lanes for _, lanes in case.arms.values())
        means[POSSIBLE] = least_mean(lines, arrivals, lanes)
    ratios = {arm: ms / means[ZEROBATCH] for arm, ms in means.items() if arm != ZEROBATCH}
    if lines and case.measured:
        # Both exact: a simulated mean has an error of sampling that would hide so small a gain.
        ratios[BEST] = best_mean(lines, rate / 1e3) / zerobatch_mean(lines, rate / 1e3)
    paper = {"paper": round(1 + DVABATCH_PAPER[TIME_RATIO, load, ZEROBATCH], 4)}
    more = {**labels, "base": ZEROBATCH}
    for arm, ratio in ratios.items():
        said = more if arm == DELAYBATCH else {**more, **paper}
        out.append(Figure.of(TIME_RATIO, arm, ratio, "x", 1, said))
    return out


def _peaks(case: Case, queries: int) -> list[Figure]:
    """Every arm's highest rate whose 99th percentile keeps the bound of the benchmark."""
    bound_ms = BOUND_ROWS * case.alone_ms
    labels = {"experiment": REASONS, "model": case.name, "bound_ms": bound_ms}
    peaks: dict[str, float] = {}
    longer: dict[str, tuple[Policy, int]] = {
        arm: ({**_window(case.batch), "max_delay_ms": ms}, 1) for arm, ms in case.delays.items()
    }
    for arm, (policy, lanes) in {**case.arms, **longer}.items():
        low, high = 0.0, _TOO_MUCH * case.capacity
        for _ in range(_HALVINGS):
            rate = (low + high) / 2
            run = Runner(_experiment(case, policy, lanes, rate, queries)).run(_CELL)
            if run.times.p99_ms <= bound_ms:
                low = rate
            else:
                high = rate
        peaks[arm] = low
    out = [
        Figure.of(SIMULATED_PEAK, arm, peak, "1/s", queries, labels) for arm, peak in peaks.items()
    ]
    base = peaks[ZEROBATCH]
    more = {**labels, "base": ZEROBATCH}
    return out + [
        Figure.of(PEAK_RATIO, arm, peak / base, "x", queries, more)
        for arm, peak in peaks.items()
        if base and arm != ZEROBATCH
    ]


def _experiment(case: Case, policy: Policy, lanes: int, rate: float, queries: int) -> Experiment:
    system = chain(
        case.profiles,
        max_rows=case.batch,
        lanes=lanes,
        cores=lanes,
        credits=limits.MAX_ROWS,
        adaptive_limit=False,
    )
    (task,) = system.tasks
    patient = replace(task, deadline_ms=float(limits.MAX_DEADLINE_MS))
    seconds = queries / rate
    return Experiment(
        replace(system, tasks=(patient,)),
        [policy],
        [rate],
        lengths=case.lengths,
        duration_s=seconds,
        warmup_s=seconds / 20,
        seeds=[1],
    )


def _multi_sample(profiles: Sequence[StageProfile], gap: float, tests: int) -> list[Figure]:
    """Tests of multi-sample requests at one gap: LBCI and the bound beside serial."""
    alone = sum(p.ms(1) for p in profiles)
    lines = lines_of(profiles, LARGEST)
    arms: dict[str, Policy] = {
        SERIAL: {"policy": "none"},
        LBCI_ARM: {"policy": "lbci", "t_opt_ms": T_OPT_ROWS * alone},
        LOOSE: {"policy": "lbci", "t_opt_ms": 2 * T_OPT_ROWS * alone},
    }
    out = []
    for size, largest in SIZES.items():
        rng = Random(size)
        ends = dict.fromkeys([*arms, POSSIBLE], 0.0)
        for _ in range(tests):
            rows = [rng.randint(1, largest) for _ in range(REQUESTS)]
            at_ms = [i * gap * alone for i in range(REQUESTS)]
            queries = [
                Arrival(round(at * 1e6), TASK, n, None) for at, n in zip(at_ms, rows, strict=True)
            ]
            for arm, policy in arms.items():
                ends[arm] += last_exit_ms(profiles, policy, queries, LARGEST)
            ends[POSSIBLE] += least_end(lines, at_ms, rows)
        labels = {"experiment": REASONS, "load": size, "gap": gap, "largest": largest}
        told = round(1 + LBCI_PAPER[TEST_RATIO, size, SERIAL], 4)
        kinds = ((TEST_RATIO, LBCI_ARM), (TEST_RATIO, LOOSE), (TEST_POSSIBLE, POSSIBLE))
        for name, arm in kinds:
            ratio = ends[arm] / ends[SERIAL]
            more = {**labels, "base": SERIAL, "paper": told}
            out.append(Figure.of(name, arm, ratio, "x", tests, more))
    return out
