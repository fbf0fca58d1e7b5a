"""KeptSecrets: the secrets in force, in the guardian's hands.

Their files may be away, or half renewed, when a Manager dies: that is no reason to serve nobody. So
what was read at the start lies with the guardian, in memory files (no disk, no name, for this user
alone), and a successor goes on with it.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from blockflow.launch.ward import SECRETS, Ward

log = logging.getLogger("blockflow.control")


class KeptSecrets:
    """Of one Manager.

    Args:
        ward: of a guardian; without one nothing is kept.

    Attributes:
        inherited: there was a Manager before this one.
    """

    def __init__(self, ward: Ward | None = None) -> None:
        self._line = None if ward is None else ward.line
        self.inherited = ward is not None and ward.deaths > 0
        owned = {name: ward.own(name) for name in SECRETS} if ward is not None else {}
        self._fds = {name: kept.fd for name, kept in owned.items() if kept is not None}

    def get(self, name: str) -> bytes | None:
        """What a Manager has kept under that name; None = nothing."""
        fd = self._fds.get(name)
        return None if fd is None else os.pread(fd, os.fstat(fd).st_size, 0)

    def path(self, name: str) -> str | None:
        """By which a library in this process can read it."""
        fd = self._fds.get(name)
        return None if fd is None else f"/proc/self/fd/{fd}"

    def keep(self, name: str, secret: bytes) -> None:
        """From now on this is the one in force."""
        if self._line is None:
            return
        try:
            fd = os.memfd_create("blockflow-secret", os.MFD_CLOEXEC)
            try:
                os.fchmod(fd, 0o600)
                with open(fd, "wb", closefd=False) as f:
                    f.write(secret)
                self._line.keep(name, fd)
            finally:
                os.close(fd)
        except OSError as e:  # no descriptor or no memory is left
            log.warning("a successor will need the file of the %s: %s", name, e.strerror)

    def keep_file(self, name: str, path: Path) -> None:
        """Likewise of a file that was just read. One that can be read once only is not read again:
        a pipe, say."""
        if self._line is None or not path.is_file():
            return
        try:
            self.keep(name, path.read_bytes())
        except OSError as e:
            log.warning("a successor will need the file of the %s: %s", name, e.strerror)
