"""Plan: an experiment from what a person asks for, with typed errors for nonsense."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import isfinite
from typing import Any

from blockflow.batching.facts import length_of
from blockflow.batching.registry import policy_problems
from blockflow.batching.sliced import slicing_problems
from blockflow.batching.ways import Ways
from blockflow.bench.options import nonsense
from blockflow.bench.simulation.arrivals import Arrivals, Closed, Recorded, parse_arrivals
from blockflow.bench.simulation.experiment import Experiment, capacity
from blockflow.bench.simulation.recorded import recorded
from blockflow.bench.simulation.sizes import Sizes, parse_sizes
from blockflow.bench.simulation.system import SystemModel
from blockflow.bench.simulation.text import OWN_POLICIES, parse_policy, policy_label
from blockflow.bench.simulation.trace import Entry
from blockflow.core import limits
from blockflow.core.errors import Problem, TopologyError

DEFAULT_LOADS = (0.3, 0.6, 0.9)
MAX_QUERIES = 20_000_000
"""Of all runs together: more would take hours."""


@dataclass(frozen=True, slots=True)
class Order:
    """What a person asks for.

    Attributes:
        policies: in text form; none = the topology's own, or ``none``.
        from_topology: the system comes from a topology, which has policies of its own.
        loads, rates: numbers with commas; at most one of the two is given.
        duration_s: of a run; None = as long as a recorded trace, else a minute.
        warmup_s: None = a tenth of it.
        seeds: how many.
        first_seed: the first of them.
        bound_ms, noisy, check: as in :class:`Experiment`.
    """

    policies: Sequence[str] = ()
    from_topology: bool = False
    loads: str = ""
    rates: str = ""
    arrivals: str = "poisson"
    rows: str = "1"
    lengths: str = ""
    duration_s: float | None = None
    warmup_s: float | None = None
    seeds: int = 20
    first_seed: int = 1
    bound_ms: float = 500.0
    noisy: bool = True
    check: bool = False


def plan_experiment(system: SystemModel, order: Order) -> tuple[Experiment, float]:
    """An experiment, and the system's capacity without batching.

    Raises:
        RequestError: INVALID_REQUEST.
        TopologyError: INVALID_TOPOLOGY: a policy that cannot be, with every finding.
    """
    specs = _policies(order)
    check_policies(system, specs)
    kind = parse_arrivals(order.arrivals)
    rows = parse_sizes(order.rows, "--rows")
    lengths = parse_sizes(order.lengths, "--lengths") if order.lengths else None
    told = kind.entries if isinstance(kind, Recorded) else None
    most = min(s.max_rows for _, s in system.stages().values())
    if rows.largest > most:
        what = f"{rows.largest} rows are more than a batch may have"
        raise nonsense(what, "--rows", f"at most {most}")
    if isinstance(kind, Recorded):
        _check_trace(kind, system, most)
    drawn = told is None or _leaves_lengths(told, system)
    if lengths is not None or drawn:
        _check_lengths(system, lengths)
    of_trace = [n for *_, n in told or () if n is not None]
    longest = max([lengths.largest if lengths is not None and drawn else 0, *of_trace])
    _check_classes(system, specs, longest)
    if told is None:
        able = capacity(system, rows, lengths, noisy=order.noisy)
    else:
        cut = float("inf") if order.duration_s is None else order.duration_s
        replayed = [e for e in told if e[0] / 1e9 < cut] or told  # none at all: refused below
        served, alike = recorded(system, replayed, rows, lengths)
        able = capacity(served, rows, lengths, noisy=order.noisy, queries=alike)
    rates = _rates(order, kind, able)
    duration = order.duration_s
    if duration is None:
        duration = _length_of(kind) if isinstance(kind, Recorded) else 60.0
    warmup = _warmup(kind, duration, order.warmup_s)
    queries = sum(kind.work(r or able, duration) for r in rates) * order.seeds * len(specs)
    if queries > MAX_QUERIES:
        raise nonsense(
            f"{queries:.2g} queries would take hours",
            "--arrivals, --rate, --duration, --seeds",
            f"at most {MAX_QUERIES:.0e} in all runs together",
        )
    experiment = Experiment(
        system,
        specs,
        rates,
        order.arrivals,
        order.rows,
        order.lengths,
        duration,
        warmup,
        range(order.first_seed, order.first_seed + order.seeds),
        order.bound_ms,
        order.noisy,
        order.check,
    )
    return experiment, able


def _policies(order: Order) -> list[dict[str, Any]]:
    default: dict[str, Any] = {} if order.from_topology else {"policy": "none"}
    specs = [parse_policy(p) for p in order.policies] or [default]
    if not order.from_topology and {} in specs:
        raise nonsense(f"{OWN_POLICIES!r} goes with --topology alone", "--policy")
    if len({policy_label(p) for p in specs}) != len(specs):
        raise nonsense("a policy is named twice", "--policy")
    return specs


def _rates(order: Order, kind: Arrivals, able: float) -> tuple[float, ...]:
    """Queries per second; 0 for arrivals that have a rate of their own."""
    if order.loads and order.rates:
        raise nonsense("--load and --rate exclude each other", "--load, --rate")
    if isinstance(kind, Closed | Recorded):
        if order.loads or order.rates:
            what = f"{order.arrivals!r} has its own rate"
            raise nonsense(what, "--load, --rate", "leave them out")
        return (0.0,)
    if order.rates:
        return _numbers(order.rates, "--rate")
    return tuple(load * able for load in _numbers(order.loads, "--load") or DEFAULT_LOADS)


def check_policies(system: SystemModel, specs: Sequence[Mapping[str, Any]]) -> None:
    """Whether each of ``specs`` can serve every worker of ``system``.

    Raises:
        TopologyError: INVALID_TOPOLOGY with everything that is wrong with them.
    """
    problems: dict[Problem, None] = {}
    ways = Ways({t.name: [t.path] for t in system.tasks})
    for spec in specs:
        for worker in system.workers if spec else ():
            facts = [s.facts(worker.threads) for s in worker.stages]
            where = f"--policy {spec['policy']}"
            blocks = [s.block for s in worker.stages]
            found = policy_problems(spec, where, facts, ways.through(blocks))
            if not found:
                found = slicing_problems(spec, blocks, ways.meeting(blocks), where)
            problems |= dict.fromkeys(found)
    if problems:
        raise TopologyError("INVALID_TOPOLOGY", "a policy does not fit", problems=list(problems))


def _numbers(text: str, where: str) -> tuple[float, ...]:
    out = []
    for part in text.split(",") if text else ():
        try:
            value = float(part)
        except ValueError:
            raise nonsense(f"{part.strip()!r} is no number", where) from None
        if not isfinite(value) or value <= 0:
            raise nonsense(f"{part.strip()} is not above 0", where)
        out.append(value)
    if len(set(out)) != len(out):
        raise nonsense("a number stands twice", where)
    return tuple(out)


def _check_lengths(system: SystemModel, lengths: Sizes | None) -> None:
    """Lengths are given if and only if some block's time depends on them, and were measured."""
    longest = _longest(system)
    if longest is None:
        if lengths is not None:
            raise nonsense("no block has a variable length", "--lengths", "leave it out")
    elif lengths is None:
        hint = f"for example lognormal:median={max(1, longest // 4)},max={longest}"
        raise nonsense("the blocks have a variable length", "--lengths", hint)
    elif lengths.largest > longest:
        what = f"length {lengths.largest}: the longest measured one is {longest}"
        raise nonsense(what, "--lengths", f"add max={longest}, or profile longer ones")


