"""What the disk refuses, as a typed error with the remedy that a comparison has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from blockflow.bench.mlperf.job import disk
from blockflow.core.errors import BlockFlowError


@contextmanager
def room(where: Path, remedy: str) -> Iterator[None]:
    """Turns what goes wrong on writing into a typed error; other errors pass.

    Raises:
        BlockFlowError: NO_SPACE for a full disk, else INVALID_REQUEST.
    """
    try:
        yield
    except OSError as refused:
        try:
            with disk(where):
                raise
        except BlockFlowError as error:
            error.hint = remedy
            raise error from refused
