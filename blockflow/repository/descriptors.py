"""Descriptors that become files."""

from __future__ import annotations

import os
from typing import BinaryIO, cast


def file_of(fd: int, mode: str = "rb") -> BinaryIO:
    """A binary file of a descriptor. Raises OSError, of a folder's say: then it is closed, too,
    which ``os.fdopen`` leaves to whoever opened it."""
    try:
        return cast(BinaryIO, os.fdopen(fd, mode))
    except BaseException:
        os.close(fd)
        raise
