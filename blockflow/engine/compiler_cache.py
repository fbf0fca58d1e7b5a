"""Compiler cache: where torch's compiler keeps libraries that it loads again."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from blockflow.core.caches import INDUCTOR, private_compiler_cache


@contextmanager
def compiler_cache(beside: Path) -> Iterator[None]:
    """Torch's compiler finds nothing there that somebody else has made: it is in the user's cache
    or, where nothing is known of one, or it cannot be made (HOME is / in many a container), in a
    folder ``beside`` the target that goes again."""
    before = os.environ.get(INDUCTOR)
    usable = private_compiler_cache(os.environ)
    try:
        if usable:
            Path(os.environ[INDUCTOR]).mkdir(0o700, parents=True, exist_ok=True)
    except OSError:
        usable = False
    if usable:
        yield
        return
    with tempfile.TemporaryDirectory(dir=beside) as folder:
        os.environ[INDUCTOR] = folder
        try:
            yield
        finally:
            del os.environ[INDUCTOR]
            os.environ.update({} if before is None else {INDUCTOR: before})
