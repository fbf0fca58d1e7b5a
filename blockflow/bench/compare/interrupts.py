"""Ctrl-C and SIGTERM end a run once; what it has measured until then is kept."""

from __future__ import annotations

import signal
import types
from collections.abc import Iterator
from contextlib import contextmanager

_NUMBERS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def interruptible() -> Iterator[None]:
    """The first Ctrl-C or SIGTERM raises KeyboardInterrupt inside; :func:`hold` takes any other.

    Both mean again what they did when the context ends.
    """
    # None is a handler that is not Python's: it cannot be set again.
    before = {number: signal.getsignal(number) or signal.SIG_DFL for number in _NUMBERS}
    for number, handler in before.items():
        # Shells have background commands ignore Ctrl-C, which is meant for another one.
        if handler is not signal.SIG_IGN:
            signal.signal(number, _interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def hold() -> None:
    """Ignore both from now on: processes end, the worktree goes and the figures are written."""
    for number in _NUMBERS:
        signal.signal(number, signal.SIG_IGN)


def _interrupt(number: int, frame: types.FrameType | None) -> None:
    hold()
    raise KeyboardInterrupt
