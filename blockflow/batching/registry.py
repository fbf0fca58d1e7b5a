"""The policies by name: where a new one is added, with one line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

from blockflow.batching.dvabatch import DvabatchPolicy
from blockflow.batching.facts import StageFacts
from blockflow.batching.lbci import LbciPolicy
from blockflow.batching.none import NonePolicy
from blockflow.batching.policy import Policy
from blockflow.batching.shares import TaskShare
from blockflow.batching.sliced import AUTO, OPTION, SlicedPolicy
from blockflow.batching.window import WindowPolicy
from blockflow.core.errors import Problem, TopologyError

if TYPE_CHECKING:  # workers do without the topology and what checks it
    from blockflow.core.topology import Topology

POLICIES: Mapping[str, type[Policy]] = {
    cls.NAME: cls for cls in (NonePolicy, WindowPolicy, LbciPolicy, DvabatchPolicy)
}


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
        known = ", ".join(POLICIES)
        return [Problem(f"{path}.policy", f"unknown policy {name!r}", f"known: {known}")]
    problems = cls.problems(_options(spec), path)
    if problems or stages is None:
        return problems
    every = [range(len(stages))]
    problems = cls.unfit(_options(spec), stages, path, every if ways is None else ways)
    return problems + cls.idle(_options(spec), stages, path)


def ways_through(
    blocks: Sequence[str], paths: Mapping[str, Sequence[Sequence[str]]]
) -> list[tuple[int, ...]]:
    """Which of ``blocks`` of one worker, by position, the tasks' queries run between their arrival
    in it and their departure. (Who leaves it and comes back is a new query for it.)

    Args:
        blocks: in the worker's order.
        paths: of each task, its canary's among them.
    """
    position = {b: i for i, b in enumerate(blocks)}
    found: dict[tuple[int, ...], None] = {}
    for way in (w for ways in paths.values() for w in ways):
        for mine, visited in groupby((position.get(b) for b in way), lambda i: i is not None):
            if mine:
                found[tuple(i for i in visited if i is not None)] = None
    return list(found)


def with_overlap(topology: Topology) -> Topology:
    """``topology`` with how many batches each block's policy wants under way at once."""
    wanted = {}
    for name, block in topology.blocks.items():
        spec = block.batching.model_dump(mode="json")
        wanted[name] = POLICIES[spec["policy"]].overlap(_options(spec))
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
    return POLICIES[spec.get("policy", "none")].batch_rows(_options(spec), laid_out)


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
    sizes = spec.get(OPTION)
    if sizes == AUTO:
        found = f"{AUTO!r} was not yet replaced by numbers"
        problems.append(Problem(f"$.batching.{OPTION}", found, "a list of numbers of blocks"))
    if problems:
        raise _invalid(problems)
    if sizes is not None and sum(sizes) == len(stages):
        return SlicedPolicy(kind, sizes, stages, options, facts, shares)
    return kind(stages, options, facts, shares)


def _invalid(problems: list[Problem]) -> TopologyError:
    return TopologyError("INVALID_TOPOLOGY", "the batching policy is invalid", problems=problems)


def _options(spec: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in spec.items() if k != "policy"}
