"""``blockflow``: the command line. Commands are loaded when they are called, so that each starts
as fast as its own imports allow; none of the monitoring commands imports torch."""

from __future__ import annotations

import atexit
import errno
import gc
import json
import logging
import os
import signal
import sys
import threading
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from blockflow import __version__
from blockflow.bench.interrupts import ENDING, interruptible
from blockflow.cli import lazy
from blockflow.cli.complete import asked_by_bash
from blockflow.cli.exits import ExitCode, exit_code
from blockflow.cli.lazy import LazyGroup
from blockflow.cli.streams import (
    complain,
    escape_what_cannot_be_written,
    open_missing,
    silence_stdout,
)
from blockflow.core.errors import BlockFlowError, make_error
from blockflow.core.scarcity import no_room

DEBUG_VARIABLE = "BLOCKFLOW_DEBUG"

COMMANDS: dict[str, tuple[str, str, str]] = {
    "up": ("up", "up", "Start the system: control plane, REST and Dispatcher."),
    "demo": ("demo", "demo", "Train, deploy and serve three tasks on real digits."),
    "export": ("export", "export", "Cut a model into blocks and store them."),
    "profile": ("profile", "profile", "Measure blocks on this machine and choose their engine."),
    "simulate": ("simulate", "simulate", "Compare batching policies in virtual time."),
    "bench": ("bench", "app", "Measure deployed tasks with MLCommons' LoadGen."),
    "convert": ("convert", "convert", "Make further forms of stored blocks, for other engines."),
    "doctor": ("doctor", "doctor", "Look for what would keep this machine from serving well."),
    "keys": ("keys", "keys", "Make and manage the keys of server and clients."),
    "apply": ("apply", "apply", "Apply a topology: a whole new system update."),
    "rollback": ("rollback", "rollback", "Go back to an earlier epoch's topology and artifacts."),
    "history": ("rollback", "history", "List the latest epochs."),
    "status": ("look", "status", "Show health, epoch, blocks, workers and tasks."),
    "top": ("look", "top", "Watch blocks and processes live."),
    "tasks": ("look", "tasks", "List the published tasks."),
    "topology": ("look", "topology", "Show the topology in force."),
    "infer": ("infer", "infer", "Send one request and show the answer."),
    "ping": ("act", "ping", "Ask every worker, or a block's, for a sign of life."),
    "drain": ("act", "drain", "Let a block finish its work and take no more."),
    "undrain": ("act", "undrain", "Let a drained block take work again."),
    "restart": ("act", "restart", "Replace a block's workers without a gap."),
    "stop": ("act", "stop", "Stop a block, or the whole system."),
    "monitor": ("act", "monitor", "Turn the KPI samples on or off."),
    "kpis": ("act", "kpis", "Show the latest KPIs, or store the recent ones in a file."),
}
"""Name -> module below blockflow.cli, function or group, and the line that --help shows."""


class Commands(LazyGroup):
    """All of them."""

    entries = COMMANDS


_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
"""How a file says that it takes no more."""


def load(name: str) -> Any:
    """Import one command and build it."""
    return lazy.load(COMMANDS, name)


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="BlockFlow serves many DNN tasks from shared blocks.",
)


