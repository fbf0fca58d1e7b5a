"""Auth: who may use REST, and by what the service is known. With a token file every request needs
the token; without one, loopback is the fence."""

from __future__ import annotations

import hmac
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from shlex import quote

from blockflow.core.errors import SystemError_
from blockflow.core.scarcity import is_scarcity
from blockflow.tensormq.private_files import read_private, unfit

MIN_TOKEN_BYTES = 32
TOKEN_VARIABLE = "BLOCKFLOW_TOKEN_FILE"
API_HEADER, API = "BlockFlow-Api", "v1"
"""In each answer of REST: many a service answers any path with a JSON object and a 200."""

_MAX_TOKEN_BYTES = 4096

log = logging.getLogger("blockflow.control")


def read_token(path: Path, hint: str = "") -> bytes:
    """The secret in a private file; surrounding white space does not count. ``hint`` is what to do
    about one that is unfit: by default the command that makes one.

    Raises:
        SystemError_: UNAUTHORIZED when the file cannot serve as a secret; an empty or weak one is
            never taken as "no token".
    """
    make = f"(umask 077; head -c {MIN_TOKEN_BYTES} /dev/urandom | base64 > {quote(str(path))})"
    hint = hint or make
    token = read_private(path, "the token file", _MAX_TOKEN_BYTES, hint).strip()
    if len(token) < MIN_TOKEN_BYTES:
        raise unfit(path, "the token file", f"has less than {MIN_TOKEN_BYTES} bytes", hint)
    if not token.isascii() or len(token.split()) != 1:
        raise unfit(path, "the token file", "holds more than one word of ASCII", hint)
    return token


def _nobody(token: bytes) -> None: ...


class TokenAuth:
    """Bearer token from a private file, also from what takes its place: the file is looked at for
    each request. One that is away or unfit changes nothing; one that there is no room to read (a
    descriptor, memory) is read for the next request: the token in force may have been revoked.

    Args:
        path: a file of this user, mode 0600, with at least 32 bytes of secret, one word of ASCII.
        in_force: the token until the file gives another one; None = the file must give one now.
        tell: gets each token that comes into force, the first one too; from any thread.

    Raises:
        SystemError_: UNAUTHORIZED, see :func:`read_token`; never with a token ``in_force``.
    """

    def __init__(
        self, path: Path, in_force: bytes | None = None, tell: Callable[[bytes], None] = _nobody
    ) -> None:
        self._path = path
        self._tell = tell
        self._lock = threading.Lock()
        self._seen = looks(path)  # before it is read: a change from here on is seen
        if in_force is None:
            self._token = read_token(path)
            tell(self._token)
        else:
            self._token = in_force
            if not self._take():
                self._seen = None

    def _heed(self) -> None:
        """Take what has changed in the file."""
        seen = looks(self._path)
        if seen == self._seen:
            return
        with self._lock:
            if seen != self._seen and self._take():  # else another thread was first
                self._seen = seen

    def _take(self) -> bool:
        """Whether the file has said what it has to say; False: there was no room to read it."""
        try:
            token = read_token(self._path)
        except SystemError_ as e:
            log.warning("%s; the token that was in force stays so", e)
            return not is_scarcity(e)
        if token != self._token:
            self._token = token
            log.info("the token of REST is another one from now on: its file has changed")
            self._tell(token)
        return True

    def check(self, header: str | None) -> None:
        """Check an ``Authorization`` header in constant time.

        Raises:
            SystemError_: UNAUTHORIZED, the same whatever was wrong.
        """
        self._heed()
        scheme, _, given = (header or "").partition(" ")
        right = hmac.compare_digest(given.strip().encode("utf-8", "replace"), self._token)
        if scheme.lower() != "bearer" or not right:
            raise SystemError_(
                "UNAUTHORIZED",
                "this service needs a token",
                hint="send the header 'Authorization: Bearer <token>'; commands take it from the "
                f"file that {TOKEN_VARIABLE} names",
            )


def looks(path: Path, *, follow: bool = False) -> tuple[int, ...] | None:
    """By which it is seen whether a file is another one, or has changed; None = it is away. Of a
    link, with ``follow`` what it leads to."""
    try:
        it = os.stat(path, follow_symlinks=follow)
    except OSError:
        return None
    return it.st_dev, it.st_ino, it.st_size, it.st_mtime_ns, it.st_ctime_ns
