"""JSON paths: where in a body something is wrong (RFC 9535). Pure.

What is quoted from a body is shortened: a name in it may have a megabyte, and stand in the path of
each of a hundred findings.
"""

from __future__ import annotations

import json
import re

_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

MOST_NAME = 100
"""Characters of a name that are quoted; more than any valid one has."""
MOST_PATH = 1000
"""Characters of a path to which no further step is added; only nonsense is nested so deeply."""


def shortened(text: str, most: int = MOST_NAME) -> str:
    """``text``, or its first ``most`` characters and three dots."""
    return text if len(text) <= most else f"{text[:most]}..."


def member(path: str, name: str) -> str:
    """JSON path of a member of the object at ``path`` (RFC 9535): by a dot where ``name`` is a
    plain word, else in brackets and quotes. Long names are :func:`shortened`, deep paths end."""
    name = shortened(name)
    if _PLAIN.fullmatch(name):
        return _longer(path, f".{name}")
    escaped = json.dumps(name)[1:-1].replace('\\"', '"').replace("'", "\\'")
    return _longer(path, f"['{escaped}']")


def item(path: str, index: int) -> str:
    """JSON path of an item of the list at ``path``."""
    return _longer(path, f"[{index}]")


def _longer(path: str, step: str) -> str:
    if len(path) <= MOST_PATH:
        return path + step
    return path if path.endswith("...") else f"{path}..."