def _print_version(value: bool) -> None:
    if value:
        sys.stdout.write(f"blockflow {__version__}\n")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show it and stop."),
    ] = False,
) -> None:
    """BlockFlow serves many DNN tasks from shared blocks."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; errors become code, message and hint.

    Ctrl-C and SIGTERM end it in order: what it has started is stopped, its temporary files go.
    Errors go to stderr as text; with ``--json`` also to stdout as ``{"error": {...}}``.
    """
    # Python looks for garbage while it ends, among the million objects that torch has made too.
    atexit.register(gc.freeze)
    # The folders above a private one are made as the umask says; who may write to those has it too.
    os.umask(os.umask(0o077) | 0o002)
    open_missing()
    escape_what_cannot_be_written()
    args = list(sys.argv[1:] if argv is None else argv)
    level = "DEBUG" if os.environ.get(DEBUG_VARIABLE) else "WARNING"
    logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s")
    if os.environ.get("COLUMNS") == "0":  # said where there is no terminal
        del os.environ["COLUMNS"]
    try:
        with _listening(args), asked_by_bash():
            typer.main.get_command(app).main(args, prog_name="blockflow")
    except BlockFlowError as exc:
        return _report(exc, args)
    except SystemExit as exc:
        if isinstance(exc.__context__, BrokenPipeError):  # click has made an exit status of it
            return ExitCode.OK
        if exc.code is None or isinstance(exc.code, int):
            return exc.code or ExitCode.OK
        complain(exc.code)  # as Python does: the user's own code may end so
        return 1
    except KeyboardInterrupt:
        complain("interrupted")
        return ExitCode.INTERRUPTED
    except BrokenPipeError:
        # The reader (head, less) has what it wanted.
        silence_stdout()
        return ExitCode.OK
    except Exception as exc:
        if isinstance(exc, OSError) and exc.errno in _NO_ROOM and exc.filename is None:
            # Of files that commands write, errors of BlockFlow tell: this is the standard output.
            complain(f"the output cannot be written: {exc.strerror}")
            silence_stdout()
            return ExitCode.FAILED
        # SystemError: from nowhere, Python 3.13.0 cannot load an extension module
        if isinstance(exc, FileNotFoundError | SystemError) and _is_nowhere():
            return _report(_nowhere(), args)
        if isinstance(exc, OSError) and "--install-completion" in args[:1]:
            return _report(_not_installed(exc), args)
        logging.getLogger("blockflow.cli").debug("internal error", exc_info=True)
        hint = f"set {DEBUG_VARIABLE}=1 for the traceback, and report it"
        lacking = no_room(exc, repr(exc), "")
        return _report(lacking or make_error("INTERNAL", repr(exc), hint=hint), args)
    return ExitCode.OK


def _is_nowhere() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    return False


def _nowhere() -> BlockFlowError:
    return make_error(
        "INVALID_REQUEST",
        "the working directory has been removed, and relative paths lead nowhere",
        where=os.environ.get("PWD", "the working directory"),
        hint="go to one that exists (cd), or give absolute paths",
    )


def _not_installed(exc: OSError) -> BlockFlowError:
    return no_room(exc, str(exc), str(exc.filename)) or make_error(
        "INVALID_REQUEST",
        f"the completion cannot be installed: {exc.strerror}",
        where=str(exc.filename),
        hint="it needs a home folder ($HOME) that takes files; --show-completion prints it",
    )


@contextmanager
def _listening(args: Sequence[str]) -> Iterator[None]:
    """Raises KeyboardInterrupt when a command was interrupted and has not told so itself."""
    if threading.current_thread() is not threading.main_thread():
        yield  # no handler can be set here
        return
    if args[:1] == ["up"]:
        with _nothing_to_stop():
            yield
        return
    with interruptible():
        yield


@contextmanager
def _nothing_to_stop() -> Iterator[None]:
    """``up`` has handlers of its own. Until it has set them there is nothing that would have to be
    ended in order, and nothing is left to be ended after it: Python itself, as it ends, would take
    its handlers away, and the process be killed by whoever presses Ctrl-C again."""
    before = {number: signal.getsignal(number) or signal.SIG_DFL for number in ENDING}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, _leave)
    try:
        yield
    finally:
        for number, handler in before.items():
            own = signal.getsignal(number) is not _leave
            signal.signal(number, signal.SIG_IGN if own else handler)


def _leave(number: int, frame: types.FrameType | None) -> None:
    os._exit(ExitCode.OK)  # an exception might be taken for another one in an import


def _report(error: BlockFlowError, args: Sequence[str]) -> int:
    if "--json" in args:
        try:
            sys.stdout.write(json.dumps({"error": error.to_dict()}, indent=2) + "\n")
            sys.stdout.flush()
        except OSError:  # it is told on stderr
            silence_stdout()
    complain(error)
    return exit_code(error)
