"""Text forms of the simulator's options: ``name:key=value,key=value``, with typed errors."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from blockflow.bench.options import nonsense

OWN_POLICIES: Final = "topology"
"""In place of a policy's name: every stage keeps the policy that its topology gives it."""

MAX_NUMBER: Final = 1e9

_COMMAS: Final = re.compile(r",(?![^\[]*\])")
"""Commas that part options: those outside of ``[...]``."""


def whole(text: str, where: str, least: int, most: int) -> int:
    """A whole number in ``least..most``.

    Raises:
        RequestError: INVALID_REQUEST.
    """
    try:
        value = int(text.strip())
    except ValueError:
        raise nonsense(f"{text!r} is no whole number", where) from None
    if not least <= value <= most:
        raise nonsense(f"{value} is outside {least}..{most}", where)
    return value


class Options:
    """``key=value,key=value`` with its values as text; every problem names ``where``.

    Args:
        text: may be empty.
        where: the option that it came from.
        known: the keys that may stand there; None = any.

    Raises:
        RequestError: INVALID_REQUEST: no ``=``, a key twice, an unknown key.
    """

    def __init__(self, text: str, where: str, known: Sequence[str] | None = None) -> None:
        self._where = where
        self._values: dict[str, str] = {}
        for part in _COMMAS.split(text) if text.strip() else ():
            key, sign, value = (p.strip() for p in part.partition("="))
            if not sign or not key or not value:
                raise nonsense(f"{part.strip()!r} is not key=value", where)
            if key in self._values:
                raise nonsense(f"{key!r} stands twice", where)
            if known is not None and key not in known:
                raise nonsense(f"unknown key {key!r}", where, f"known: {', '.join(known)}")
            self._values[key] = value

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._values)

    def number(self, key: str, default: float | None = None, *, above: float) -> float:
        """A number > ``above``, and not beyond reason."""
        text = self._text(key, default)
        try:
            value = float(text)
        except ValueError:
            raise nonsense(f"{key}={text} is no number", self._where) from None
        if not above < value <= MAX_NUMBER:
            bounds = f"above {above:g} and at most {MAX_NUMBER:g}"
            raise nonsense(f"{key}={text} must be {bounds}", self._where)
        return value

    def whole(self, key: str, default: int | None, least: int, most: int) -> int:
        """A whole number in ``least..most``."""
        return whole(self._text(key, default), f"{self._where} {key}", least, most)

    def plain(self) -> dict[str, Any]:
        """All values: JSON scalars, lists of them, else text."""
        return {key: _value(value) for key, value in self._values.items()}

    def _text(self, key: str, default: float | int | None) -> str:
        if key in self._values:
            return self._values[key]
        if default is None:
            raise nonsense(f"{key}= is missing", self._where)
        return str(default)


def parse_policy(text: str, where: str = "--policy") -> dict[str, Any]:
    """``name`` or ``name:option=value,...`` as the topology has it: ``{"policy": name, ...}``.

    ``topology`` is the empty mapping: what the topology says.

    Raises:
        RequestError: INVALID_REQUEST.
    """
    name, _, rest = text.partition(":")
    if not name.strip():
        raise nonsense(f"{text!r} names no policy", where, "for example window:max_rows=8")
    if text.strip() == OWN_POLICIES:
        return {}
    options = Options(rest, where).plain()
    if "policy" in options:
        raise nonsense("'policy' is no option: the name stands before the colon", where)
    return {"policy": name.strip(), **options}


def policy_label(spec: Mapping[str, Any]) -> str:
    """The text form of a policy; :func:`parse_policy` reads it back. Empty: the topology's own."""
    if not spec:
        return OWN_POLICIES
    options = ",".join(f"{k}={_shown(v)}" for k, v in spec.items() if k != "policy")
    return f"{spec['policy']}:{options}" if options else str(spec["policy"])


def _shown(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{','.join(_shown(v) for v in value)}]"
    return value if isinstance(value, str) else json.dumps(value)


def _value(text: str) -> Any:
    """A scalar, or ``[a,b]``: a list of them, quotes not needed."""
    if text.startswith("[") and text.endswith("]"):
        return [_scalar(v.strip()) for v in text[1:-1].split(",") if v.strip()]
    return _scalar(text)


def _scalar(text: str) -> Any:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, str | bool | int | float) else text
