"""Numbers for people: no exponents, and the digits that show what is said of them. Pure."""

from __future__ import annotations

from math import floor, isfinite, log10

_DIGITS = 4
_GIVEN, _ALL = 12, 17
"""Of what a person gave no digit is lost; more than 17 a float does not have."""


def significant(value: float, digits: int = _DIGITS) -> str:
    """At least so many significant digits: ``16823``, ``0.02310``."""
    if not value or not isfinite(value):
        return f"{value:g}"
    rounded = float(f"{value:.{digits - 1}e}") or value  # 9.9996 is 10.00, and not 10.000
    return f"{value:.{max(0, digits - 1 - floor(log10(abs(rounded))))}f}"


def plain(value: float, digits: int = _DIGITS) -> str:
    """As :func:`significant`, without zeros at the end: ``16823``, ``2.5``."""
    text = significant(value, digits)
    return text.rstrip("0").rstrip(".") if "." in text else text


def given(value: float) -> str:
    """A number that somebody chose, a bound or a length, as it was chosen."""
    return plain(value, _GIVEN)


def beside(value: float, bound: float, text: str = "") -> str:
    """``value`` where ``bound`` stands beside it: as ``text`` (by default :func:`plain`), unless
    that hides on which side of the bound it lies. Then with as many digits as show it."""
    text = text or plain(value)
    for digits in range(_DIGITS + 1, _ALL + 1):
        if _side(float(text), bound) == _side(value, bound):
            break
        text = plain(value, digits)
    return text


def _side(value: float, bound: float) -> int:
    return (value > bound) - (value < bound)
