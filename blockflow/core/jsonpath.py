"""JSON paths: where in a body something is wrong (RFC 9535). Pure."""

from __future__ import annotations

import json
import re

_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def member(path: str, name: str) -> str:
    """JSON path of a member of the object at ``path`` (RFC 9535): by a dot where ``name`` is a
    plain word, else in brackets and quotes."""
    if _PLAIN.fullmatch(name):
        return f"{path}.{name}"
    escaped = json.dumps(name)[1:-1].replace('\\"', '"').replace("'", "\\'")
    return f"{path}['{escaped}']"
