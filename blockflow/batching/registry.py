"""The policies by name: where a new one is added, with one line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from blockflow.batching.dvabatch import DvabatchPolicy
from blockflow.batching.facts import StageFacts
from blockflow.batching.lbci import LbciPolicy
from blockflow.batching.none import NonePolicy
from blockflow.batching.policy import Policy
from blockflow.batching.shares import TaskShare
from blockflow.batching.window import WindowPolicy
from blockflow.core.errors import Problem, TopologyError

POLICIES: Mapping[str, type[Policy]] = {
    cls.NAME: cls for cls in (NonePolicy, WindowPolicy, LbciPolicy, DvabatchPolicy)
}


def policy_problems(
    spec: Mapping[str, Any], path: str, stages: Sequence[StageFacts] | None = None
) -> list[Problem]:
    """What is wrong with a policy as the topology gives it: ``{"policy": name, ...options}``.

    Args:
        spec: the ``batching`` object of a block.
        path: its JSON path, for the findings.
        stages: the stages of one worker that share this policy, in their order: then it is also
            checked against their profiles and limits. None: the options alone are.
    """
    name = spec.get("policy", "none")
    cls = POLICIES.get(name) if isinstance(name, str) else None
    if cls is None:
        known = ", ".join(POLICIES)
        return [Problem(f"{path}.policy", f"unknown policy {name!r}", f"known: {known}")]
    problems = cls.problems(_options(spec), path)
    if problems or stages is None:
        return problems
    return cls.unfit(_options(spec), stages, path)


def create_policy(
    spec: Mapping[str, Any],
    stages: Sequence[int],
    facts: Mapping[int, StageFacts] | None = None,
    shares: Sequence[TaskShare] = (),
) -> Policy:
    """A policy for ``stages``, in the order of the worker's blocks.

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
    problems = policy_problems(spec, "$.batching", in_order)
    if problems:
        raise TopologyError("INVALID_TOPOLOGY", "the batching policy is invalid", problems=problems)
    return POLICIES[spec.get("policy", "none")](stages, _options(spec), facts, shares)


def _options(spec: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in spec.items() if k != "policy"}
