"""Discarded: what ``--fresh`` puts aside, set by set, so that none replaces another."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

KEPT = 20
"""Sets; where ``--fresh`` stands in a unit file, each start makes one."""

_NAME = re.compile(r"discarded-([1-9][0-9]{0,8})-.+")


def put_aside(root: Path, names: Iterable[str]) -> None:
    """Rename those of ``names`` that are there to ``discarded-N-NAME``, N being the next number of
    this folder. Of more than :data:`KEPT` sets the oldest go; where none of ``names`` is there, no
    set is added and none goes. Raises OSError."""
    found: dict[int, list[str]] = {}
    for name in os.listdir(root):
        if match := _NAME.fullmatch(name):
            found.setdefault(int(match[1]), []).append(name)
    number = max(found, default=0) + 1
    added = False
    for name in names:
        with suppress(FileNotFoundError):
            os.replace(root / name, root / f"discarded-{number}-{name}")
            added = True
    if not added:
        return
    for old in [n for n in found if n <= number - KEPT]:
        for name in found[old]:
            with suppress(FileNotFoundError):
                os.unlink(root / name)
