"""The standard streams of a command: there, whatever the caller has closed."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from io import TextIOWrapper
from typing import TextIO

from blockflow.core.text import visible


def open_missing() -> None:
    """Open the standard streams that the caller has closed, to nowhere.

    Otherwise the next socket or file gets the number of one, and what others print goes into it;
    and Python has no object then that could be written to.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number is this one
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            stream = open(number, "w" if number else "r", closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)


def escape_what_cannot_be_written() -> None:
    """Let an output whose encoding lacks a character (a locale without UTF-8) show that as Python
    writes it, as the standard error does, and not end the command. (``surrogateescape`` is what a
    C locale has: for bytes that were no text, and of no use to other characters.)"""
    out = sys.stdout
    if isinstance(out, TextIOWrapper) and out.errors in ("strict", "surrogateescape"):
        out.reconfigure(errors="backslashreplace")


def silence_stdout() -> None:
    """Nothing more can be written; not at exit either."""
    _silence(sys.stdout)


def _silence(stream: TextIO) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def complain(what: object) -> None:
    """A line for a person on the standard error; it may quote anything. Where that takes nothing (a
    full disk) there is nobody left to tell, and what follows is told to nowhere, too: neither the
    command nor its exit status is another one for it."""
    try:
        sys.stderr.write(f"blockflow: {visible(str(what))}\n")
        sys.stderr.flush()
    except OSError:
        with suppress(OSError):
            _silence(sys.stderr)


def say(text: str, lost: Callable[[OSError], None]) -> None:
    """Print at once. An output that takes nothing ends nothing: ``lost`` is told why, and what
    follows is printed to nowhere."""
    try:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    except OSError as e:
        with suppress(OSError):
            silence_stdout()
        lost(e)
