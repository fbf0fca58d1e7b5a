"""Auth: who may use REST. With a token file every request needs the token; without one, loopback
is the fence."""

from __future__ import annotations

import hmac
import os
import stat
from pathlib import Path

from blockflow.core.errors import SystemError_

MIN_TOKEN_BYTES = 32
_MAX_TOKEN_BYTES = 4096


class TokenAuth:
    """Bearer token from a private file.

    Args:
        path: a file of this user, mode 0600, with at least 32 bytes of secret; surrounding white
            space does not count.

    Raises:
        SystemError_: UNAUTHORIZED when the file cannot serve as a secret; an empty or weak one is
            never taken as "no token".
    """

    def __init__(self, path: Path) -> None:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as e:
            raise _bad(path, f"cannot be opened: {e.strerror}") from e
        with os.fdopen(fd, "rb") as f:
            status = os.fstat(f.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_uid not in (os.geteuid(), 0):
                raise _bad(path, "is not a regular file of this user")
            if status.st_mode & 0o077:
                raise _bad(path, "can be read by others")
            self._token = f.read(_MAX_TOKEN_BYTES).strip()
        if len(self._token) < MIN_TOKEN_BYTES:
            raise _bad(path, f"has less than {MIN_TOKEN_BYTES} bytes")

    def check(self, header: str | None) -> None:
        """Check an ``Authorization`` header in constant time.

        Raises:
            SystemError_: UNAUTHORIZED, the same whatever was wrong.
        """
        scheme, _, given = (header or "").partition(" ")
        right = hmac.compare_digest(given.strip().encode("utf-8", "replace"), self._token)
        if scheme.lower() != "bearer" or not right:
            raise SystemError_(
                "UNAUTHORIZED",
                "this service needs a token",
                hint="send the header 'Authorization: Bearer <token>'",
            )


def _bad(path: Path, why: str) -> SystemError_:
    return SystemError_(
        "UNAUTHORIZED",
        f"the token file {why}",
        where=str(path),
        hint=f"(umask 077; head -c {MIN_TOKEN_BYTES} /dev/urandom | base64 > {path.name})",
    )
