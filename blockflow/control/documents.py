"""Documents on disk: JSON with a checksum, written whole or not at all, read within bounds."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import stat
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from blockflow.core.errors import SystemError_
from blockflow.repository.descriptors import file_of

_BY_EYE = 64 * 1024
"""Bytes of JSON that somebody may read: to lay out more takes the Manager's thread seconds."""

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What an OSError of a full disk says."""


def unusable(error: OSError, root: Path) -> SystemError_:
    """NO_SPACE, or STATE_UNUSABLE: the state directory ``root`` cannot be used."""
    if error.errno in NO_ROOM:
        return SystemError_(
            "NO_SPACE",
            f"the state cannot be written: {error.strerror}",
            where=str(root),
            hint="free some disk space; the stored state is unchanged",
        )
    return SystemError_(
        "STATE_UNUSABLE",
        f"the state directory cannot be used: {error.strerror}",
        where=str(error.filename or root),
        hint="check the directory and its permissions, or name another --state-dir",
    )


class LaterFormat(ValueError):
    """A later release has written it: it may be whole."""


def seal(body: Mapping[str, Any], fmt: int) -> bytes:
    """The file's content: ``body`` with its format and checksum. What is in it keeps its order,
    which people see again (the tasks of a topology); the checksum is the same in any."""
    canonical = canonical_json(body).encode()
    digest = hashlib.sha256(canonical).hexdigest()
    document = {"format": fmt, "sha256": digest, "body": body}
    indent = 1 if len(canonical) <= _BY_EYE else None
    return json.dumps(document, indent=indent).encode() + b"\n"


def seal_canonical(body: str, fmt: int) -> bytes:
    """As :func:`seal`, of a body that has been put together from :func:`canonical_json`."""
    if len(body) <= _BY_EYE:
        return seal(json.loads(body), fmt)
    digest = hashlib.sha256(body.encode()).hexdigest()
    return f'{{"format": {fmt}, "sha256": "{digest}", "body": {body}}}\n'.encode()


def read_sealed(path: Path, most: int, formats: Collection[int]) -> tuple[int, dict[str, Any]]:
    """(format, body) of a file of at most ``most`` bytes.

    Raises:
        OSError, ValueError: the latter says what is wrong with it.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    with file_of(os.open(path, flags)) as f:
        found = os.fstat(f.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("not a regular file")
        # Python takes memory for as much as it is asked to read.
        raw = f.read(min(most, found.st_size) + 1)
    if len(raw) > most:
        raise ValueError("too large")
    try:
        document = json.loads(raw)
    except (ValueError, RecursionError):
        raise ValueError("not valid JSON (torn or altered)") from None
    if type(document) is not dict or set(document) != {"format", "sha256", "body"}:
        raise ValueError("not a state document")
    fmt, body = document["format"], document["body"]
    if type(fmt) is not int or fmt not in formats:
        readable = " and ".join(str(f) for f in sorted(formats))
        later = type(fmt) is int and fmt > max(formats)
        kind = LaterFormat if later else ValueError
        raise kind(f"format {fmt!r}, this release reads {readable}")
    if type(body) is not dict:
        raise ValueError("not a state document")
    if hashlib.sha256(canonical_json(body).encode()).hexdigest() != document["sha256"]:
        raise ValueError("the checksum does not fit")
    return fmt, body


def write_file(path: Path, data: bytes, *, sync: bool) -> None:
    """Write a new private file; ``sync``: it is on the disk when this returns. Raises OSError."""
    # O_NONBLOCK: a pipe that lies there would keep this waiting for its reader.
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    fd = os.open(path, flags, 0o600)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        if sync:
            os.fsync(fd)
    finally:
        os.close(fd)


def take_lock(path: Path) -> int:
    """Open a file, made if need be, and lock it for as long as the descriptor is open.

    Raises:
        OSError: it cannot be opened, or not be locked by anybody.
        SystemError_: ALREADY_RUNNING: another process has locked it.
    """
    flags = os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | flags, 0o600)
    except OSError as e:
        if e.errno != errno.EROFS:
            raise
        # A disk that has failed, say. Nothing can be saved, but what runs can be taken over.
        fd = os.open(path, os.O_RDONLY | flags)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
        os.close(fd)
        if e.errno != errno.EWOULDBLOCK:  # of a file system without locks, say
            raise
        raise SystemError_(
            "ALREADY_RUNNING",
            "another control plane uses this state directory",
            where=str(path.parent),
            hint="stop it (blockflow stop) or name another --state-dir",
        ) from e
    return fd


def canonical_json(body: Mapping[str, Any]) -> str:
    """What a checksum is of."""
    return json.dumps(body, sort_keys=True, separators=(",", ":"))
