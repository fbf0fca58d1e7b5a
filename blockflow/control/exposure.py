"""Exposure: what must be there before anything listens beyond this machine."""

from __future__ import annotations

import logging

from blockflow.control.auth import TokenAuth
from blockflow.control.settings import ControlSettings, is_loopback
from blockflow.core.errors import RequestError
from blockflow.tensormq.keys import Keyring

log = logging.getLogger("blockflow.control")


def check_exposure(settings: ControlSettings) -> TokenAuth | None:
    """Refuse to listen for other machines without secrets, and read those that there are.

    A secret that is named but unfit (missing, short, readable by others) ends the start: it is
    never taken as "none".

    Returns:
        The check for REST's token; None when REST is open to this machine.

    Raises:
        RequestError: INVALID_REQUEST: a host beyond loopback without keys.
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
        ring.server()
        token = token or ring.token_file
    auth = TokenAuth(token) if token is not None else None
    if not is_loopback(settings.host):
        log.warning(
            "REST on %s is plain HTTP: who can listen on the network can read the token; "
            "put a proxy with TLS before it, or a tunnel",
            settings.host,
        )
    return auth
