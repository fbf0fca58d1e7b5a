"""The policies by name: where a new one is added, with one line."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from traceback import extract_tb
from typing import TYPE_CHECKING, Any, TypeVar

from blockflow.batching.dvabatch import DvabatchPolicy
from blockflow.batching.facts import StageFacts
from blockflow.batching.lbci import LbciPolicy
from blockflow.batching.none import NonePolicy
from blockflow.batching.options import Kind, shown
from blockflow.batching.policy import Decision, Policy
from blockflow.batching.queueing import CLASSES
from blockflow.batching.rules import Trial
from blockflow.batching.shares import TaskShare
from blockflow.batching.sliced import AUTO, OPTION, SLICES, SlicedPolicy
from blockflow.batching.window import WindowPolicy
from blockflow.core import limits
from blockflow.core.errors import Problem, TopologyError
from blockflow.core.guess import Guesses

if TYPE_CHECKING:  # workers do without the topology and what checks it
    from blockflow.core.topology import Topology

POLICIES: Mapping[str, type[Policy]] = {
    cls.NAME: cls for cls in (NonePolicy, WindowPolicy, LbciPolicy, DvabatchPolicy)
}

RESERVED: Mapping[str, Kind] = {OPTION: SLICES, "classes": CLASSES}
"""Options that others read, too, whatever the policy: the control plane and this module slice a
worker's chain by the one, contracts and the simulator bound lengths by the other."""

_BOUNDARIES = frozenset({"join", "split"})
_MOST_SAID = 300

T = TypeVar("T")


def alike(policies: Iterable[tuple[T, Mapping[str, Any]]]) -> list[tuple[list[T], dict[str, Any]]]:
    """Stages of one worker by their policies, those with the same one together: they share its
    instance, and so they are judged together."""
    groups: list[tuple[list[T], dict[str, Any]]] = []
    for stage, policy in policies:
        for members, known in groups:
            if known == policy:
                members.append(stage)
                break
        else:
            groups.append(([stage], dict(policy)))
    return groups


def policy_problems(
    spec: Mapping[str, Any],
    path: str,
    stages: Sequence[StageFacts] | None = None,
    ways: Sequence[Sequence[int]] | None = None,
) -> list[Problem]:
    """What is wrong with a policy as the topology gives it: ``{"policy": name, ...options}``.

    Args:
        spec: the ``batching`` object of a block.
        path: its JSON path, for the findings.
        stages: the stages of one worker that share this policy, in their order: then it is also
            checked against their profiles and limits. None: the options alone are.
        ways: which of ``stages``, by position, a query of each task runs. None: all of them.
    """
    name = spec.get("policy", "none")
    cls = POLICIES.get(name) if isinstance(name, str) else None
    if cls is None:
        guesses = Guesses(POLICIES)
        word = str(name)
        hint = guesses.hint(word) or guesses.hint(word.lower()) or f"known: {', '.join(POLICIES)}"
        return [Problem(f"{path}.policy", f"unknown policy {name!r}", hint)]
    try:
        return _findings(cls, _options(spec), path, stages, ways)
    except TopologyError as exc:  # of _told: a defect of the policy
        return list(exc.problems)


def _findings(
    cls: type[Policy],
    options: Mapping[str, Any],
    path: str,
    stages: Sequence[StageFacts] | None,
    ways: Sequence[Sequence[int]] | None,
) -> list[Problem]:
    problems = _told(cls, "problems", path, lambda: list(cls.problems(options, path)))
    if cls is NonePolicy:  # most often its name was not said at all
        hint = 'leave it out, or name the policy that it is for: {"policy": NAME, ...}'
        problems = [replace(p, hint=hint) for p in problems]
    for name, kind in RESERVED.items():
        if not problems and name in options and not kind.takes(options[name]):
            what = f"{shown(options[name])} is not {kind}, as {name!r} is for every policy"
            hint = f"a defect of policy {cls.NAME!r}: give its own option another name"
            problems.append(Problem(f"{path}.{name}", what, hint))
    if problems:
        return problems
    for facts in stages or (StageFacts(),):
        _batch_rows(cls, options, facts.max_rows or limits.DEFAULT_MAX_ROWS, path)
    _overlap(cls, options, path)
    _told(cls, "boundaries", path, lambda: _known_boundaries(cls.boundaries(options)))
    if stages is None:
        return []
    by_task = [range(len(stages))] if ways is None else ways
    problems = _told(cls, "unfit", path, lambda: list(cls.unfit(options, stages, path, by_task)))
    problems += _told(cls, "idle", path, lambda: list(cls.idle(options, stages, path)))
    if stages and not problems and options.get(OPTION) != AUTO:
        _try_out(cls, options, stages, path, by_task)
    return problems


def _try_out(
    cls: type[Policy],
    options: Mapping[str, Any],
    stages: Sequence[StageFacts],
    path: str,
    ways: Sequence[Sequence[int]],
) -> None:
    """One that takes its options may raise at work all the same."""
    facts = dict(enumerate(stages))
    policy = _told(cls, "__init__", path, lambda: _made(cls, options, tuple(facts), facts, ()))

    def told(method: str, ask: Callable[[], Decision]) -> Decision:
        return _told(cls, method, path, ask)

    Trial(policy, told).run(ways)


