"""The policies by name: where a new one is added, with one line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from blockflow.batching.none import NonePolicy
from blockflow.batching.policy import Policy
from blockflow.core.errors import Problem, TopologyError

POLICIES: Mapping[str, type[Policy]] = {cls.NAME: cls for cls in (NonePolicy,)}


def policy_problems(spec: Mapping[str, Any], path: str) -> list[Problem]:
    """What is wrong with a policy as the topology gives it: ``{"policy": name, ...options}``.

    Args:
        spec: the ``batching`` object of a block.
        path: its JSON path, for the findings.
    """
    name = spec.get("policy", "none")
    cls = POLICIES.get(name) if isinstance(name, str) else None
    if cls is None:
        known = ", ".join(POLICIES)
        return [Problem(f"{path}.policy", f"unknown policy {name!r}", f"known: {known}")]
    return cls.problems(_options(spec), path)


def create_policy(spec: Mapping[str, Any], stages: Sequence[int]) -> Policy:
    """A policy for ``stages``.

    Raises:
        TopologyError: INVALID_TOPOLOGY with every finding.
    """
    problems = policy_problems(spec, "$.batching")
    if problems:
        raise TopologyError("INVALID_TOPOLOGY", "the batching policy is invalid", problems=problems)
    return POLICIES[spec.get("policy", "none")](stages, _options(spec))


def _options(spec: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in spec.items() if k != "policy"}
