"""Text of others: on a person's terminal, where error messages and log lines quote models, clients
and files and an escape sequence in them would act; in messages; and how often a log repeats it."""

from __future__ import annotations

import re

_KEPT = "\t\n"
_BIDI = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
"""They change the order in which text around them is shown."""

_SHOWN = {
    ord(c): f"\\x{ord(c):02x}" if ord(c) < 256 else f"\\u{ord(c):04x}"
    for c in (*map(chr, range(0x20)), *map(chr, range(0x7F, 0xA0)), *_BIDI)
    if c not in _KEPT
}


def visible(text: str) -> str:
    """``text`` with its control characters as Python writes them (``\\x1b``), but for tabs and new
    lines."""
    return text.translate(_SHOWN)


def worth_a_line(count: int) -> bool:
    """Whether the log tells of the ``count``-th of many that are alike: of the 1st, 2nd, 4th, 8th,
    so that peers cannot fill it."""
    return count & (count - 1) == 0


def a_kind(value: object) -> str:
    """Of what type ``value`` is, with an article: ``a dict``, ``an int``."""
    name = type(value).__name__
    return f"{'an' if name[:1].lower() in tuple('aeiou') else 'a'} {name}"


_JSON = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}


def json_kind(value: object) -> str:
    """Of what type ``value``, of decoded JSON, is there."""
    return next((name for kind, name in _JSON.items() if isinstance(value, kind)), "number")


_HALF = re.compile("[\ud800-\udfff]")


def has_half(text: str) -> bool:
    """Whether half of a surrogate pair is in it: JSON can write one, UTF-8 and messages cannot."""
    return _HALF.search(text) is not None
