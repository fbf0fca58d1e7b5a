"""Wakes a polling thread from any other one."""

from __future__ import annotations

import os

_ONE = (1).to_bytes(8, "little")


class WakeUp:
    """A file descriptor that becomes readable on :meth:`ring` and stays so until :meth:`clear`."""

    def __init__(self) -> None:
        # An eventfd where there is one (Linux): one descriptor, and rings add up.
        if hasattr(os, "eventfd"):
            self._read = self._write = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        else:
            self._read, self._write = os.pipe()
            os.set_blocking(self._read, False)
            os.set_blocking(self._write, False)

    def fileno(self) -> int:
        return self._read

    def ring(self) -> None:
        try:
            os.write(self._write, _ONE)
        except BlockingIOError:
            return  # full: it is readable already

    def clear(self) -> None:
        try:
            os.read(self._read, 4096)
        except BlockingIOError:
            return  # it was not

    def close(self) -> None:
        for fd in {self._read, self._write}:
            os.close(fd)
