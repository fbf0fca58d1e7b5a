"""Spans of ONNX's arithmetic hold all that the operator makes of numbers of those that go in."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest

from blockflow.engine.spans import ANY, ARITHMETIC, UNIT, Span

SPANS: list[Span] = [(-7, 5), (0, 6), (3, 9), (-8, -2), (4, 4)]
OPERATORS: dict[str, Callable[[int, int], float]] = {
    "Add": lambda a, b: a + b,
    "Sub": lambda a, b: a - b,
    "Mul": lambda a, b: a * b,
    "Div": lambda a, b: math.trunc(a / b) if b else 0,
    "Mod": lambda a, b: a % b if b else 0,
    "Max": max,
    "Min": min,
    "BitwiseAnd": lambda a, b: a & b,
    "BitwiseOr": lambda a, b: a | b,
    "BitwiseXor": lambda a, b: a ^ b,
    "Neg": lambda a, _: -a,
    "Abs": lambda a, _: abs(a),
    "Relu": lambda a, _: max(a, 0),
    "BitwiseNot": lambda a, _: ~a,
    "Cast": lambda a, _: a,
}


def numbers(span: Span) -> range:
    return range(int(span[0]), int(span[1]) + 1)


@pytest.mark.parametrize("name", OPERATORS)
def test_every_result_is_within(name: str) -> None:
    for one, other in itertools.product(SPANS, SPANS):
        low, high = ARITHMETIC[name]([one, other])
        for a, b in itertools.product(numbers(one), numbers(other)):
            assert low <= OPERATORS[name](a, b) <= high, (one, other, a, b)


@pytest.mark.parametrize("exponent", [0, 1, 2, 3])
@pytest.mark.parametrize("span", SPANS)
def test_every_power_is_within(span: Span, exponent: int) -> None:
    low, high = ARITHMETIC["Pow"]([span, (exponent, exponent)])
    assert all(low <= a**exponent <= high for a in numbers(span))


@pytest.mark.parametrize("name", [n for n in OPERATORS if n not in ("Relu", "Mod")])
def test_what_has_no_end_stays_without(name: str) -> None:
    assert not math.isfinite(max(map(abs, ARITHMETIC[name]([ANY, ANY]))))


def test_no_end_times_nothing_is_nothing() -> None:
    assert ARITHMETIC["Mul"]([ANY, (0, 0)]) == (0, 0)


@pytest.mark.parametrize(
    ("name", "given", "made"),
    [
        ("Div", [(0, 10), (0.5, 2)], ANY),
        ("Pow", [(0, 9), (0.5, 0.5)], ANY),
        ("Where", [UNIT, (1, 2), (-3, 0)], (-3, 2)),
        ("Concat", [(1, 2), (5, 9)], (1, 9)),
        ("Pad", [(1, 2)], (0, 2)),
        ("Pad", [(1, 2), (8, 8), (-5, -5)], (-5, 2)),
        ("Trilu", [(3, 4)], (0, 4)),
        ("Floor", [(0.5, 2.5)], (-0.5, 2.5)),
        ("Ceil", [(0.5, 2.5)], (0.5, 3.5)),
        ("Round", [(0.5, 2.5)], (-0.5, 3.5)),
        ("BitwiseAnd", [(0, 10**9), (0, 255)], (0, 255)),
        ("ReduceProd", [(2, 3)], ANY),
        ("ReduceProd", [UNIT], UNIT),
    ],
)
def test_what_others_make_of_spans(name: str, given: list[Span], made: Span) -> None:
    assert ARITHMETIC[name](given) == made
