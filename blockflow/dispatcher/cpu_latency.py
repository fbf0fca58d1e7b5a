"""CpuLatency: tells the kernel how long an idle core may take to wake."""

from __future__ import annotations

import logging
import os
import struct
from pathlib import Path

_LOG = logging.getLogger("blockflow.dispatcher")

DEVICE = Path("/dev/cpu_dma_latency")
"""What is written holds for all cores of the machine while the descriptor is open: however this
process ends, they may sleep again. ("DMA" is history: it is about cores.)"""

_WORD = struct.Struct("=i")
_AS_USUAL = _WORD.pack(-1)


class CpuLatency:
    """This process's request to the kernel.

    Args:
        device: where to write it.

    Attributes:
        held_us: what it asks for now; None: nothing.
        trouble: why it cannot ask; '' when it can, or has not tried.
    """

    def __init__(self, device: Path = DEVICE) -> None:
        self._device = device
        self._fd = -1
        self._told = ""
        self.held_us: int | None = None
        self.trouble = ""

    def retry(self) -> None:
        """Try again what failed: somebody may have given leave meanwhile."""
        self.trouble = ""

    def hold(self, latency_us: int | None) -> None:
        """Ask for this much, or (None) for nothing. Where that fails, all goes on without: the log
        says so once, :attr:`trouble` until :meth:`retry`."""
        if latency_us == self.held_us or self.trouble:
            return
        try:
            if self._fd < 0:
                self._fd = os.open(self._device, os.O_WRONLY | os.O_CLOEXEC)
            os.write(self._fd, _AS_USUAL if latency_us is None else _WORD.pack(latency_us))
        except OSError as exc:
            self.close()
            self.trouble = f"{self._device}: {exc.strerror}"
            if self.trouble != self._told:
                self._told = self.trouble
                _LOG.warning(
                    "a task's cpu_latency_us has no effect (%s): idle cores sleep as usual; let "
                    "this user write there, or leave it out",
                    self.trouble,
                )
            return
        self.held_us = latency_us

    def gauges(self) -> dict[str, object]:
        """What is asked for now, and why nothing can be."""
        return {"held_us": self.held_us, "trouble": self.trouble}

    def close(self) -> None:
        """Cores may sleep as usual again. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self.held_us = -1, None
