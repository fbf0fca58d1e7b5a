"""Refusals: errors as JSON that is never large, whatever the request had in it. Pure.

Errors quote what is wrong. A body of a megabyte may be wrong in many places, and long in each.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from blockflow.core.errors import BlockFlowError
from blockflow.core.jsonpath import shortened

MOST_BYTES = 256 * 1024
"""Of any refusal."""

_ROOM = 128 * 1024
"""Bytes of JSON after which a list has no further item. What was begun by then is finished, and a
problem's three texts are 72 KiB at the most: a character may take twelve bytes."""
_MOST_TEXT = 2000
_MOST_MEMBERS = 16
"""An object with no more is whole: an error, a problem."""


def error_text(error: BlockFlowError) -> str:
    """``{"error": {...}}`` as JSON of at most :data:`MOST_BYTES`."""
    return json.dumps({"error": _Fitted().value(error.to_dict())})


class _Fitted:
    """Plain JSON values, and what room is left for them."""

    def __init__(self) -> None:
        self._left = _ROOM

    def value(self, value: Any) -> Any:
        if isinstance(value, Mapping):
            return self._object(value)
        if isinstance(value, list | tuple):
            return self._list(value)
        if isinstance(value, str):
            value = shortened(value, _MOST_TEXT)
        self._left -= len(json.dumps(value))
        return value

    def _object(self, value: Mapping[str, Any]) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for key, inner in value.items():
            name = str(key)
            if self._left <= 0 and len(out) >= _MOST_MEMBERS:
                break
            self._left -= len(name) + 4
            out[shortened(name)] = self.value(inner)
        return out

    def _list(self, value: list[Any] | tuple[Any, ...]) -> list[Any]:
        out: list[Any] = []
        for i, inner in enumerate(value):
            if self._left <= 0:
                left_out = f"and {len(value) - i} more"
                problem = isinstance(inner, Mapping) and "path" in inner
                out.append({"path": "$", "message": left_out} if problem else left_out)
                break
            out.append(self.value(inner))
        return out
