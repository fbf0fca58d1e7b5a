"""What the tensors of a simulated system hold: enough to read off whose they are and how they came.

A block's artifact has a version, which is a part of its digest here.
"""

from __future__ import annotations

import struct

COLUMNS = ("request", "attempt", "versions", "sender")
"""Elements of a row, int64: the request's number, the attempt that computed it, the version of each
block on its way (:func:`with_version`), the last worker's incarnation."""

ROW = struct.Struct("<4q")
_BITS = 10
_MOST = 2**_BITS - 1


def digest_of(block: str, version: int) -> str:
    """Of the artifact of a block."""
    return f"{block}:{version}"


def version_of(digest: str) -> int:
    """Of the artifact with this digest."""
    return int(digest.rpartition(":")[2])


def with_version(versions: int, place: int, version: int) -> int:
    """``versions`` of a way that leads through the block at this place (0..5) as well. Versions
    count from 1, and come round after 1023; 0 is a block that is not on the way."""
    return versions | ((version - 1) % _MOST + 1) << place * _BITS
