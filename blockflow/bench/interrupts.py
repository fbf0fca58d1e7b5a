"""Ctrl-C, SIGTERM and SIGHUP (the terminal was closed) end a run once and in order: what it started
is stopped, its folders go, and what it has measured until then can be kept.

Left alone, the last two end a Python process on the spot: no ``with`` is left, and scratch folders,
child processes and shared memory stay behind.
"""

from __future__ import annotations

import signal
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Protocol

INTERRUPTED = 130
"""The exit status of a run that was ended so, as shells say it."""

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""What a person, a service or a terminal that is closed ends a command with."""


@contextmanager
def interruptible() -> Iterator[None]:
    """The first Ctrl-C, SIGTERM or SIGHUP raises KeyboardInterrupt inside; :func:`hold` takes any
    other.

    That is what leaves the context, whatever others have made of it: an exit status, or an error of
    their own (extension modules do, while they are imported). The signals mean again what they did
    when it ends. Only for the main thread.
    """
    heard: list[int] = []

    def interrupt(number: int, frame: types.FrameType | None) -> None:
        heard.append(number)
        hold()
        raise KeyboardInterrupt

    # None is a handler that is not Python's: it cannot be set again.
    before = {number: signal.getsignal(number) or signal.SIG_DFL for number in ENDING}
    for number, handler in before.items():
        # Shells have background commands ignore Ctrl-C, which is meant for another one, and nohup
        # has any ignore SIGHUP.
        if handler is not signal.SIG_IGN:
            signal.signal(number, interrupt)
    try:
        yield
    except BaseException as exc:
        if not heard or (isinstance(exc, SystemExit) and not exc.code):
            raise
        raise KeyboardInterrupt from exc
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def hold() -> None:
    """Ignore them from now on: processes end, folders go and figures are written undisturbed."""
    for number in ENDING:
        # Not SIG_IGN: a process that is started meanwhile would inherit it and could not be ended.
        signal.signal(number, _ignore)


def heard() -> bool:
    """Whether one of them has come: what fails from then on may fail for it, whatever it says."""
    return signal.getsignal(signal.SIGINT) is _ignore


@contextmanager
def unbroken() -> Iterator[None]:
    """What comes inside is heard when the context ends: an exception amid the import of torch may
    end the process in native code, with a core dump and no word."""
    asked: list[int] = []
    mine = threading.current_thread() is threading.main_thread()
    heard = {n: signal.getsignal(n) for n in ENDING} if mine else {}
    before = {n: handler for n, handler in heard.items() if callable(handler)}
    for number in before:
        signal.signal(number, lambda number, frame: asked.append(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if asked:
            signal.raise_signal(asked[0])


class Main(Protocol):
    """A benchmark's: by default it takes the arguments that the process got."""

    def __call__(self, argv: Sequence[str] | None = None) -> int: ...


def orderly(main: Callable[[list[str]], int]) -> Main:
    """For the ``main`` of a benchmark: those signals end it in order, with a line that says so and
    the status :data:`INTERRUPTED`."""

    @wraps(main)
    def run(argv: Sequence[str] | None = None) -> int:
        try:
            with interruptible():
                return main(list(sys.argv[1:] if argv is None else argv))
        except KeyboardInterrupt:
            sys.stderr.write("interrupted; what was started was stopped\n")
            return INTERRUPTED

    return run


def _ignore(number: int, frame: types.FrameType | None) -> None:
    """Somebody has asked already."""
