"""Dims as formulas: parsed, evaluated, bounded, put together."""

from __future__ import annotations

import random
import re
from itertools import product

import pytest

from blockflow.core.dims import bounds_of, is_formula, is_name, names_in, size_of, substituted


def formula(drawn: random.Random, names: str, depth: int) -> str:
    """A random one of one-letter names, at least one of which is in it."""

    def part(depth: int) -> str:
        if depth == 0 or drawn.random() < 0.2:
            return drawn.choice([*names, str(drawn.randint(1, 9))])
        left, right = part(depth - 1), part(depth - 1)
        kind = drawn.choice(["+", "-", "*", "//", "%", "min", "max"])
        if kind in ("//", "%"):
            right = str(drawn.randint(1, 5))
        return f"{kind}({left}, {right})" if kind.isalpha() else f"({left} {kind} {right})"

    return f"{part(depth)} + {drawn.choice(names)}"


@pytest.mark.parametrize(
    ("dim", "binding", "size"),
    [
        (7, {}, 7),
        ("length", {"length": 9}, 9),
        ("(length - 5)//4", {"length": 22}, 4),
        ("length//2 + 1", {"length": 9}, 5),
        ("(h//16)*(w//16) + 1", {"h": 224, "w": 64}, 57),
        ("-(-length//2)", {"length": 9}, 5),
        ("min(length, 512)", {"length": 600}, 512),
        ("max(1, length//4)", {"length": 2}, 1),
        ("length % 3", {"length": 8}, 2),
    ],
)
def test_a_formula_means_what_python_means(
    dim: int | str, binding: dict[str, int], size: int
) -> None:
    assert size_of(dim, binding) == size
    assert names_in(dim) == tuple(binding)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "seq-",
        "class",
        "2*3",
        "length/2",
        "length**2",
        "f(length)",
        "min(length)",
        "min(length, 2, key=1)",
        "length.bit_length()",
        "length if length else 1",
        "True*length",
        "1.5*length",
        "'a'*length",
        "[length]",
        "länge//2",
        "length + " * 80 + "1",
        "-" * 200 + "length",
        "length\0",
        "lambda: length",
        "__import__('os')",
    ],
)
def test_what_is_no_formula_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no dim"):
        names_in(text)


def test_names_and_formulas_are_told_apart() -> None:
    assert is_name("length") and not is_formula("length")
    assert is_formula("length//2") and not is_name("length//2")
    assert not is_name(3) and not is_formula(3)


def test_putting_random_formulas_together_changes_no_value() -> None:
    drawn = random.Random(2)
    for _ in range(300):
        inner, outer = formula(drawn, "a", 2), formula(drawn, "n", 3)
        made = substituted(outer, {"n": inner})
        for a in range(1, 12):
            n = size_of(inner, {"a": a}) if isinstance(inner, str) else inner
            assert size_of(made, {"a": a}) == size_of(outer, {"n": n}), (outer, inner, made)


def test_what_grows_too_long_is_refused() -> None:
    long = "+".join(["n"] * 100)
    with pytest.raises(ValueError, match="is no dim"):
        substituted(long, {"n": long})


def test_bounds_hold_for_random_formulas() -> None:
    drawn = random.Random(1)

    ranges = {"a": (2, 7), "b": (1, 5)}
    exact = 0
    for _ in range(500):
        text = formula(drawn, "ab", 3)
        names = names_in(text)
        lo, hi = bounds_of(text, ranges)
        sizes = [size_of(text, {"a": a, "b": b}) for a, b in product(range(2, 8), range(1, 6))]
        assert lo <= min(sizes) and max(sizes) <= hi, text
        once = all(len(re.findall(rf"\b{n}\b", text)) == 1 for n in names)
        if once and "%" not in text:
            assert (lo, hi) == (min(sizes), max(sizes)), text
            exact += 1
    assert exact > 30


def test_bounds_are_exact_where_each_name_stands_once() -> None:
    assert bounds_of("(length - 5)//4", {"length": (16, 200)}) == (2, 48)
    assert bounds_of("-(-length//2)", {"length": (3, 9)}) == (2, 5)
    assert bounds_of("(h//16)*(w//16)", {"h": (32, 64), "w": (16, 48)}) == (2, 12)


def test_a_remainder_is_what_is_divided_where_that_is_smaller() -> None:
    assert bounds_of("length % 9", {"length": (2, 7)}) == (2, 7)
    assert bounds_of("length % 7", {"length": (2, 7)}) == (0, 6)
    assert bounds_of("(length - 5) % 4", {"length": (3, 6)}) == (0, 3)


def test_dividing_by_zero_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="divides by zero"):
        size_of("4//length", {"length": 0})
    with pytest.raises(ValueError, match="may divide by zero"):
        bounds_of("4//(length - 1)", {"length": (1, 3)})


def test_formulas_are_put_into_formulas() -> None:
    inner = "(length - 5)//4"
    outer = substituted("n//2 + 1", {"n": inner})
    assert isinstance(outer, str)
    for length in range(5, 60):
        assert size_of(outer, {"length": length}) == ((length - 5) // 4) // 2 + 1
    assert outer == "(length - 5) // 8 + 1", "short enough to be read"
    assert substituted("n//2", {"n": 9}) == 4
    assert substituted("(n + 3)//2 - 1", {"n": "(k - 2)//3 + 1"}) == "(k + 10) // 6 - 1"
    assert substituted("n", {"n": "m"}) == "m"
    assert substituted("min(n, m)", {"n": "k - 1", "m": 3}) == "min(k - 1, 3)"
    assert substituted(5, {}) == 5
    assert substituted("-(-n//2)", {"n": "k"}) == "-(-k // 2)"
    assert substituted("-(-n//2)", {"n": 9}) == 5
    assert substituted("n - 3", {"n": "k - 2"}) == "k - 5"
    assert substituted("n - 3", {"n": "k + 3"}) == "k"
    assert substituted("max(n, m)", {"n": -4, "m": "k"}) == "max(-4, k)"
    assert substituted("3 - n", {"n": "k"}) == "3 - k"
