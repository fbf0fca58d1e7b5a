"""Disk: questions to a folder that may not answer.

One of the network whose server is gone keeps whoever reads it, for hours, and no signal but SIGKILL
ends that. Who has others to look after, or a thread that others need, must not be kept.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from functools import partial, wraps
from pathlib import Path
from typing import Any, TypeVar, cast

from blockflow.control.waiters import fulfil
from blockflow.core.errors import SystemError_
from blockflow.core.scarcity import AWAY

PATIENCE_S = 8.0
"""A disk that has been silent for so long is not asked anything else until it has answered."""

GLANCE_S = 0.5
"""For whoever has something better to do than to wait. A disk that is merely busy has answered by
then."""

LOOK_S = 2.0
"""For what would be missed, by somebody who is not missed for that long. A disk that is merely busy
has answered by then even on a machine that has other things to do."""

log = logging.getLogger("blockflow.control")

T = TypeVar("T")
Method = TypeVar("Method", bound=Callable[..., Any])


class Disk:
    """Asks in threads of its own; for any thread to use.

    Args:
        folder: of a block repository.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._open: list[tuple[float, Future[Any]]] = []

    def ask(self, question: Callable[[], T], patience_s: float = PATIENCE_S) -> T:
        """The answer. Raises what ``question`` raises, and SystemError_: TIMEOUT when nothing comes
        in time; at once, where it is known that the folder does not answer."""
        since, answer = self._asked(question)
        if answer is not None:
            wait([answer], patience_s)
            if answer.done():
                return answer.result()
        silent_s = time.monotonic() - since
        raise SystemError_(
            "TIMEOUT",
            f"the repository {self._folder} has not answered for {silent_s:.1f} s",
            where="repository",
            hint="what serves goes on; nothing can be launched until its disk or server is back",
            details={AWAY: True},
        )

    def is_there(self, patience_s: float = PATIENCE_S) -> bool:
        """Whether there is such a folder that may be looked at. Raises as :meth:`ask`, where
        nothing is answered: ask this before what may take its time."""
        return self.ask(lambda: os.path.isdir(self._folder), patience_s)

    def _asked(self, question: Callable[[], T]) -> tuple[float, Future[T] | None]:
        """Since when the folder is silent, and the answer to come; None if that is too long."""
        now = time.monotonic()
        with self._lock:
            self._open = [(since, f) for since, f in self._open if not f.done()]
            since = self._open[0][0] if self._open else now
            if self._open and now - since >= PATIENCE_S:
                return since, None
            answer = begun(question)
            self._open.append((now, answer))
        return since, answer


class Patience:
    """For a thread that others need and that must have a folder's answer all the same: while it
    waits, the log says so, and whoever asks why the thread does nothing else is told.

    Args:
        what: is asked, for people.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._since: float | None = None

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Within it the folder is asked; one that is within another one counts for nothing."""
        if self._since is not None:
            yield
            return
        since = self._since = time.monotonic()
        word = threading.Timer(PATIENCE_S, self._say)
        word.daemon = True
        with suppress(RuntimeError):  # no further thread can be had
            word.start()
        try:
            yield
        finally:
            word.cancel()
            self._since = None
            if (waited := time.monotonic() - since) >= PATIENCE_S:
                log.warning("%s has answered, after %.1f s", self._what, waited)

    def _say(self) -> None:
        if reason := self.reason():  # it may have answered just now
            log.warning("%s", reason)

    def reason(self) -> str:
        """Why nothing else is done, '' = not for want of an answer, so far."""
        since = self._since
        if since is None or (silent_s := time.monotonic() - since) < PATIENCE_S:
            return ""
        return f"{self._what} has not answered for {silent_s:.1f} s, and is waited for"


def patiently(method: Method) -> Method:
    """A method that asks a folder within :meth:`Patience.asking` of its object's ``patience``."""

    @wraps(method)
    def asking(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self.patience.asking():
            return method(self, *args, **kwargs)

    return cast(Method, asking)


class Glance:
    """For a thread that others need: it asks one thing at a time, in a thread of its own, and what
    it wants of a folder that has not answered yet is left undone."""

    def __init__(self) -> None:
        self._latest: Future[Any] | None = None

    def at(self, act: Callable[[], T], otherwise: T) -> T:
        """What ``act`` gives, or raises; ``otherwise`` where that does not come soon."""
        if self._latest is None or self._latest.done():
            answer = self._latest = begun(act)
            wait([answer], LOOK_S)
            if answer.done():
                return answer.result()
        return otherwise


def begun(question: Callable[[], T]) -> Future[T]:
    """The future answer to a question that is asked in a thread of its own."""
    future: Future[T] = Future()
    answer = partial(fulfil, future, question)
    try:
        threading.Thread(target=answer, name="bf-disk", daemon=True).start()
    except RuntimeError:
        answer()  # no further thread can be had, and most disks answer
    return future
