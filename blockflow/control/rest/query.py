"""Query: the parameters that stand behind an operation's path. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import parse_qsl

from blockflow.core.errors import RequestError

_TRUE, _FALSE = frozenset({"true", "1"}), frozenset({"false", "0"})
_MOST = 32
_MOST_DIGITS = 18


@dataclass(frozen=True, slots=True)
class Flag:
    """A boolean query parameter."""

    name: str
    default: bool
    meaning: str


@dataclass(frozen=True, slots=True)
class Number:
    """A query parameter that is a number from 0 on, and need not be given."""

    name: str
    meaning: str


WAIT = Flag("wait", True, "return when it is done instead of as soon as it is accepted")
DRY_RUN = Flag("dry_run", False, "only tell the plan, change nothing")
IF_EPOCH = Number("if_epoch", "only if this epoch is in force; else EPOCH_MISMATCH")


def read_query(
    text: str, flags: Sequence[Flag], numbers: Sequence[Number]
) -> tuple[dict[str, bool], dict[str, int]]:
    """What is said of ``flags``, or else their defaults, and of those ``numbers`` that are given.

    Raises:
        RequestError: INVALID_REQUEST.
    """
    told = {f.name: f.default for f in flags}
    counts: dict[str, int] = {}
    try:
        given = parse_qsl(text, keep_blank_values=True, max_num_fields=_MOST)
    except ValueError as e:
        many = f"more than {_MOST} query parameters"
        raise RequestError("INVALID_REQUEST", many, where="query") from e
    seen: set[str] = set()
    for name, value in given:
        word = value.lower()
        if name in seen:  # which of the two was meant? A dry run is no update
            what = f"query parameter {name[:40]} stands twice"
            raise RequestError("INVALID_REQUEST", what, where="query")
        seen.add(name)
        if name in told and word in _TRUE | _FALSE:
            told[name] = word in _TRUE
        elif any(n.name == name for n in numbers) and _is_number(value):
            counts[name] = int(value)
        else:
            known = [f"{f.name}=true|false" for f in flags] + [f"{n.name}=NUMBER" for n in numbers]
            raise RequestError(
                "INVALID_REQUEST",
                f"query parameter {name[:40]}={value[:40]}",
                where="query",
                hint=f"this resource takes: {', '.join(known) or 'none'}",
            )
    return told, counts


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS
