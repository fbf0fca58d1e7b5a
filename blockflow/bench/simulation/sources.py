"""Sources: a simulated system from profile files, from a repository, or from a topology."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from blockflow.batching.facts import LENGTH, carries
from blockflow.batching.registry import policy_problems, with_overlap
from blockflow.batching.shares import TaskShare
from blockflow.batching.sliced import slicing_problems
from blockflow.batching.ways import Ways
from blockflow.bench.options import nonsense
from blockflow.bench.simulation.system import StageModel, SystemModel, TaskModel, WorkerModel
from blockflow.bench.simulation.text import MAX_NUMBER, Options
from blockflow.control.rest.body import read_update
from blockflow.core.dims import Dim
from blockflow.core.engines import select
from blockflow.core.errors import Problem, RepositoryError, TopologyError
from blockflow.core.measuring import Subject, refuse_gaps
from blockflow.core.model import BlockInfo
from blockflow.core.placement import desired_workers, plan_workers
from blockflow.core.profile import StageProfile
from blockflow.core.topology import Topology, parse_topology
from blockflow.repository.profiles import ProfileStore
from blockflow.repository.repository import BlockRepository

MAX_FILE_BYTES = 16 * 1024 * 1024
_SHORTEST_MS = 1e-6
"""A nanosecond: virtual time counts in them."""


@dataclass(frozen=True, slots=True)
class Costs:
    """What a system has beside its blocks and tasks; see the fields of the models."""

    cores: int
    hop_ms: float
    turn_ms: float
    credits: int
    slots: int
    threads: int
    replicas: int
    max_rows: int
    deadline_ms: float
    lanes: int = 1


class Traits(NamedTuple):
    """What is known of a block beside its profile; see the fields of the model."""

    carries: Dim = LENGTH
    pads: bool = True

    @classmethod
    def of(cls, info: BlockInfo) -> Traits:
        return cls(carries(info), info.padding is not None)


@dataclass(frozen=True, slots=True)
class TaskChoice:
    """A task as the command line names it; an empty path is the topology's."""

    name: str
    path: tuple[str, ...]
    traffic: float


def parse_task(text: str, where: str = "--task") -> TaskChoice:
    """``NAME``, ``NAME@TRAFFIC``, ``NAME=a,b,c`` or ``NAME@TRAFFIC=a,b,c``.

    Raises:
        RequestError: INVALID_REQUEST.
    """
    head, _, path = text.partition("=")
    name, sign, share = (p.strip() for p in head.partition("@"))
    try:
        value = float(share) if sign else 1.0
    except ValueError:
        value = 0.0
    if not name or not 0.0 < value < float("inf"):
        raise nonsense(f"{text!r} is no task", where, "for example digit@2=trunk1,trunk2,head")
    return TaskChoice(name, tuple(b.strip() for b in path.split(",") if b.strip()), value)


def parse_share(text: str, where: str = "--share") -> tuple[str, TaskShare]:
    """``NAME:weight=2,priority=1,max_batch_rows=4``.

    Raises:
        RequestError: INVALID_REQUEST.
    """
    name, _, rest = text.partition(":")
    try:
        return name.strip(), TaskShare.from_dict(Options(rest, where).plain())
    except ValueError as e:
        raise nonsense(str(e), where, "for example digit:weight=2") from e


def read_profiles(files: Sequence[Path]) -> dict[str, StageProfile]:
    """Profiles by block, in the order of the files.

    A file holds one profile, a list of them, or a record of ``blockflow profile``; of a chain's
    record the blocks' parts count.

    Raises:
        RequestError: INVALID_REQUEST.
    """
    out: dict[str, StageProfile] = {}
    for file in files:
        for profile in _read(file):
            if profile.block in out:
                raise nonsense(f"two profiles of {profile.block!r}", str(file), "give one of them")
            out[profile.block] = profile
    return out


def _read(file: Path) -> list[StageProfile]:
    try:
        if file.stat().st_size > MAX_FILE_BYTES:
            raise nonsense(f"more than {MAX_FILE_BYTES} bytes", str(file))
        data = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(data, dict) and "profile" in data:
            data = data.get("parts") or data["profile"]
        found = [StageProfile.from_dict(p) for p in (data if isinstance(data, list) else [data])]
    except (OSError, ValueError, RecursionError) as e:
        raise nonsense(f"no profile can be read: {e}", str(file)) from e
    if not found:
        raise nonsense("no profile is in it", str(file))
    for profile in found:
        _check_times(profile, str(file))
    return found


def _check_times(profile: StageProfile, where: str) -> None:
    """Virtual time holds a forward, also one that is extrapolated and fluctuates."""
    for point in profile.points:
        if not _SHORTEST_MS <= point.p50_ms <= MAX_NUMBER:
            raise nonsense(
                f"{point.p50_ms:g} ms for {point.rows} rows of {profile.block!r}",
                where,
                f"between {_SHORTEST_MS:g} and {MAX_NUMBER:g} ms can be simulated",
            )


