"""Batches that wait for one stage, in several lanes, for the tests of what becomes of them."""

from __future__ import annotations

from collections.abc import Sequence

from policy_rig import MS, query

from blockflow.batching.policy import Policy, Run

QUICK = dict.fromkeys((1, 2, 4, 8), 1.0)
HEAVY = {b: 10.0 + b for b in (1, 2, 4, 8)}
LINEAR = {b: 0.5 + 10.0 * b for b in (1, 2, 4, 8)}
LONG = 200 * MS


def line_up(
    policy: Policy,
    batches: Sequence[tuple[int, ...]],
    *,
    ahead: tuple[int, ...],
    left_ms: float = 1000,
    late: Sequence[int],
    late_ms: float,
    longer: Sequence[int],
) -> int:
    """Let these batches run stage 1, one after the other and for so long that nobody could join
    them, and wait for stage 2.

    Args:
        ahead: stages after the first.
        late: keys of those that have only ``late_ms`` left then.
        longer: keys of those of another shape.

    Returns:
        The time.
    """
    now, end = 0, len(batches) * LONG
    for keys in batches:
        queries = [
            query(key, now, shape=(8 if key in longer else 4,), ahead=ahead)._replace(
                deadline_ns=end + round((late_ms if key in late else left_ms) * MS)
            )
            for key in keys
        ]
        for one in queries:
            policy.arrive(one, now)
        assert policy.decide(now, {2}) == Run(1, keys)
        now += LONG
        policy.done(1, keys, now)
        for one in queries:
            policy.arrive(one._replace(stage=2, first=False, ahead=ahead[1:]), now)
    return now
