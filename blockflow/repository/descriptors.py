"""Descriptors that become files."""

from __future__ import annotations

import os
from typing import BinaryIO, cast


def file_of(fd: int) -> BinaryIO:
    """A file to read bytes from. Raises OSError, of a folder's say: then the descriptor is closed,
    too, which ``os.fdopen`` leaves to whoever opened it."""
    try:
        return cast(BinaryIO, os.fdopen(fd, "rb"))
    except BaseException:
        os.close(fd)
        raise
