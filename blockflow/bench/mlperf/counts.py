"""How many queries a verdict on a tail latency needs. Pure.

MLPerf Inference Benchmark (Reddi et al., 2020), section 4.6 and table 4; and the early stopping of
MLCommons' LoadGen, which short runs rest on.
"""

from __future__ import annotations

from math import ceil, sqrt
from statistics import NormalDist

CONFIDENCE = 0.99
"""The paper's; LoadGen's early stopping uses the same."""

ROUNDING = 2**13
"""The paper rounds its counts up to a multiple of this."""

SINGLE_STREAM_QUERIES = 1024
OFFLINE_SAMPLES = 24_576

_SPREAD = 5.0
"""Standard deviations that a count may stay behind its mean, or exceed it: once in 3 million runs.
"""


def margin(percentile: float) -> float:
    """Error margin of a tail latency: a twentieth of the tail (eq. 1). ``percentile`` is 0..1."""
    return (1 - percentile) / 20


def query_count(percentile: float, confidence: float = CONFIDENCE) -> int:
    """Queries after which the share of late ones is known to within :func:`margin` (eq. 2).

    The paper prints ``TailLatency * (TailLatency - 1)``, which is negative; the variance of a share
    is ``p (1 - p)``, and with it, to the nearest number, the counts are those of table 4.

    Args:
        percentile: of the latency, between 0 and 1.
        confidence: that the true percentile is within the margin, between 0 and 1.

    Raises:
        ValueError: a value is out of its range.
    """
    _check(percentile, confidence)
    z = NormalDist().inv_cdf((1 - confidence) / 2)
    return round(z * z * percentile * (1 - percentile) / margin(percentile) ** 2)


def rounded_count(percentile: float, confidence: float = CONFIDENCE) -> int:
    """:func:`query_count`, rounded up to a multiple of :data:`ROUNDING` as in table 4."""
    return -(-query_count(percentile, confidence) // ROUNDING) * ROUNDING


def early_stopping_count(percentile: float) -> int:
    """The fewest queries from which LoadGen's early stopping estimates this percentile.

    It discards at least the slowest query: the smallest n with which one late query in n, or none,
    has a chance of at most ``1 - CONFIDENCE`` if the true share of late ones were the whole tail.

    Raises:
        ValueError: a value is out of its range.
    """
    _check(percentile, CONFIDENCE)

    def chance(n: int) -> float:
        return percentile**n + n * (1 - percentile) * percentile ** (n - 1)

    high = 2
    while chance(high) > 1 - CONFIDENCE:
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if chance(middle) > 1 - CONFIDENCE else (low, middle)
    return high


def count_for_share(count: int, share: float) -> int:
    """Queries of which ``count`` ask for a task, where each does with the chance ``share`` (0..1).

    LoadGen draws at random: there are more than ``count / share``, lest chance leave a task short.
    """
    if share >= 1:
        return count
    # n share - 5 sqrt(n share (1 - share)) = count, solved for n share.
    half = _SPREAD * sqrt(1 - share) / 2
    return ceil((half + sqrt(half * half + count)) ** 2 / share)


def most_by_chance(mean: float, spread: float) -> float:
    """What a count with this mean and standard deviation does not exceed, but for a rare chance."""
    return mean + _SPREAD * spread


def _check(percentile: float, confidence: float) -> None:
    for name, value in (("percentile", percentile), ("confidence", confidence)):
        if not 0 < value < 1:
            raise ValueError(f"{name} {value} is outside 0..1")
