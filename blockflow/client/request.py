"""A request on its way, and what can be known to be wrong with one before it leaves. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from blockflow.client.sharing import Slot
from blockflow.core import limits
from blockflow.core.errors import RequestError
from blockflow.core.text import a_kind
from blockflow.wire.client import MAX_TRIES
from blockflow.wire.tensor import TensorDesc

_RETRY_AFTER_MS = 50
"""Callers count on such a number with OVERLOADED. Which answer is next, and when, is not known."""

_MOST_SHOWN = 500

_NAMES_BYTES = limits.MAX_HEADER_BYTES - 512
"""Of all names in a request's header together; what else is in it needs some 200."""


@dataclass(slots=True)
class Upload:
    """A body that travels in ``slot``: to be ``written`` there before its header is sent."""

    slot: Slot
    body: Any
    written: bool = False


@dataclass(slots=True)
class Pending:
    """``body`` is kept until it was sent; one that went by slot or may go again, until the answer.

    ``retries`` is how often it may be sent again, under the same id, when the connection broke with
    it in flight; ``sendings`` how often it was sent. ``number`` orders the requests as they were
    sent; 0 = not sent yet. ``nbytes`` are those of ``desc``.
    """

    request_id: bytes
    tasks: tuple[str, ...]
    desc: TensorDesc
    body: Any
    submitted_ns: int
    deadline_ns: int
    sent: bool = False
    number: int = 0
    upload: Upload | None = None
    message_only: bool = False
    retries: int = 0
    sendings: int = 0
    nbytes: int = 0

    @property
    def tries(self) -> int:
        """For the next sending: the how manyth it is; 0 where there is only one."""
        return self.sendings + 1 if self.retries else 0


def shown(value: object) -> str:
    """A value of a caller's, for an error's text: of any type, as far as it can be shown."""
    try:
        text = repr(value)
    except Exception:  # a number of more digits than Python writes, say
        return f"{a_kind(value)} that cannot be shown"
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def duplicate(request_id: bytes, why: str) -> RequestError:
    """The id is not free."""
    return RequestError(
        "DUPLICATE_REQUEST",
        why,
        where=request_id.hex(),
        hint="let the SDK choose the ids, or wait for the first one's answer",
    )


def too_many(max_pending: int, address: str) -> RequestError:
    """So many requests have no answer yet."""
    return RequestError(
        "OVERLOADED",
        f"{max_pending} requests of this client wait for an answer",
        where=address,
        hint="wait for answers, or raise max_pending",
        retry_after_ms=_RETRY_AFTER_MS,
    )


def expired(p: Pending) -> RequestError:
    """Nobody has answered in time."""
    ms = (p.deadline_ns - p.submitted_ns) // 1_000_000
    look = "`blockflow top` for what is slow" if p.sent else "`blockflow status`: does it run?"
    return RequestError(
        "DEADLINE_EXCEEDED",
        f"no answer within {ms} ms" + ("" if p.sent else " (it could not be sent)"),
        where=p.request_id.hex(),
        hint=f"give more time, or look at {look}",
    )


def published_names(tasks: str | Iterable[str]) -> tuple[str, ...]:
    """The names in ``tasks``, a str being one; INVALID_REQUEST unless all can be tasks' names."""
    try:
        if isinstance(tasks, bytes | bytearray | memoryview):  # a sequence as well, of numbers
            raise TypeError
        names = (tasks,) if isinstance(tasks, str) else tuple(tasks)
    except TypeError:
        why = f"tasks is a name or a sequence of names, not {type(tasks).__name__}"
        raise RequestError("INVALID_REQUEST", why, where="tasks") from None
    most = limits.MAX_NAME_CHARS
    if not all(map(_is_name, names)):
        raise _bad_tasks(names, f"a task name is a string of 1..{most} printable characters")
    return names


def task_names(tasks: str | Iterable[str]) -> tuple[str, ...]:
    """The tasks of a request; INVALID_REQUEST unless they are 1..16 distinct names."""
    names = published_names(tasks)
    if not 1 <= len(names) <= limits.MAX_TASKS_PER_REQUEST:
        most = limits.MAX_TASKS_PER_REQUEST
        raise _bad_tasks(names, f"{len(names)} tasks, 1..{most} are possible")
    if len(set(names)) != len(names):
        raise _bad_tasks(names, "a task is named twice")
    nbytes = len("".join(names).encode())
    if nbytes > _NAMES_BYTES:
        raise _bad_tasks(names, f"their names have {nbytes} bytes, {_NAMES_BYTES} are possible")
    return names


def _bad_tasks(names: tuple[str, ...], why: str) -> RequestError:
    return RequestError("INVALID_REQUEST", why, where=f"tasks={shown(list(names))}")


def check_retries(retries: int) -> None:
    """Raise INVALID_REQUEST unless so many retries are possible."""
    if type(retries) is not int or not 0 <= retries < MAX_TRIES:
        raise RequestError(
            "INVALID_REQUEST",
            f"retries is a number from 0 to {MAX_TRIES - 1}, not {shown(retries)}",
            where="retries",
        )


def milliseconds(seconds: float) -> int:
    """Whole ones, 0 for none or less; INVALID_REQUEST unless it is a finite number."""
    try:
        if seconds != seconds:
            raise ValueError("not a number")
        return max(1, round(seconds * 1000)) if seconds > 0 else 0
    except (TypeError, ValueError, ArithmeticError) as exc:
        why = f"{shown(seconds)} is not a number of seconds"
        raise RequestError("INVALID_REQUEST", why) from exc


def check_deadline(given_s: float | None, deadline_ms: int | None) -> None:
    """Raise INVALID_REQUEST, with the seconds that were given, unless the deadline is possible."""
    if deadline_ms is not None and not 1 <= deadline_ms <= limits.MAX_DEADLINE_MS:
        most = limits.MAX_DEADLINE_MS / 1000
        raise RequestError(
            "INVALID_REQUEST",
            f"a deadline is more than 0 and at most {most:g} seconds, not {shown(given_s)}",
            where="deadline",
        )


def _is_name(task: object) -> bool:
    """Whether it can be a task's name: text without halves of characters, which nothing sends, and
    without what would act on the terminal that an error is shown on."""
    if not isinstance(task, str) or not 0 < len(task) <= limits.MAX_NAME_CHARS:
        return False
    return task.isprintable()
