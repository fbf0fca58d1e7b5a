"""Values of options: ``KEY=JSON``."""

from __future__ import annotations

import json
from typing import Any

from blockflow.core.errors import RequestError

_PYTHONS = {
    "True": "true",
    "False": "false",
    "None": "null",
    "nan": "NaN",
    "inf": "Infinity",
    "-inf": "-Infinity",
}
"""How Python writes what JSON writes otherwise: as strings they would be true, all of them."""


def json_value(text: str, where: str) -> Any:
    """The value that ``text`` is in JSON; what is no JSON is a string.

    Raises:
        RequestError: INVALID_REQUEST: it looks like a value of Python's.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        if text in _PYTHONS:
            raise RequestError(
                "INVALID_REQUEST",
                f"{text} is Python's, not JSON's",
                where=where,
                hint=f"write {_PYTHONS[text]}; if the string is meant, '\"{text}\"'",
            ) from None
        return text
