"""Generations: the two files of the state, each whole and with a checksum, and what they hold.

What was read and is broken may be replaced by the former one. What could not be read (a file of
another user, a failing disk, no descriptor left), or is a later release's, may be whole: nothing
may take its place unasked.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from blockflow.control.documents import LaterFormat, read_sealed, seal
from blockflow.control.stored import FORMAT, StoredState
from blockflow.core.scarcity import is_scarcity

CURRENT = "state.json"
PREVIOUS = "state.previous.json"
MISSING = "missing"
MAX_STATE_BYTES = 16 * 1024 * 1024

_NO_FILE = frozenset({errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.ENODEV, errno.ENOTDIR})
"""How a link, a folder or a device in the place of a file is told."""

_READERS: Mapping[int, Callable[[dict[str, Any]], StoredState]] = {
    1: StoredState.from_format_1,
    FORMAT: StoredState.from_dict,
}


def latest_generation(
    root: Path, *, strict: bool = False
) -> tuple[StoredState | None, dict[str, str]]:
    """The latest generation in ``root`` that can be read, None without one; and, by their names,
    what is wrong with those before it. Changes nothing, and needs no lock.

    Args:
        root: the state folder.
        strict: a file that is there and cannot be read raises OSError. One that there is no room
            (a descriptor, memory) to read always does: soon there is, and it is whole.
    """
    found: dict[str, str] = {}
    foreign = False
    for name in (CURRENT, PREVIOUS):
        try:
            state = read_generation(root / name)
            if not foreign:
                return state, found
            found[name] = "the state before that"
        except FileNotFoundError:
            found[name] = MISSING
        except LaterFormat as e:
            found[name], foreign = str(e), True
        except ValueError as e:
            found[name] = str(e) or type(e).__name__
        except OSError as e:
            if is_scarcity(e) or (strict and e.errno not in _NO_FILE):
                raise
            found[name] = e.strerror or type(e).__name__
    return None, found


def read_generation(path: Path) -> StoredState:
    """One generation. Raises OSError or ValueError (which says what is wrong with it)."""
    found, body = read_sealed(path, MAX_STATE_BYTES, _READERS)
    return _READERS[found](body)


def sealed(state: StoredState) -> tuple[StoredState, bytes]:
    """``state`` as a file that can be read again, and what is in it: the oldest epochs are
    forgotten where it would be too large.

    Raises:
        ValueError: the epoch in force alone is too large.
    """
    while len(data := seal(state.to_dict(), FORMAT)) > MAX_STATE_BYTES:
        if len(state.history) < 2:
            raise ValueError(f"{len(data)} bytes of state, at most {MAX_STATE_BYTES} are kept")
        state = replace(state, history=state.history[len(state.history) // 2 :])
    return state, data