def _check_classes(system: SystemModel, specs: Sequence[Mapping[str, Any]], longest: int) -> None:
    """A deployed system takes nothing that is longer than the last class on its way."""
    hosts = system.stages()
    for spec, task in product(specs, system.tasks):
        for block, taken in zip(task.path, system.taken(task.path), strict=True):
            worker, stage = hosts[block]
            policy = spec or stage.policy
            last = policy.get("classes", (limits.MAX_DIM,))[-1]
            brought = length_of(taken, longest) if longest else 0
            if stage.profile.lengths_measured(worker.threads) and brought > last:
                raise nonsense(
                    f"length {brought} is over the last class {last}: it would be refused",
                    f"--policy {policy['policy']}",
                    f"end the classes with {brought}, or send nothing longer",
                )


def _longest(system: SystemModel) -> int | None:
    """The length up to which every block with a variable one on any task's path was measured; None
    = there is none."""
    return min((n for task in system.tasks for n in system.lengths(task)), default=None)


def _leaves_lengths(entries: Sequence[Entry], system: SystemModel) -> bool:
    """Whether a query of a trace does not tell its length, and may need one."""
    fixed = {task.name for task in system.tasks if not system.lengths(task)}
    if len(fixed) == len(system.tasks):
        return False
    return any(length is None and task not in fixed for _, task, _, length in entries)


def _warmup(kind: Arrivals, duration: float, asked: float | None) -> float:
    """Seconds whose queries do not count; unless asked for, not at the price of a trace's all."""
    warmup = duration / 10 if asked is None else asked
    if not 0.0 <= warmup < duration:
        raise nonsense(f"a warm-up of {warmup:g} s in {duration:g} s", "--warmup")
    if not isinstance(kind, Recorded):
        return warmup
    times = [at / 1e9 for at, *_ in kind.entries if at / 1e9 < duration]
    if not times:
        raise nonsense(f"no query of the trace comes within {duration:g} s", "--duration")
    if times[-1] < warmup and asked is not None:
        what = f"all queries of the trace come within a warm-up of {warmup:g} s"
        raise nonsense(what, "--warmup", "--warmup 0 counts all of them")
    return warmup if times[-1] >= warmup else 0.0


def _length_of(trace: Recorded) -> float:
    """Seconds that hold all of its queries."""
    return trace.entries[-1][0] / 1e9 + 0.001


def _check_trace(trace: Recorded, system: SystemModel, most: int) -> None:
    known = {t.name for t in system.tasks}
    longest = _longest(system)
    for at, task, rows, length in trace.entries:
        when = f"trace at {at / 1e9:g} s"
        if task is not None and task not in known:
            raise nonsense(f"no task {task!r}", when, f"there: {', '.join(sorted(known))}")
        if rows is not None and rows > most:
            raise nonsense(f"{rows} rows are more than a batch may have", when, f"at most {most}")
        if length is not None and length > (longest or 0):
            what = f"the longest measured one is {longest}" if longest else "no block has one"
            raise nonsense(f"length {length}: {what}", when)