def stored_profiles(
    root: Path, blocks: Sequence[str], spec: Mapping[str, Mapping[str, Any]] | None = None
) -> dict[str, StageProfile]:
    """The profiles that hold here and now, by block.

    Args:
        spec: block -> ``engine``, ``precision`` and ``options``, where they are not ``auto``.

    Raises:
        RepositoryError: NO_PROFILE or STALE_PROFILE with all blocks that lack one, and what
            measures them; what the repository itself finds wrong.
    """
    repository, store = BlockRepository(root), ProfileStore(root)
    out: dict[str, StageProfile] = {}
    lacking: list[RepositoryError] = []
    for block in blocks:
        info = repository.info(block)
        selection = select(info, **dict((spec or {}).get(block, {})), machine=store.machine)
        try:
            out[block] = store.fresh([info], [selection]).profile
        except RepositoryError as e:
            if "command" not in e.details:
                raise
            lacking.append(e)
        else:
            _check_times(out[block], f"profile of {block}")
    if len(lacking) > 1:  # each takes minutes to measure: not one more with every call
        commands = " && ".join(str(e.details["command"]) for e in lacking)
        raise RepositoryError(
            lacking[0].code,
            "; ".join(e.message for e in lacking),
            hint=f"measure them: {commands}",
            details={"command": commands},
        )
    if lacking:
        raise lacking[0]
    return out


def stored_paths(
    root: Path, tasks: Sequence[TaskChoice]
) -> tuple[dict[str, StageProfile], dict[str, Traits]]:
    """:func:`stored_profiles` of the blocks on the tasks' paths, and what is known of each.

    Raises:
        RequestError: INVALID_REQUEST: blocks that do not follow one another.
        RepositoryError: as there.
    """
    repository = BlockRepository(root)
    for task in tasks:
        refuse_gaps([repository.info(block) for block in task.path])
    used = list(dict.fromkeys(b for t in tasks for b in t.path))
    return stored_profiles(root, used), {b: Traits.of(repository.info(b)) for b in used}


def plain_system(
    profiles: Mapping[str, StageProfile],
    tasks: Sequence[TaskChoice],
    shares: Mapping[str, TaskShare],
    costs: Costs,
    *,
    apart: bool,
    known: Mapping[str, Traits] | None = None,
) -> SystemModel:
    """All blocks in one worker, or (``apart``) a worker per block.

    Args:
        profiles: by block.
        tasks: with their paths; none = one task over all blocks in their order.
        shares: of tasks at the blocks that they share, by name.
        costs: the rest.
        apart: every block has a worker process of its own.
        known: what blocks make of a length; those that are missing keep it, and may be padded.

    Raises:
        RequestError: INVALID_REQUEST: a path that cannot be.
    """
    chosen = tasks or [TaskChoice("task", tuple(profiles), 1.0)]
    for task in chosen:
        missing = [b for b in task.path if b not in profiles]
        if missing:
            there = f"there: {', '.join(profiles)}"
            raise nonsense(f"no profile of {missing[0]!r}", f"task {task.name}", there)
        if not task.path:
            raise nonsense(f"task {task.name!r} has no path", "--task", "NAME=block,block,...")
        if len(set(task.path)) != len(task.path):
            raise nonsense("a block stands twice in the path", f"task {task.name}")
    used = list(dict.fromkeys(b for t in chosen for b in t.path))
    traits = {b: (known or {}).get(b, Traits()) for b in used}
    stages = [
        StageModel(
            b,
            profiles[b],
            max_rows=costs.max_rows,
            carries=traits[b].carries,
            pads=traits[b].pads,
        )
        for b in used
    ]
    groups = [(s.block, (s,)) for s in stages] if apart else [("worker", tuple(stages))]
    workers = tuple(
        WorkerModel(name, members, costs.threads, costs.slots, costs.replicas, costs.lanes)
        for name, members in groups
    )
    return _checked(workers, _models(chosen, shares, {}, costs.deadline_ms), costs)


