"""Bounds that no batching policy can beat, from a profile and the arrivals alone. Pure.

They say what an ideal policy could gain at most, so that a policy that gains nothing can be told
from blocks that have nothing to give. Times are in milliseconds; ``lines[s][b]`` is the time of b
rows at stage s, ``lines[s][0]`` is 0.
"""

from __future__ import annotations

from collections.abc import Sequence

from blockflow.core.profile import StageProfile

Lines = Sequence[Sequence[float]]


def lines_of(profiles: Sequence[StageProfile], top: int) -> list[list[float]]:
    """Times of 1 to ``top`` rows, by the medians."""
    return [[0.0, *(p.ms(b) for b in range(1, top + 1))] for p in profiles]


def least_per_row(lines: Lines) -> float:
    """The least that a row costs the engine, each stage at the batch size that suits it best."""
    return sum(min(ms / b for b, ms in enumerate(line) if b) for line in lines)


def least_alone(lines: Lines) -> float:
    """The least that a row spends in the stages, if everything waited for it."""
    return sum(min(line[1:]) for line in lines)


def least_mean(lines: Lines, arrivals_ms: Sequence[float], lanes: int = 1) -> float:
    """A lower bound of the mean time of single-row queries, under any policy whatever.

    By any moment the engine has finished no more rows than if each cost only :func:`least_per_row`;
    with equal costs the order of arrival finishes most by every moment; and the k-th to leave came
    no earlier than the k-th to come, and has spent :func:`least_alone`.

    Args:
        arrivals_ms: when each query comes, ascending.
        lanes: batches that may compute at once, each as fast as alone.
    """
    share, alone = least_per_row(lines) / lanes, least_alone(lines)
    free = total = 0.0
    for at in arrivals_ms:
        free = max(free, at) + share
        total += max(free, at + alone) - at
    return total / len(arrivals_ms)


def least_end(lines: Lines, arrivals_ms: Sequence[float], rows: Sequence[int]) -> float:
    """A lower bound of when the last of these requests is answered: after each arrival, the rows
    that are still to come have to be computed."""
    share = least_per_row(lines)
    last = arrivals_ms[-1] + sum(line[rows[-1]] for line in lines)
    left = 0.0
    for at, count in zip(reversed(arrivals_ms), reversed(rows), strict=True):
        left += count * share
        last = max(last, at + left)
    return last


def split_gain(lines: Lines, level: int, rows: int) -> float:
    """``T_remain(i, n) / 2 T_remain(i, n/2)`` before stage ``level``: from 1 on DVABatch splits."""
    rest = lines[level:]
    half = rows // 2
    apart = sum(line[half] + line[rows - half] for line in rest)
    return sum(line[rows] for line in rest) / apart
