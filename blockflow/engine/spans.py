"""Spans: between which numbers the results of ONNX's arithmetic lie, by those that go in. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf

Span = tuple[float, float]
"""Least and greatest; whole numbers as Python's, which do not overflow."""

ANY: Span = (-inf, inf)
UNIT: Span = (0, 1)


def within(span: Span, limit: Span) -> bool:
    return limit[0] <= span[0] and span[1] <= limit[1]


def union(spans: Sequence[Span]) -> Span:
    return min(s[0] for s in spans), max(s[1] for s in spans)


def _product(a: float, b: float) -> float:
    return 0 if not a or not b else a * b


def times(a: Span, b: Span) -> Span:
    ends = [_product(x, y) for x in a for y in b]
    return min(ends), max(ends)


def _divided(spans: Sequence[Span]) -> Span:
    """By whole numbers not 0 it gets no larger; by others it may."""
    (a, b) = spans
    if b[0] <= 0 <= b[1] or min(map(abs, b)) < 1:
        return ANY
    most = max(map(abs, a))
    return (0 if a[0] >= 0 and b[0] > 0 else -most, most)


def _remainder(spans: Sequence[Span]) -> Span:
    """Has the divisor's sign, and is nearer to 0."""
    return min(0, spans[1][0]), max(0, spans[1][1])


def _bits(spans: Sequence[Span]) -> Span:
    """Of "or" and "xor": no more bits than both."""
    low, high = union(spans)
    if low == -inf or high == inf:
        return ANY
    most = (1 << max(int(high), -int(low) - 1, 0).bit_length()) - 1
    return (0 if low >= 0 else -most - 1), most


def _both(spans: Sequence[Span]) -> Span:
    """Of "and": no more than either that is not negative."""
    positive = [s[1] for s in spans if s[0] >= 0]
    return (0, min(positive)) if positive else _bits(spans)


def _power(spans: Sequence[Span]) -> Span:
    (low, high), (e, last) = spans
    if e != last or e != int(e) or not 0 <= e <= 64 or max(abs(low), abs(high)) == inf:
        return ANY
    most = max(abs(low), abs(high)) ** int(e)
    return (0 if low >= 0 or not e % 2 else -most), max(1, most)


def _magnitude(spans: Sequence[Span]) -> Span:
    low, high = spans[0]
    return (0 if low <= 0 <= high else min(abs(low), abs(high))), max(abs(low), abs(high))


def _first(spans: Sequence[Span]) -> Span:
    return spans[0]


def _multiplied(spans: Sequence[Span]) -> Span:
    """Of sizes, which are positive: no shape has so many dims that it would matter how many."""
    return UNIT if within(spans[0], UNIT) else ANY


ARITHMETIC: Mapping[str, Callable[[Sequence[Span]], Span]] = {
    "Add": lambda s: (s[0][0] + s[1][0], s[0][1] + s[1][1]),
    "Sub": lambda s: (s[0][0] - s[1][1], s[0][1] - s[1][0]),
    "Mul": lambda s: times(s[0], s[1]),
    "Div": _divided,
    "Mod": _remainder,
    "Pow": _power,
    "Neg": lambda s: (-s[0][1], -s[0][0]),
    "Abs": _magnitude,
    "Max": lambda s: (max(x[0] for x in s), max(x[1] for x in s)),
    "Min": lambda s: (min(x[0] for x in s), min(x[1] for x in s)),
    "Relu": lambda s: (max(0, s[0][0]), max(0, s[0][1])),
    "Floor": lambda s: (s[0][0] - 1, s[0][1]),
    "Ceil": lambda s: (s[0][0], s[0][1] + 1),
    "Round": lambda s: (s[0][0] - 1, s[0][1] + 1),
    "Cast": _first,
    "Where": lambda s: union(s[1:]),
    "Concat": union,
    "Pad": lambda s: union([s[0], s[2] if len(s) > 2 else (0, 0)]),
    "Trilu": lambda s: union([s[0], (0, 0)]),
    "ReduceMax": _first,
    "ReduceMin": _first,
    "ReduceProd": _multiplied,
    "BitwiseAnd": _both,
    "BitwiseOr": _bits,
    "BitwiseXor": _bits,
    "BitwiseNot": lambda s: (-s[0][1] - 1, -s[0][0] - 1),
}
