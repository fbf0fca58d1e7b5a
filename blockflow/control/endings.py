"""What the dead have left behind that says why they ended, and what it means for their successors.
Pure."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence

from blockflow.control.events import Exited
from blockflow.control.fleet import TICKETS_SHOWN, Crash, LastWork, Life
from blockflow.control.memory import starved
from blockflow.control.supervision import RestartLedger, Verdict, spread
from blockflow.core.errors import SystemError_
from blockflow.core.scarcity import no_room
from blockflow.launch.child import CRASH_STATUS
from blockflow.launch.process import EXIT_START_FAILED, describe_exit
from blockflow.tensormq.atwork import Work
from blockflow.wire.data import REQUEST_ID_BYTES

FATAL = "Fatal Python error: "
"""How faulthandler begins, which tells where a process was when a signal ended it."""

ABORTED = FATAL + "Aborted"

_TYPED = f"{SystemError_.__module__}."
"""How a traceback's last line begins where the exception is one of BlockFlow's own."""


_WORD_NS = 2_000_000_000
"""How long a dead process's last words may be on their way."""


class LastWords:
    """The dead of whom something may be heard yet: why a start failed is said just before the end,
    and may be overtaken by it.

    Args:
        find: gives the life of an incarnation.
    """

    def __init__(self, find: Callable[[int], Life | None]) -> None:
        self._find = find
        self._dead: dict[int, tuple[int, Exited]] = {}

    def add(self, death: Exited, now_ns: int) -> None:
        self._dead[death.incarnation] = (now_ns + _WORD_NS, death)

    def deadlines(self) -> list[int]:
        """When :meth:`heard_out` is due at the latest."""
        return [due for due, _ in self._dead.values()]

    def heard_out(self, now_ns: int) -> list[Exited]:
        """Those of whom nothing more is to be expected; each is given once."""
        out = []
        for incarnation, (due, death) in list(self._dead.items()):
            life = self._find(incarnation)
            silent = death.status == EXIT_START_FAILED and life is not None and life.error is None
            if not silent or now_ns >= due:
                del self._dead[incarnation]
                out.append(death)
        return out


def last_words(status: int, log_tail: Sequence[str]) -> str:
    """What the exception, or the library that aborted, has said; "" where nothing did.

    Args:
        status: exit status, or minus the signal's number.
        log_tail: of :func:`blockflow.control.logfiles.tail`.
    """
    if status == CRASH_STATUS and log_tail:
        return log_tail[-1]  # the traceback's last line
    if status == -signal.SIGABRT and log_tail[1:2] == (ABORTED,):
        return log_tail[0]  # ZeroMQ, C++ and CUDA say what they abort for
    return ""


def lacking(name: str, words: str, cause: str) -> SystemError_ | None:
    """NO_SPACE for a process that could not even say that it cannot start, for want of its first
    threads, say; None where its last ``words`` are of something else."""
    return no_room(SystemError_("INTERNAL", words), f"{name}: {cause}", name)


def last_work(life: Life, works: Sequence[Work], now_ns: int) -> tuple[LastWork, ...]:
    """What a process was executing at its end."""
    blocks = {stage: block for block, stage in life.stages.items()}
    return tuple(
        LastWork(
            blocks.get(w.stage, f"stage {w.stage}"),
            round(max(0, now_ns - w.started_ns) / 1e6, 3),
            w.count,
            tuple(r[:REQUEST_ID_BYTES].hex() for r in w.records[:TICKETS_SHOWN]),
        )
        for w in works
    )


def ended_outside(life: Life, event: Exited) -> bool:
    """Somebody else has ended it: no fault of its own, as far as can be told."""
    if life.condemned or life.error is not None:
        return life.outside
    by_hand = event.status in (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT)
    return by_hand or (event.status == 0 and life.hello)


def describe_end(life: Life, event: Exited, starting: bool) -> str:
    """Why a process ended that should not have, in one line."""
    if life.condemned:
        return life.condemned
    if life.error is not None:
        return f"{life.error.code}: {life.error.message}"
    cause = describe_exit(event.status)
    if event.status == 0 and life.hello:  # nobody here has told it to, and it has not failed
        cause = f"ended by a signal from outside, SIGTERM or SIGINT ({cause})"
    if starting:
        cause += " while it started"
    words = last_words(event.status, event.log_tail)
    if words.startswith(_TYPED):  # with a hint, which whoever tells of it has as well
        words = words.partition(": ")[2].partition(" -- ")[0]
    return f"{cause}: {words}" if words else cause


def judge(ledger: RestartLedger, crash: Crash, retryable: bool, now_ns: int) -> Verdict:
    """Whether and when there is a successor."""
    chance = spread(crash.incarnation)
    if starved(crash.error):
        return ledger.starved(now_ns, chance=chance)
    if crash.no_room:
        return ledger.no_room(now_ns, chance=chance)
    return ledger.crashed(now_ns, retryable=retryable, chance=chance)
