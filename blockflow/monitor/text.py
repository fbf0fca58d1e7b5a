"""Numbers as people read them; ``-`` where there is none."""

from __future__ import annotations

from typing import Any, TypeGuard

NONE = "-"


def is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def count(value: Any) -> str:
    return f"{value:.0f}" if is_number(value) else NONE


def ms(value: Any) -> str:
    """Milliseconds with three significant digits; from ten seconds on, seconds."""
    if not is_number(value):
        return NONE
    if value >= 10_000:
        return f"{value / 1000:.1f}s"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def duration(value: Any) -> str:
    """Milliseconds with their unit: 220 ms, 11.8s."""
    text = ms(value)
    return text if text == NONE or text.endswith("s") else f"{text} ms"


def rate(value: Any) -> str:
    if not is_number(value):
        return NONE
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def ratio(value: Any) -> str:
    return f"{value:.2f}" if is_number(value) else NONE


def percent(value: Any) -> str:
    return f"{value:.0f}%" if is_number(value) else NONE


def size(value: Any) -> str:
    """Bytes in binary units: 312K, 45.1M, 1.2G."""
    if not is_number(value):
        return NONE
    number = float(value)
    for unit in ("B", "K", "M", "G"):
        if number < 1023.5 or unit == "G":  # what rounds to 1024 is one of the next
            break
        number /= 1024
    return f"{number:.0f}{unit}" if number >= 100 or unit == "B" else f"{number:.1f}{unit}"


def amount(value: Any) -> str:
    """A large count in thousands: 1,234, 25.6k, 25.6M."""
    if not is_number(value):
        return NONE
    if value < 10_000:
        return f"{value:,.0f}"
    return f"{value / 1e6:.1f}M" if value >= 999_950 else f"{value / 1e3:.1f}k"


def age(seconds: Any) -> str:
    """12 s, 3 min, 5 h, 2 d."""
    if not is_number(seconds):
        return NONE
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h" if seconds < 172_800 else f"{seconds / 86_400:.0f} d"
