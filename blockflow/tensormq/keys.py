"""Keys: CURVE key pairs in private files, and the folder of a server's keys.

A key is 32 bytes, written as 64 hex digits (Z85, ZeroMQ's own form, has characters that shells
take for theirs). A key file is JSON: ``public``, ``secret``, and in a client's file ``server``, the
public key of the server that it is for.

Layout of a server's folder (mode 0700)::

    server.key          the server's pair, 0600
    server.pub          its public half
    token               the REST token, 0600
    clients/<public>    name of the authorised client that has this key, and the key once more

An authorised key is looked up by its file's name: one look at the folder, which is always right.
That the file holds the key too (those of earlier releases do not) makes renamed files nobody's.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
from base64 import urlsafe_b64encode
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq
from zmq.utils import z85

from blockflow.core.errors import SystemError_
from blockflow.core.limits import NAME_PATTERN
from blockflow.core.scarcity import is_scarcity
from blockflow.tensormq.private_files import (
    check_folder,
    private_folder,
    read_private,
    unfit,
    write_private,
)

log = logging.getLogger("blockflow.tensormq")

KEY_BYTES = 32
TOKEN_BYTES = 32
SERVER_FILE = "server.key"
PUBLIC_FILE = "server.pub"
TOKEN_FILE = "token"
CLIENTS_FOLDER = "clients"
_MAX_FILE_BYTES = 4096
_HEX = re.compile(rf"[0-9a-f]{{{2 * KEY_BYTES}}}")
_NAME = re.compile(NAME_PATTERN)


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A CURVE key pair: two times 32 bytes."""

    public: bytes
    secret: bytes = field(repr=False)

    @classmethod
    def make(cls) -> KeyPair:
        """A new pair. Raises SystemError_: MISSING_EXTRA."""
        require_curve()
        public, secret = zmq.curve_keypair()
        return cls(z85.decode(public), z85.decode(secret))


@dataclass(frozen=True, slots=True)
class ClientKeys:
    """What a client needs: its own pair, and whom it talks to."""

    own: KeyPair
    server: bytes


def require_curve() -> None:
    """Raises SystemError_: MISSING_EXTRA: this libzmq cannot encrypt."""
    if not zmq.has("curve"):
        raise SystemError_(
            "MISSING_EXTRA",
            "this libzmq was built without CURVE",
            hint="install pyzmq's own wheel: pip install --force-reinstall pyzmq",
        )


def public_key(text: str, where: str = "") -> bytes:
    """A public key from its hex form. Raises SystemError_: UNAUTHORIZED."""
    if not _HEX.fullmatch(text.strip().lower()):
        raise SystemError_(
            "UNAUTHORIZED", f"a public key is {2 * KEY_BYTES} hex digits", where=where
        )
    return bytes.fromhex(text.strip())


def write_key_file(path: Path, pair: KeyPair, server: bytes | None = None) -> None:
    """Write a new key file, mode 0600. Raises SystemError_: UNAUTHORIZED."""
    document = {"public": pair.public.hex(), "secret": pair.secret.hex()}
    if server is not None:
        document["server"] = server.hex()
    write_private(path, json.dumps(document, indent=1).encode() + b"\n")


def read_key_file(path: Path) -> KeyPair:
    """The pair in a key file. Raises SystemError_: UNAUTHORIZED."""
    return _pair(_document(path), path)


def client_keys(client: str | Path, server: str | None = None) -> ClientKeys:
    """What ``Client(client_keys=, server_key=)`` name.

    Args:
        client: a client's key file.
        server: the server's public key, or a file with it; None takes what the key file says.

    Raises:
        SystemError_: UNAUTHORIZED.
    """
    path = Path(client)
    document = _document(path)
    own = _pair(document, path)
    if server is None:
        if "server" not in document:
            hint = "pass server_key (BLOCKFLOW_SERVER_KEY): the server's server.pub, or its text"
            raise unfit(path, "the key file", "does not say which server it is for", hint)
        return ClientKeys(own, public_key(str(document["server"]), str(path)))
    if not _HEX.fullmatch(server.strip().lower()):
        try:
            server = Path(server).read_text(encoding="ascii")[:_MAX_FILE_BYTES]
        except (OSError, ValueError) as e:
            raise unfit(Path(server), "the server's key", f"cannot be read: {e}", "") from e
    return ClientKeys(own, public_key(server, "server_key"))