def topology_system(
    file: Path,
    root: Path,
    chosen: Sequence[TaskChoice],
    shares: Mapping[str, TaskShare],
    costs: Costs,
) -> SystemModel:
    """A topology as the control plane would deploy it on ``costs.cores`` cores.

    Its workers, threads, slots, replicas, policies, limits, deadlines and shares count; of
    ``costs`` only what a topology does not say.

    Args:
        root: of the repository with its blocks and their profiles.
        chosen: the tasks that get queries, with their traffic; none = all, alike.
        shares: of tasks at the blocks that they share, by name, in the place of the topology's.
        costs: cores, credits, and what passing on costs.

    Raises:
        TopologyError: it is invalid, or does not fit the cores.
        RepositoryError: a profile is missing or stale.
        RequestError: INVALID_REQUEST: a task that it does not have.
    """
    stored = BlockRepository(root)
    topology = parse_topology(
        read_update(file),
        stored.info,
        policy_problems,
        pinned=lambda n, d: stored.info(n, digest=d),
    )
    known = {n: tuple(t.path) for n, t in topology.tasks.items()}
    for task in chosen:
        if task.path or task.name not in known:
            why = "has its path in the topology" if task.path else "is not in the topology"
            raise nonsense(f"task {task.name!r} {why}", "--task", f"there: {', '.join(known)}")
    picked = [TaskChoice(t.name, known[t.name], t.traffic) for t in chosen] or [
        TaskChoice(name, path, 1.0) for name, path in known.items()
    ]
    visited = {block for task in picked for block in task.path}
    cores = range(costs.cores)
    specs = desired_workers(with_overlap(topology), cores)
    plan = plan_workers(specs, cores)
    workers = []
    for spec, threads, lanes in zip(specs, plan.threads, plan.lanes, strict=True):
        if visited.isdisjoint(s.spec.name for s in spec.stages):
            continue  # it has its threads, and nothing to do
        wanted = {
            s.spec.artifact: {
                "engine": s.spec.engine,
                "precision": s.spec.precision,
                "options": s.spec.options,
            }
            for s in spec.stages
        }
        found = stored_profiles(root, list(wanted), wanted)
        stages = tuple(
            StageModel(
                s.spec.name,
                found[s.spec.artifact],
                s.spec.batching.model_dump(mode="json"),
                s.max_rows,
                *Traits.of(s.info),
            )
            for s in spec.stages
        )
        workers.append(WorkerModel(spec.name, stages, threads, spec.slots, spec.replicas, lanes))
    _refuse_unmeasured(workers)  # whose lengths are not known, either
    _check_policies(topology, workers)
    deadlines = {n: float(t.deadline_ms) for n, t in topology.tasks.items()}
    workers = [w.sliced() for w in workers]
    own = {t.name: TaskShare.from_dict(topology.tasks[t.name].share()) for t in picked}
    models = _models(picked, {**own, **shares}, deadlines, costs.deadline_ms)
    return _checked(tuple(workers), models, costs)


def _check_policies(topology: Topology, workers: Sequence[WorkerModel]) -> None:
    """Whether each can work at its blocks; findings have the topology's JSON paths."""
    places = {name: i for i, name in enumerate(topology.blocks)}
    ways = Ways({name: task.paths for name, task in topology.tasks.items()})
    problems: list[Problem] = []
    for worker in workers:
        for policy, members in worker.groups():
            blocks = [m.block for m in members]
            path = f"$.blocks[{places[blocks[0]]}].batching"
            facts = [m.facts(worker.threads) for m in members]
            problems += policy_problems(policy, path, facts, ways.through(blocks))
            problems += slicing_problems(policy, blocks, ways.meeting(blocks), path)
    if problems:
        raise TopologyError("INVALID_TOPOLOGY", "a policy does not fit", problems=problems)


def _models(
    chosen: Sequence[TaskChoice],
    shares: Mapping[str, TaskShare],
    deadlines: Mapping[str, float],
    default_ms: float,
) -> tuple[TaskModel, ...]:
    names = [t.name for t in chosen]
    for name in set(shares) - set(names):
        raise nonsense(f"no task {name!r}", "--share", f"there: {', '.join(names)}")
    if len(set(names)) != len(names):
        raise nonsense("a task is named twice", "--task")
    return tuple(
        TaskModel(
            t.name,
            t.path,
            t.traffic,
            shares.get(t.name, TaskShare()),
            deadlines.get(t.name, default_ms),
        )
        for t in chosen
    )


def _checked(
    workers: tuple[WorkerModel, ...], tasks: tuple[TaskModel, ...], costs: Costs
) -> SystemModel:
    for worker in workers:
        if worker.threads > costs.cores:
            cores = "1 core" if costs.cores == 1 else f"{costs.cores} cores"
            raise nonsense(f"{worker.threads} threads on {cores}", "--threads")
        if worker.lanes > len(worker.stages):
            count = len(worker.stages)
            blocks = f"{count} blocks" if count > 1 else "one block"
            what = f"{worker.lanes} lanes for the {blocks} of worker {worker.name!r}"
            raise nonsense(what, "--lanes", "at most a lane per block")
    _refuse_unmeasured(workers)
    return SystemModel(workers, tasks, costs.cores, costs.hop_ms, costs.turn_ms, costs.credits)


def _refuse_unmeasured(workers: Sequence[WorkerModel]) -> None:
    for worker in workers:
        for stage in worker.stages:
            of, count = stage.profile, worker.threads
            known = of.threads_measured()
            if count not in known:
                threads = "1 thread was" if count == 1 else f"{count} threads were"
                what = f"{threads} not measured for {of.block}"
                hint = Subject((of.block,), of.engine, of.precision).command([count])
                there = ", ".join(map(str, known)) or "none"
                raise nonsense(f"{what}; known: {there}", f"block {stage.block}", hint)
