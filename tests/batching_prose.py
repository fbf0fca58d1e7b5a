"""What docs/batching.md says in figures, made from the stored results and the papers' changes.

Each number is rounded to the digits that the page gives, by the rule of the tables (``format``).
Where a sentence only says which of two is larger, another comparison makes another sentence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter

from blockflow.bench import calibration
from blockflow.bench.batching import figures as f
from blockflow.bench.batching import plan
from blockflow.bench.batching.lbci import STRETCHED
from blockflow.bench.batching.plan import (
    DVABATCH,
    HEADS,
    INPUT,
    LBCI,
    LBCI_ARM,
    LOAD,
    OPERATOR,
    REASONS,
    SERIAL,
    SHARED,
    ZERO_CLASSES,
    ZEROBATCH,
)
from blockflow.bench.batching.reasons import BOTH_LANES, DEVICE, DEVICE_OPERATOR
from blockflow.bench.results import Figure
from tests.quoted_rig import Stored, less, listed, more, read_figures, word

FILES = ("batching", "reasons")
Fragment = Callable[[Stored], str]
LBCI_SAYS, DVABATCH_SAYS = "LBCI's paper", "DVABatch's paper"
SERVED_EACH = "served, to each block by itself"
LOADS, SIZES = tuple(plan.DVABATCH_LOADS), tuple(plan.SIZES)
VALUE = attrgetter("value")
GROWS_MS = 1000.0
"""So long a mean, sixty times what a query takes alone, has only a queue that grows and grows."""


def sources() -> list[Figure]:
    """What is stored, and what the papers say, as figures of theirs."""
    papers = ((LBCI_SAYS, f.LBCI_PAPER), (DVABATCH_SAYS, f.DVABATCH_PAPER))
    return read_figures(FILES) + [
        Figure(name, says, None, None, None, 1 + change, "x", 1, labels={"load": on, "base": base})
        for says, paper in papers
        for (name, on, base), change in paper.items()
    ]


def told(s: Stored, says: str, name: str, base: str, loads: Iterable[str]) -> str:
    """Per cent less by a paper, at each load."""
    return listed(less(s.value(name, says, load=load, base=base)) for load in loads)


def virtual(
    s: Stored, name: str, model: str, arm: str, loads: Iterable[str] = LOADS
) -> list[float]:
    """What virtual time says, at each load."""
    return [s.value(name, arm, experiment=REASONS, model=model, load=load) for load in loads]


def gains(s: Stored, model: str, arm: str) -> list[str]:
    """Per cent less mean time than ZeroBatch in virtual time, at each load."""
    return [less(ratio) for ratio in virtual(s, f.TIME_RATIO, model, arm)]


def beside(s: Stored, experiment: str, arm: str, base: str, loads: Iterable[str]) -> list[Figure]:
    """The measured ratios of mean times, at each load."""
    return [s.one(f.TIME_RATIO, arm, experiment=experiment, load=load, base=base) for load in loads]


def faster(ratios: Iterable[Figure]) -> list[str]:
    """At which loads, by the intervals."""
    return [r.labels["load"] for r in ratios if r.interval.high < 1]


def at_loads(loads: list[str], usual: list[str], words: str) -> str:
    """``words`` where these are the usual ones."""
    if loads == usual:
        return words
    return f"at the loads {listed(loads)}" if loads else "at no load"


def static_batch(s: Stored) -> str:
    ratios = beside(s, LBCI, LBCI_ARM, plan.BATCHSIZE, plan.LBCI_LOADS)
    at = at_loads(faster(ratios), list(plan.LBCI_LOADS), "at all four loads")
    most = ", most where that is slow to fill" if min(ratios, key=VALUE) is ratios[0] else ""
    return f"single-sample requests are faster than in a static batch of ten {at}{most};"


def serially(s: Stored) -> str:
    ratios = beside(s, LBCI, LBCI_ARM, SERIAL, plan.LBCI_LOADS)
    at = at_loads(faster(ratios), list(plan.LBCI_LOADS)[1:], "from the second load on")
    rising = sorted(ratios, key=VALUE, reverse=True) == ratios
    return f"and faster than serially {at}{', the more the higher it is' if rising else ''}."


def lengths(s: Stored, arm: str) -> str:
    return listed(f"{ms:.1f}" for ms in virtual(s, f.SIMULATED, INPUT, arm))


def padding_window(s: Stored) -> str:
    means = virtual(s, f.SIMULATED, INPUT, ZEROBATCH)
    kept = [f"{ms:.1f}" for ms in means if ms < GROWS_MS]
    times = listed(kept if len(kept) == len(means) else [*kept, "then ever more"])
    return f"{times} ms in a window that pads everything to the longest of a batch"


def lengths_peaks(s: Stored) -> str:
    arms = (plan.NONE, ZEROBATCH, ZERO_CLASSES, DVABATCH)
    peaks = [s.value(f.SIMULATED_PEAK, arm, experiment=REASONS, model=INPUT) for arm in arms]
    return f"The peaks within the bound are {listed(f'{p:.1f}' for p in peaks)} per second."


def lengths_gain(s: Stored) -> str:
    there = s.value(f.PEAK_RATIO, DVABATCH, experiment=REASONS, model=INPUT, base=ZEROBATCH)
    here = s.value(f.PEAK_RATIO, DVABATCH, experiment=INPUT, base=ZEROBATCH)
    return (
        f"So what DVABatch gains beside the padding window, {there:.1f} times its peak there and "
        f"{here:.2f} times in the running system, is no merit of the policy's."
    )


def delay(s: Stored) -> str:
    (low,) = beside(s, LOAD, DVABATCH, plan.DELAYBATCH, ["low"])
    better = "better than" if low.interval.high < 1 else "not better than"
    return f"*Load* and *operator* diversity: {better} a delay at the low load;"


def alexnet(s: Stored) -> str:
    ratios = beside(s, OPERATOR, DVABATCH, ZEROBATCH, LOADS)
    sure = sum(r.interval.high < 1 or r.interval.low > 1 for r in ratios)
    told = "no more" if not sure else f"at {word(sure)} of them more"
    there = listed(less(m) for m in virtual(s, f.TIME_RATIO, OPERATOR, DVABATCH))
    return (
        f"AlexNet took {listed(more(r.value) for r in ratios)}% more than in the window at the "
        f"three loads, {told} than its visits differ by (virtual time has {there}% less)."
    )


def trunk_memory(s: Stored) -> str:
    stage, classifier = (
        s.value(f.MEMORY_RATIO, "shared trunk", experiment=name) for name in (SHARED, HEADS)
    )
    return (
        f"*A shared trunk* took {stage:.2f} of the full models' memory where the tasks part at the "
        f"last stage, and {classifier:.2f} where each has but a classifier of its own;"
    )


def trunk_rates(s: Stored) -> str:
    both = (SHARED, HEADS)
    rates = [s.value(f.OF_BOUND, "batched", experiment=name) for name in both]
    peaks = [
        s.one(f.PEAK_RATIO, "batched", experiment=name, base="full models").value for name in both
    ]
    served, peak = (" and ".join(f"{value:.2f}" for value in them) for them in (rates, peaks))
    return (
        f"it served {served} of what computing alone would, and its peak within the latency bound "
        f"was {peak} times the full models'."
    )


def trunk_peak(s: Stored) -> str:
    peak = s.value(f.PEAK_OF_BOUND, "batched", experiment=SHARED)
    begin, end = (s.value(calibration.NAME, at, experiment=SHARED) for at in ("begin", "end"))
    times = f"{end / begin:.1f}"
    said = {"1.0": "as long", "1.5": "half as long again"}
    longer = said.get(times, f"{times} times as long")
    return (
        f"apart: {peak:.2f} in the stored run, in which fixed work took {longer} at the end as at "
        "the begin."
    )


def served(s: Stored) -> str:
    alex, resnet = (s.value(f.SERVED, SERVED_EACH, experiment=name) for name in (LBCI, LOAD))
    return (
        f"Served one by one, AlexNet's six blocks take {alex:.2f} times as long for a row as the "
        "sum of their own profiles; the four of ResNet-18, whose weights are a fifth of AlexNet's, "
        f"{resnet:.2f} times."
    )


def resnet_best(s: Stored) -> str:
    best, mine = (gains(s, LOAD, arm) for arm in (f.BEST, DVABATCH))
    return (
        f"The best policy there is would be {listed(best)}% faster than ZeroBatch at the three "
        f"loads, and DVABatch gets {listed(mine)} of it."
    )


def alexnet_gets(s: Stored) -> str:
    best, mine = (virtual(s, f.TIME_RATIO, OPERATOR, arm) for arm in (f.BEST, DVABATCH))
    low, medium = (f"{less(m)} of the {less(b)}" for m, b in zip(mine[:2], best[:2], strict=True))
    nearly = (1 - mine[2]) / (1 - best[2]) > 0.9
    high = "nearly all" if nearly else f"{less(mine[2])} of the {less(best[2])}"
    return (
        f"DVABatch gets {low}, {medium}, and at the high load {high}: {less(mine[2])}% less time "
        "than ZeroBatch."
    )


def no_split(s: Stored) -> str:
    cells = [c for m in (LOAD, OPERATOR) for c in s.all(f.SPLIT, experiment=REASONS, model=m)]
    places = sum(round(c.value, 2) >= 1 for c in cells)
    where = f"at {word(places)} places" if places else "nowhere"
    return f"In the measured table whole to halves reaches 1.00 {where}."


def device_means(s: Stored) -> str:
    alike, unlike = (listed(gains(s, m, BOTH_LANES)) for m in (DEVICE, DEVICE_OPERATOR))
    return (
        f"DVABatch in two lanes beside ZeroBatch in one: {alike}% less mean time where all blocks "
        f"are alike, and {unlike}% where the last two blocks prefer small batches,"
    )


def device_tails(s: Stored) -> str:
    ranges = []
    for model in (DEVICE, DEVICE_OPERATOR):
        mine, zero = (virtual(s, f.SIMULATED_TAIL, model, arm) for arm in (BOTH_LANES, ZEROBATCH))
        ratios = [m / z for m, z in zip(mine, zero, strict=True)]
        ranges.append(f"{less(max(ratios))} to {less(min(ratios))}")
    return f"p99 {listed(ranges)}% less."


def device_bound(s: Stored) -> str:
    (ratio,) = virtual(s, f.TIME_RATIO, DEVICE, f.POSSIBLE, ["low"])
    most = less(ratio)
    share = "a third" if most == "33" else f"{most}%"
    return f"Where all are alike none can gain more than {share} at the low load:"


def shorter(s: Stored, name: str, arm: str, size: str) -> str:
    """Per cent less than serial that a test of multi-sample requests takes in virtual time."""
    ratio = s.value(name, arm, experiment=REASONS, load=size, gap=plan.GAP_ROWS)
    return "less than one" if 0 < 1 - ratio < 0.01 else less(ratio)


def small_tests(s: Stored) -> str:
    return (
        "no policy at all could make the *small* ones shorter by more than "
        f"{shorter(s, f.TEST_POSSIBLE, f.POSSIBLE, 'small')}%, because most of a test is waiting "
        "for its requests; in virtual time LBCI gains "
        f"{shorter(s, f.TEST_RATIO, LBCI_ARM, 'small')}%."
    )


def medium_tests(s: Stored) -> str:
    return (
        f"*Medium* ones could be {shorter(s, f.TEST_POSSIBLE, f.POSSIBLE, 'medium')}% shorter, and "
        f"LBCI gains {shorter(s, f.TEST_RATIO, LBCI_ARM, 'medium')}%:"
    )


def loose_tests(s: Stored) -> str:
    paper = told(s, LBCI_SAYS, f.TEST_RATIO, SERIAL, ["medium"])
    gained = shorter(s, f.TEST_RATIO, plan.LOOSE, "medium")
    return f"with twice the bound LBCI gains {gained}%, beside the paper's {paper}%."


def large_tests(s: Stored) -> str:
    return (
        "*Large* ones are efficient batches already: LBCI gains "
        f"{shorter(s, f.TEST_RATIO, LBCI_ARM, 'big')} of the possible "
        f"{shorter(s, f.TEST_POSSIBLE, f.POSSIBLE, 'big')}%."
    )


def served_tests(s: Stored) -> str:
    times = [s.value(f.TEST, SERIAL, experiment=LBCI, load=size) / 1e3 for size in SIZES]
    ratios = [s.one(f.TEST_RATIO, LBCI_ARM, experiment=LBCI, load=size) for size in SIZES]
    ranges = [f"{less(r.interval.high)} to {less(r.interval.low)}" for r in ratios]
    return (
        f"In the running system tests of {listed(f'{t:.1f}' for t in times)} seconds were "
        f"{listed(less(r.value) for r in ratios)}% shorter (by their intervals {listed(ranges)}%),"
    )


def alexnet_tail(s: Stored) -> str:
    (mean,) = virtual(s, f.TIME_RATIO, OPERATOR, DVABATCH, ["medium"])
    return f"AlexNet at the medium load: {less(mean)}% less mean and {tail(s, OPERATOR)};"


def tail(s: Stored, model: str) -> str:
    """The 99th percentile at the medium load."""
    (mine,), (zero,) = (
        virtual(s, f.SIMULATED_TAIL, model, arm, ["medium"]) for arm in (DVABATCH, ZEROBATCH)
    )
    return f"{more(mine / zero)}% more p99 ({mine:.0f} beside {zero:.0f} ms)"


def virtual_peaks(s: Stored) -> str:
    alex, resnet = (
        f"{s.value(f.PEAK_RATIO, DVABATCH, experiment=REASONS, model=m, base=ZEROBATCH):.2f}"
        for m in (OPERATOR, LOAD)
    )
    both = "AlexNet and for" if alex == resnet else f"AlexNet, {resnet} for"
    return f"in virtual time: {alex} times ZeroBatch's for {both} ResNet-18."


def over_t_opt(s: Stored) -> str:
    three, four = (s.value(f.OVER, LBCI_ARM, experiment=LBCI, load=load) for load in "34")
    return (
        f"**Over t_opt** at LBCI's load 4 were {four:.0f}% of the queries, and "
        f"{f'{three:.0f}%' if three else 'none'} at load 3."
    )


def over_simulated(s: Stored) -> str:
    profiled, stretched = (
        s.value(f.SIMULATED_OVER, arm, experiment=LBCI, load="4") for arm in (LBCI_ARM, STRETCHED)
    )
    waits, computes = s.note(LBCI, r"^at load 4 .* waits (\d+) ms and computes (\d+) on average")
    (t_opt,) = s.note(LBCI, r"^t_opt is (\d+) ms")
    return (
        f"With the profiled times the simulator has {profiled:.1f}%, with times [as they are "
        f"served](#a-profile-is-not-what-is-served) {stretched:.1f}%: there a query of load 4 "
        f"waits {waits} ms and computes {computes} ms on average, of {t_opt}, and"
    )


def window_classes(s: Stored) -> str:
    classes = word(len(plan.CLASSES))
    return f"{lengths(s, ZERO_CLASSES)} ms in the same window with {classes} classes;"


def dvabatch_paper(s: Stored) -> str:
    changes = told(s, DVABATCH_SAYS, f.TIME_RATIO, ZEROBATCH, LOADS)
    return f"The paper's {changes}% are means over models on a GPU,"


def lbci_paper(s: Stored) -> str:
    changes = told(s, LBCI_SAYS, f.TEST_RATIO, SERIAL, SIZES)
    return f"the paper's {changes}% less for small, medium and large data are not reached"


FRAGMENTS: Mapping[str, Fragment] = {
    "LBCI beside a static batch": static_batch,
    "LBCI beside serial": serially,
    "lengths, none": lambda s: f"a query takes {lengths(s, plan.NONE)} ms under `none`;",
    "lengths, padding window": padding_window,
    "lengths, window with classes": window_classes,
    "lengths, DVABatch": lambda s: f"{lengths(s, DVABATCH)} ms under DVABatch with these classes.",
    "lengths, peaks": lengths_peaks,
    "lengths, DVABatch's peak": lengths_gain,
    "ResNet-18 beside a delay": delay,
    "AlexNet beside the window": alexnet,
    "shared trunk, memory": trunk_memory,
    "shared trunk, rates": trunk_rates,
    "shared trunk, peak": trunk_peak,
    "served to profiled": served,
    "ResNet-18, best policy": resnet_best,
    "ResNet-18, the paper": dvabatch_paper,
    "AlexNet, best policy": lambda s: f"**AlexNet has {listed(gains(s, OPERATOR, f.BEST))}%**,",
    "AlexNet, DVABatch": alexnet_gets,
    "AlexNet, splits": no_split,
    "device, means": device_means,
    "device, 99th percentiles": device_tails,
    "device, bound": device_bound,
    "tests, the paper": lbci_paper,
    "tests, small": small_tests,
    "tests, medium": medium_tests,
    "tests, medium with twice the bound": loose_tests,
    "tests, large": large_tests,
    "tests, running system": served_tests,
    "AlexNet, 99th percentile": alexnet_tail,
    "ResNet-18, 99th percentile": lambda s: f"ResNet-18: {tail(s, LOAD)}.",
    "peaks in virtual time": virtual_peaks,
    "over t_opt, measured": over_t_opt,
    "over t_opt, simulated": over_simulated,
}
"""By what they are about; each stands in the page word by word."""
