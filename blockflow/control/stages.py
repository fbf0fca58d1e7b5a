"""``"stages": "auto"`` made numbers: how a worker's chain is sliced, from its blocks' profiles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from blockflow.batching.costs import Costs, measured
from blockflow.batching.facts import StageFacts
from blockflow.batching.registry import POLICIES, largest_batch
from blockflow.batching.sliced import AUTO, OPTION
from blockflow.core import limits
from blockflow.tuning.stages import best_stages


def is_open(policy: Mapping[str, Any]) -> bool:
    """Whether its slicing is yet to be found."""
    return bool(policy.get(OPTION) == AUTO)


def resolved(policy: Mapping[str, Any], facts: Sequence[StageFacts]) -> dict[str, Any]:
    """``policy`` with numbers for ``auto``; as it is where a block has no profile.

    Args:
        policy: the ``batching`` object, which :func:`is_open`.
        facts: of the blocks of one worker that have it, in their order: a chain.
    """
    if not all(map(measured, facts)):
        return dict(policy)
    laid_out = [f.max_rows for f in facts if f.max_rows is not None]
    rows = largest_batch(policy, min(laid_out, default=limits.DEFAULT_MAX_ROWS))
    costs = Costs(dict(enumerate(facts)), rows)
    table = [costs.line((i,)) for i in range(len(facts))]
    does = POLICIES[policy["policy"]].boundaries(policy)
    # The table ends with the largest batch, or before it where that is very large.
    most = len(table[0]) - 1
    sizes = best_stages(table, most, joins="join" in does, splits="split" in does)
    return {**policy, OPTION: list(sizes)}
