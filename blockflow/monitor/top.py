"""``blockflow top``: the live screen."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.live import Live

from blockflow.core.errors import BlockFlowError
from blockflow.monitor.screen import show, top_screen
from blockflow.monitor.view import Doc


class Top:
    """Fetches a status document per interval and shows what happened in between.

    Args:
        fetch: gives the status document; its error is shown, and the next interval tries again.
        interval_s: between two documents.
        console: where it is shown; a console that is no terminal gets one screen and the end.
        wait_key: waits up to so many seconds for keys and returns what they send ('' for none).
    """

    def __init__(
        self,
        fetch: Callable[[], Doc],
        interval_s: float,
        console: Console | None = None,
        wait_key: Callable[[float], str] | None = None,
    ) -> None:
        self._fetch = fetch
        self._interval_s = interval_s
        self._console = console or Console(highlight=False)
        self._wait_key = wait_key

    def run(self) -> None:
        """Show until q, Escape or Ctrl-C.

        Raises:
            BlockFlowError: the first document cannot be had.
        """
        status = self._fetch()
        if not self._console.is_terminal:
            show(top_screen(status, None, self._console.width), self._console)
            return
        before: Doc | None = None
        note = ""
        with (
            contextlib.suppress(KeyboardInterrupt),
            self._keys() as wait_key,
            Live(console=self._console, screen=True, auto_refresh=False) as live,
        ):
            while True:
                width, height = self._console.size
                screen = top_screen(status, before, width, note, height)
                live.update(screen, refresh=True)
                key = wait_key(self._interval_s)
                if key[:1] in ("q", "Q") or key == "\x1b":
                    return
                try:
                    before, status, note = status, self._fetch(), ""
                except BlockFlowError as exc:
                    note = str(exc)

    @contextlib.contextmanager
    def _keys(self) -> Iterator[Callable[[float], str]]:
        if self._wait_key is not None:
            yield self._wait_key
        elif sys.stdin.isatty():
            with _single_keys():
                yield _wait_stdin
        else:
            yield _sleep


def _sleep(seconds: float) -> str:
    time.sleep(seconds)
    return ""


def _wait_stdin(seconds: float) -> str:
    readable, _, _ = select.select([sys.stdin], [], [], seconds)
    # All that has come: an arrow key, say, sends several bytes, of which Escape is the first.
    return os.read(sys.stdin.fileno(), 64).decode(errors="replace") or "q" if readable else ""


@contextlib.contextmanager
def _single_keys() -> Iterator[None]:
    """Keys arrive at once and unseen; the terminal is put back as it was."""
    import termios
    import tty

    fd = sys.stdin.fileno()
    was: list[Any] = termios.tcgetattr(fd)
    try:
        tty.setcbreak(fd)
        yield
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, was)
