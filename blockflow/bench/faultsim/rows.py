"""What the tensors of a simulated system hold: enough to read off whose they are and how they came.

A block's artifact has a version, which is a part of its digest here.
"""

from __future__ import annotations

import struct

COLUMNS = ("request", "attempt", "versions", "sender")
"""Elements of a row, int64: the request's number, the attempt that computed it, the lowest and the
highest version of a block on its way (32 bits each), the last worker's incarnation."""

ROW = struct.Struct("<4q")


def digest_of(block: str, version: int) -> str:
    """Of the artifact of a block."""
    return f"{block}:{version}"


def version_of(digest: str) -> int:
    """Of the artifact with this digest."""
    return int(digest.rpartition(":")[2])
