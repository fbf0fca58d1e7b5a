"""``blockflow keys``: the server's keys, the REST token, and which clients may connect."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blockflow.cli.options import Json, print_answer
from blockflow.core.errors import RequestError

if TYPE_CHECKING:
    from blockflow.tensormq.keys import Keyring


class KeyAction(StrEnum):
    INIT = "init"
    NEW = "new"
    MAKE = "make"
    AUTHORISE = "authorise"
    REVOKE = "revoke"
    LIST = "list"


def keys(
    action: Annotated[
        KeyAction,
        typer.Argument(help="init, new NAME, make, authorise NAME KEY, revoke NAME, list"),
    ],
    name: Annotated[str, typer.Argument(help="A client, as you call it.")] = "",
    key: Annotated[str, typer.Argument(help="authorise: its public key, 64 hex digits.")] = "",
    folder: Annotated[
        Path | None,
        typer.Option(
            "--keys",
            envvar="BLOCKFLOW_KEYS",
            help="The server's folder of keys.",
            show_default="~/.config/blockflow/keys",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="new, make: the client's key file.", show_default="NAME.key"
        ),
    ] = None,
    json_: Json = False,
) -> None:
    """Make and manage the keys of server and clients.

    init makes the server's key pair and the REST token. new makes a client's key
    file and authorises it. make only makes one, on the client's own machine,
    whose public key is then authorised on the server. revoke and list do as they
    say. Changes hold at once.
    """
    from blockflow.control.settings import default_keys
    from blockflow.tensormq.keys import Keyring

    ring = Keyring((folder or default_keys()).absolute())
    _check_arguments(action, name, key, output)
    document, lines = _ACTIONS[action](ring, name, key, output)
    print_answer(document, json_, lines)


_Told = tuple[dict[str, Any], list[str]]


def _init(ring: Keyring, _name: str, _key: str, _output: Path | None) -> _Told:
    pair = ring.create()
    document = {
        "folder": str(ring.folder),
        "public": pair.public.hex(),
        "token_file": str(ring.token_file),
    }
    return document, [
        f"folder  {ring.folder}",
        f"server  {pair.public.hex()}",
        f"token   {ring.token_file}",
        f"serve with them: blockflow up --keys {ring.folder}",
    ]


def _new(ring: Keyring, name: str, _key: str, output: Path | None) -> _Told:
    from blockflow.tensormq.keys import KeyPair, write_key_file

    server, pair = ring.server(), KeyPair.make()
    file = output or Path(f"{name}.key")
    write_key_file(file, pair, server.public)
    try:
        ring.authorise(name, pair.public)
    except BaseException:
        file.unlink()
        raise
    document = {"client": name, "public": pair.public.hex(), "file": str(file)}
    return document, [
        f"{name}: authorised, {pair.public.hex()}",
        f"hand over {file} in a safe way: Client(address, client_keys={str(file)!r})",
    ]


def _make(_ring: Keyring, name: str, _key: str, output: Path | None) -> _Told:
    from blockflow.tensormq.keys import KeyPair, write_key_file

    pair = KeyPair.make()
    file = output or Path(f"{name or 'client'}.key")
    write_key_file(file, pair)
    public = pair.public.hex()
    return {"public": public, "file": str(file)}, [
        f"{file}: keep it to yourself",
        f"on the server: blockflow keys authorise {name or 'NAME'} {public}",
    ]


def _authorise(ring: Keyring, name: str, key: str, _output: Path | None) -> _Told:
    from blockflow.tensormq.keys import public_key

    ring.server()  # a folder that is not there yet authorises nobody
    public = public_key(key, "KEY")
    ring.authorise(name, public)
    return {"client": name, "public": public.hex()}, [f"{name}: authorised"]


def _revoke(ring: Keyring, name: str, _key: str, _output: Path | None) -> _Told:
    ring.revoke(name)
    return {"client": name}, [
        f"{name}: revoked; a connection that stands ends with its client or the Dispatcher"
    ]


def _list(ring: Keyring, _name: str, _key: str, _output: Path | None) -> _Told:
    server, clients = ring.server().public.hex(), ring.clients()
    document = {
        "folder": str(ring.folder),
        "server": server,
        "clients": [{"name": n, "public": k.hex()} for n, k in clients.items()],
    }
    width = max((len(n) for n in clients), default=0)
    lines = [f"  {n:{width}}  {k.hex()}" for n, k in clients.items()]
    return document, [f"server {server}", *(lines or ["no client is authorised"])]


_ACTIONS = {
    KeyAction.INIT: _init,
    KeyAction.NEW: _new,
    KeyAction.MAKE: _make,
    KeyAction.AUTHORISE: _authorise,
    KeyAction.REVOKE: _revoke,
    KeyAction.LIST: _list,
}
_NAMED = (KeyAction.NEW, KeyAction.AUTHORISE, KeyAction.REVOKE)


def _check_arguments(action: KeyAction, name: str, key: str, output: Path | None) -> None:
    problem = ""
    if action in _NAMED and not name:
        problem = "needs a client's NAME"
    elif action is KeyAction.AUTHORISE and not key:
        problem = "needs the client's public KEY"
    elif action in (KeyAction.INIT, KeyAction.LIST) and name:
        problem = "takes no NAME"
    elif action is not KeyAction.AUTHORISE and key:
        problem = "takes no KEY"
    elif action not in (KeyAction.NEW, KeyAction.MAKE) and output is not None:
        problem = "writes no key file of a client"
    if problem:
        raise RequestError("INVALID_REQUEST", f"{action} {problem}", where=str(action))
