"""``blockflow bench``: numbers as people read them."""

from __future__ import annotations

import pytest

from blockflow.bench.numerals import beside, given, plain


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (16823.4, "16823"),
        (1e6, "1000000"),
        (117.93, "117.9"),
        (2.5, "2.5"),
        (9.99996, "10"),
        (0.0001234567, "0.0001235"),
        (-0.5, "-0.5"),
        (0.0, "0"),
        (float("inf"), "inf"),
    ],
)
def test_numbers_have_four_digits_and_no_exponent(value: float, text: str) -> None:
    assert plain(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(1e6, "1000000"), (15.123456, "15.123456"), (1.1, "1.1")]
)
def test_what_somebody_chose_loses_no_digit(value: float, text: str) -> None:
    assert given(value) == text


@pytest.mark.parametrize(
    ("value", "bound", "text"),
    [
        (200.4, 200.0, "200.4"),
        (199.99, 200.0, "199.99"),
        (200.0, 200.0, "200"),
        (15.31, 15.305, "15.31"),
        (1.5e-5, 1e-5, "0.000015"),
        (200.00000000000003, 200.0, "200.00000000000003"),
    ],
)
def test_two_numbers_that_differ_are_told_apart(value: float, bound: float, text: str) -> None:
    assert beside(value, bound) == text


def test_a_text_is_kept_where_it_shows_the_side() -> None:
    assert beside(150.0, 200.0, "150") == "150"
    assert beside(200.4, 200.0, "200") == "200.4"
