"""Exit codes that scripts can rely on; docs/cli.md has the same table."""

from __future__ import annotations

from enum import IntEnum

from blockflow.bench import interrupts
from blockflow.core.errors import BlockFlowError, Fault


class ExitCode(IntEnum):
    """What a command's exit status says."""

    OK = 0
    INTERNAL = 1
    """A defect in BlockFlow."""
    BAD_INPUT = 2
    """The command line, a file or a value is wrong; repeating it does not help."""
    NOT_RUNNING = 3
    """Nothing answers at the address, or what does is not BlockFlow."""
    NOT_READY = 4
    """Something answers but is not ready or not healthy."""
    FAILED = 5
    """The system took the request and could not do it."""
    INTERRUPTED = interrupts.INTERRUPTED
    """Ctrl-C or SIGTERM, as shells say it; everything was stopped on the way."""


_BY_CODE = {
    "INTERNAL": ExitCode.INTERNAL,
    "NOT_RUNNING": ExitCode.NOT_RUNNING,
    "CONNECTION_LOST": ExitCode.NOT_RUNNING,
    "NOT_READY": ExitCode.NOT_READY,
    "BLOCK_UNAVAILABLE": ExitCode.NOT_READY,
    "TIMEOUT": ExitCode.NOT_READY,
    "EXPORT_MISMATCH": ExitCode.BAD_INPUT,
    "EPOCH_MISMATCH": ExitCode.FAILED,
}


def exit_code(error: BlockFlowError) -> ExitCode:
    """The caller's fault and of no use to repeat: 2; named codes as above; the rest: 5."""
    named = _BY_CODE.get(error.code)
    if named is not None:
        return named
    if error.fault is Fault.CLIENT and not error.retryable:
        return ExitCode.BAD_INPUT
    return ExitCode.FAILED
