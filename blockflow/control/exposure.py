"""Exposure: what must be there before anything listens beyond this machine."""

from __future__ import annotations

import logging
import os
import stat
from functools import partial
from pathlib import Path
from ssl import SSLContext

from blockflow.control.auth import TokenAuth
from blockflow.control.kept_secrets import KeptSecrets
from blockflow.control.rest.tls import Certificate, loaded_context
from blockflow.control.settings import ControlSettings, is_loopback
from blockflow.core.errors import RequestError, SystemError_
from blockflow.launch.ward import CERTIFICATE, KEY, TOKEN
from blockflow.tensormq.keys import Keyring

log = logging.getLogger("blockflow.control")

NONE_KEPT = KeptSecrets()


def check_exposure(settings: ControlSettings, kept: KeptSecrets = NONE_KEPT) -> TokenAuth | None:
    """Refuse to listen for other machines without secrets, and read those that there are.

    A secret that is named but unfit (missing, short, readable by others) ends the start: it is
    never taken as "none". A successor goes on with the one that was in force.

    Args:
        settings: of the control plane.
        kept: gets the token, or has it from a former Manager.

    Returns:
        The check for REST's token; None when REST is open to this machine.

    Raises:
        RequestError: INVALID_REQUEST: a host beyond loopback without keys, or REST there without
            TLS.
        SystemError_: UNAUTHORIZED: keys or token are unfit. MISSING_EXTRA: no CURVE here.
    """
    for host, option in ((settings.host, "--host"), (settings.client_host, "--client-host")):
        if not is_loopback(host) and settings.keys is None:
            raise RequestError(
                "INVALID_REQUEST",
                f"refusing to listen on {host!r} without a token and CURVE keys",
                where=option,
                hint="blockflow keys init, then blockflow up --keys FOLDER; or stay on 127.0.0.1 "
                "behind a tunnel (ssh -L)",
            )
    token = settings.token_file
    if settings.keys is not None:
        ring = Keyring(settings.keys)
        try:
            ring.server()
        except SystemError_ as e:
            if not kept.inherited:
                raise
            log.warning("%s; a new Dispatcher will need it", e)
        token = token or ring.token_file
    auth = None
    if token is not None:
        auth = TokenAuth(token, kept.get(TOKEN), partial(kept.keep, TOKEN))
    if not is_loopback(settings.host) and settings.rest_cert is None:
        if not settings.rest_plain:
            raise RequestError(
                "INVALID_REQUEST",
                f"refusing to serve REST on {settings.host!r} as plain HTTP: who can listen on the "
                "network could read the token",
                where="--host",
                hint="--rest-cert FILE --rest-key FILE; or stay on 127.0.0.1 behind a tunnel "
                "(ssh -L); or --rest-plain where something else encrypts the way here",
            )
        log.warning(
            "REST on %s is plain HTTP, as asked for by --rest-plain: who can listen on the network "
            "can read the token",
            settings.host,
        )
    return auth


def check_tls(settings: ControlSettings, kept: KeptSecrets = NONE_KEPT) -> Certificate | None:
    """REST's certificate, if there shall be one.

    Args:
        settings: of the control plane.
        kept: gets certificate and key, or has them from a former Manager.

    Raises:
        RequestError: INVALID_REQUEST: one of the two files only, or unfit ones.
        SystemError_: UNAUTHORIZED: the key is not private.
    """
    certificate, key = settings.rest_cert, settings.rest_key
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        raise RequestError(
            "INVALID_REQUEST",
            "a certificate and its key go together",
            where="--rest-key" if key is None else "--rest-cert",
            hint="name both --rest-cert and --rest-key",
        )

    def keep() -> None:
        kept.keep_file(CERTIFICATE, certificate)
        kept.keep_file(KEY, key)

    return Certificate(certificate, key, _kept_context(kept), keep)


def _kept_context(kept: KeptSecrets) -> SSLContext | None:
    """Of what had passed :func:`~blockflow.control.rest.tls.tls_context` before: memory files have
    no path that it could check."""
    certificate, key = kept.path(CERTIFICATE), kept.path(KEY)
    if certificate is None or key is None:
        return None
    try:
        return loaded_context(certificate, key)
    except (OSError, ValueError) as e:  # renewed just as it was read and kept, perhaps
        log.warning("the kept certificate and its key cannot be used: %s", e)
        return None


def check_state_dir(folder: Path) -> None:
    """Refuse a state folder that somebody else may write to: who does decides what is deployed at
    the next start. One that is not there yet is made private.

    Raises:
        SystemError_: STATE_UNUSABLE.
    """
    try:
        found = folder.stat()
    except OSError:  # there is none; or nobody can use it, which its opening will tell
        return
    if found.st_uid not in (os.geteuid(), 0):
        why, hint = "belongs to another user", "chown it to this user"
    elif found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        why, hint = "can be written to by others", f"chmod go-w {folder}"
    else:
        return
    raise SystemError_(
        "STATE_UNUSABLE",
        f"the state directory {why}",
        where=str(folder),
        hint=f"{hint}, or name one that is not there yet: --state-dir",
    )