def with_overlap(topology: Topology) -> Topology:
    """``topology`` with how many batches each block's policy wants under way at once."""
    wanted = {}
    for i, (name, block) in enumerate(topology.blocks.items()):
        spec = block.batching.model_dump(mode="json")
        path = f"$.blocks[{i}].batching"
        wanted[name] = _overlap(POLICIES[spec["policy"]], _options(spec), path)
        sizes = spec.get(OPTION, AUTO)
        if sizes != AUTO:
            wanted[name] = min(wanted[name], len(sizes))  # one batch per stage
    return replace(topology, overlap=wanted)


def batch_rows(topology: Topology, task: str) -> int:
    """Rows of the largest batch that a block on the task's way forms."""
    rows = 1
    for block in {b for path in topology.tasks[task].paths for b in path}:
        spec = topology.blocks[block].batching.model_dump(mode="json")
        rows = max(rows, largest_batch(spec, topology.rows_of(block)))
    return rows


def largest_batch(spec: Mapping[str, Any], laid_out: int) -> int:
    """Rows of a policy's largest batch at a block whose worker is laid out for ``laid_out``."""
    cls = POLICIES[spec.get("policy", "none")]
    return _batch_rows(cls, _options(spec), laid_out, "$.batching")


def create_policy(
    spec: Mapping[str, Any],
    stages: Sequence[int],
    facts: Mapping[int, StageFacts] | None = None,
    shares: Sequence[TaskShare] = (),
) -> Policy:
    """A policy for ``stages``, in the order of the worker's blocks.

    The option ``stages`` for another number of blocks is put aside: while a running worker gets a
    new policy block by block, some have it already. (Whether it fits is checked before.)

    Args:
        spec: the ``batching`` object of the stages' blocks.
        stages: their numbers.
        facts: by stage number; a stage that is missing has the defaults and no profile.
        shares: of the tasks, by the index that queries carry.

    Raises:
        TopologyError: INVALID_TOPOLOGY with every finding.
    """
    known = facts or {}
    in_order = [known.get(s) or StageFacts() for s in stages]
    problems = policy_problems(spec, "$.batching")
    if problems:
        raise _invalid(problems)
    kind, options = POLICIES[spec.get("policy", "none")], _options(spec)
    # Which ways queries take is not known here, nor who else is about to get this policy: what not
    # even a single stage allows is refused.
    alone = [(i,) for i in range(len(stages))]
    problems = kind.unfit(options, in_order, "$.batching", alone)
    if options.get(OPTION) == AUTO:
        found = f"{AUTO!r} was not yet replaced by numbers"
        problems.append(Problem(f"$.batching.{OPTION}", found, "a list of numbers of blocks"))
    if problems:
        raise _invalid(problems)
    return _made(kind, options, stages, facts, shares)


def _made(
    kind: type[Policy],
    options: Mapping[str, Any],
    stages: Sequence[int],
    facts: Mapping[int, StageFacts] | None,
    shares: Sequence[TaskShare],
) -> Policy:
    sizes = options.get(OPTION)
    if sizes is not None and sum(sizes) == len(stages):
        return SlicedPolicy(kind, sizes, stages, options, facts, shares)
    return kind(stages, options, facts, shares)


# --- what policies say of themselves, who may be anybody's code ----------------------------------


def _overlap(cls: type[Policy], options: Mapping[str, Any], path: str) -> int:
    return _told(cls, "overlap", path, lambda: _positive(cls.overlap(options)))


def _batch_rows(cls: type[Policy], options: Mapping[str, Any], laid_out: int, path: str) -> int:
    return _told(cls, "batch_rows", path, lambda: _positive(cls.batch_rows(options, laid_out)))


def _told(cls: type[Policy], method: str, path: str, ask: Callable[[], T]) -> T:
    """What a policy's ``method`` says.

    Raises:
        TopologyError: INVALID_TOPOLOGY: it raises, or what it says makes no sense. Which policy it
            is, and where in its code, is in the finding: no log has to be searched.
    """
    try:
        return ask()
    except Exception as exc:
        at = extract_tb(exc.__traceback__)[-1]
        file = at.filename.rpartition("/")[2]
        where = "" if at.filename == __file__ else f" ({file}:{at.lineno})"
        said = f"{type(exc).__name__}: {exc}"[:_MOST_SAID]
        what = f"policy {cls.NAME!r}: {method}() failed with {said}{where}"
        problem = Problem(path, what, "a defect of the policy, whatever its options are")
        raise _invalid([problem]) from exc


def _positive(value: int) -> int:
    if type(value) is not int or value < 1:
        raise ValueError(f"it says {shown(value)}, which is no whole number from 1 on")
    return value


def _known_boundaries(value: Any) -> frozenset[str]:
    if not frozenset(value) <= _BOUNDARIES:
        raise ValueError(f"it says {shown(value)}, known: {', '.join(sorted(_BOUNDARIES))}")
    return frozenset(value)


def _invalid(problems: list[Problem]) -> TopologyError:
    return TopologyError("INVALID_TOPOLOGY", "the batching policy is invalid", problems=problems)


def _options(spec: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in spec.items() if k != "policy"}
