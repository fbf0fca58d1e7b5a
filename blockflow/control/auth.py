"""Auth: who may use REST, and by what the service is known. With a token file every request needs
the token; without one, loopback is the fence."""

from __future__ import annotations

import hmac
from pathlib import Path

from blockflow.core.errors import SystemError_
from blockflow.tensormq.private_files import read_private, unfit

MIN_TOKEN_BYTES = 32
TOKEN_VARIABLE = "BLOCKFLOW_TOKEN_FILE"
API_HEADER, API = "BlockFlow-Api", "v1"
"""In each answer of REST: many a service answers any path with a JSON object and a 200."""

_MAX_TOKEN_BYTES = 4096


def read_token(path: Path) -> bytes:
    """The secret in a private file; surrounding white space does not count.

    Raises:
        SystemError_: UNAUTHORIZED when the file cannot serve as a secret; an empty or weak one is
            never taken as "no token".
    """
    hint = f"(umask 077; head -c {MIN_TOKEN_BYTES} /dev/urandom | base64 > {path.name})"
    token = read_private(path, "the token file", _MAX_TOKEN_BYTES, hint).strip()
    if len(token) < MIN_TOKEN_BYTES:
        raise unfit(path, "the token file", f"has less than {MIN_TOKEN_BYTES} bytes", hint)
    if not token.isascii() or len(token.split()) != 1:
        raise unfit(path, "the token file", "holds more than one word of ASCII", hint)
    return token


class TokenAuth:
    """Bearer token from a private file.

    Args:
        path: a file of this user, mode 0600, with at least 32 bytes of secret, one word of ASCII.

    Raises:
        SystemError_: UNAUTHORIZED, see :func:`read_token`.
    """

    def __init__(self, path: Path) -> None:
        self._token = read_token(path)

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
                hint="send the header 'Authorization: Bearer <token>'; commands take it from the "
                f"file that {TOKEN_VARIABLE} names",
            )