class Keyring:
    """A server's folder of keys.

    Args:
        folder: see the module. Nothing is read before it is needed.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._clients = folder / CLIENTS_FOLDER
        self._trouble = ""

    @property
    def token_file(self) -> Path:
        return self.folder / TOKEN_FILE

    def create(self) -> KeyPair:
        """Make the folder with the server's pair, which must not be there yet, and a REST token: a
        token that is there is kept.

        Raises:
            SystemError_: UNAUTHORIZED, MISSING_EXTRA.
        """
        pair = KeyPair.make()
        private_folder(self.folder)
        private_folder(self._clients)
        write_key_file(self.folder / SERVER_FILE, pair)
        with suppress(FileNotFoundError):
            (self.folder / PUBLIC_FILE).unlink()  # of a pair that is gone
        write_private(self.folder / PUBLIC_FILE, f"{pair.public.hex()}\n".encode(), 0o644)
        if not self.token_file.exists():
            write_private(self.token_file, urlsafe_b64encode(os.urandom(TOKEN_BYTES)) + b"\n")
        return pair

    def server(self) -> KeyPair:
        """The server's pair.

        Raises:
            SystemError_: UNAUTHORIZED: there is none, or others can put keys into the folder.
        """
        path = self.folder / SERVER_FILE
        hint = f"make one: blockflow keys init --keys {self.folder}"
        if os.path.lexists(path):  # init writes over nothing
            hint = f"put the right one there, or remove {path} (clients need new files) and {hint}"
        self._check_folders(hint)
        return _pair(_document(path, hint), path)

    def _check_folders(self, hint: str = "") -> None:
        check_folder(self.folder, hint)
        if os.path.lexists(self._clients):
            check_folder(self._clients)

    def authorise(self, name: str, public: bytes) -> None:
        """Let the holder of this key connect, from now on.

        Raises:
            SystemError_: UNAUTHORIZED: the name is taken or none, or the key is another client's.
        """
        if not _NAME.fullmatch(name):
            raise unfit(self._clients, f"{name[:80]!r}", "is not a name", "letters, digits, _.-")
        private_folder(self._clients)
        with self._locked():  # or two at once would both find the name free
            if name in self.clients():
                hint = "revoke it first, or take another name"
                raise unfit(self._clients, f"the client {name!r}", "has a key already", hint)
            write_private(self._clients / public.hex(), f"{name} {public.hex()}\n".encode())

    def revoke(self, name: str) -> None:
        """Refuse this client's next connections, by whatever key (folders that were put together
        may have two of a name). Raises SystemError_: UNAUTHORIZED."""
        known = self._authorised()
        if name not in {owner for owner, _ in known}:
            hint = f"known: {', '.join(sorted({owner for owner, _ in known})) or 'none'}"
            raise unfit(self._clients, f"the client {name[:80]!r}", "is not authorised", hint)
        for owner, public in known:
            if owner == name:
                (self._clients / public.hex()).unlink(missing_ok=True)

    def clients(self) -> dict[str, bytes]:
        """Authorised clients: name -> public key. What else lies there authorises nobody."""
        return dict(sorted(self._authorised()))

    def _authorised(self) -> list[tuple[str, bytes]]:
        found: list[tuple[str, bytes]] = []
        with suppress(OSError):
            for entry in os.listdir(self._clients):
                if _HEX.fullmatch(entry) and (name := self._name_of(bytes.fromhex(entry))):
                    found.append((name, bytes.fromhex(entry)))
        return found

    @contextmanager
    def _locked(self) -> Iterator[None]:
        fd = os.open(self._clients, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with suppress(OSError):  # where there are no locks, the check alone must do
                fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def allows(self, public: bytes) -> bool:
        """Whether the holder of this key may connect: what the folder says now, nobody while others
        can write to it.

        Raises:
            SystemError_: UNAUTHORIZED: there is no descriptor or memory to read what it says.
        """
        try:
            self._check_folders()
        except SystemError_ as e:
            if is_scarcity(e):
                raise
            if self._trouble != str(e):  # once, not for each who comes
                log.error("no client is let in: %s", e)
            self._trouble = str(e)
            return False
        self._trouble = ""
        return bool(self._name_of(public))

    def _name_of(self, public: bytes) -> str:
        """Whose key it is; '' = nobody's. Raises as :meth:`allows`."""
        try:
            raw = read_private(self._clients / public.hex(), "the key", _MAX_FILE_BYTES)
            name, *key = raw.decode("ascii").split()
        except (SystemError_, ValueError) as e:
            if is_scarcity(e):
                raise
            return ""
        return name if _NAME.fullmatch(name) and key in ([], [public.hex()]) else ""


def _document(path: Path, hint: str = "") -> Mapping[str, Any]:
    hint = hint or "blockflow keys new NAME, or blockflow keys make"
    raw = read_private(path, "the key file", _MAX_FILE_BYTES, hint)
    try:
        document = json.loads(raw)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise unfit(path, "the key file", "is not one", hint)
    return document


def _pair(document: Mapping[str, Any], path: Path) -> KeyPair:
    texts = [document.get("public"), document.get("secret")]
    if not all(isinstance(t, str) and _HEX.fullmatch(t) for t in texts):
        raise unfit(path, "the key file", "is not one", "it holds 64 hex digits twice")
    public, secret = (bytes.fromhex(str(t)) for t in texts)
    require_curve()
    if z85.decode(zmq.curve_public(z85.encode(secret))) != public:
        raise unfit(path, "the key file", "holds two keys that do not belong together", "")
    return KeyPair(public, secret)
