"""``blockflow apply``: post a system update."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from blockflow.cli.options import (
    UPDATE_S,
    DryRun,
    IfEpoch,
    Json,
    Url,
    Wait,
    carried_out,
    print_answer,
    update_query,
)
from blockflow.core import limits
from blockflow.core.errors import BlockFlowError, RequestError
from blockflow.monitor.rest import RestClient


def apply(
    file: Annotated[str, typer.Argument(help="A topology as JSON; - reads the standard input.")],
    wait: Wait = True,
    dry_run: DryRun = False,
    if_epoch: IfEpoch = None,
    url: Url = "",
    json_: Json = False,
) -> None:
    """Apply the topology in FILE: what is missing starts, what is unneeded stops, the rest runs on.

    All errors of a topology are shown at once, each with its JSON path.
    """
    from blockflow.monitor.view import update_lines

    body = _read(file)
    query = update_query(wait, dry_run, if_epoch)
    try:
        with carried_out():
            answer = RestClient(url).post("/v1/system-update", body, query, timeout_s=UPDATE_S)
    except BlockFlowError as exc:
        if exc.code == "BAD_BODY":
            exc.where = file  # the reader knows the file, not the request that it became
        if exc.code == "CONNECTION_LOST":
            exc.hint += "; the same update again is harmless"
        raise
    print_answer(answer, json_, update_lines(answer))


def _read(file: str) -> bytes:
    try:
        if file == "-":
            raw = sys.stdin.buffer.read(limits.MAX_REST_BODY_BYTES + 1)
        else:
            with Path(file).open("rb") as stream:
                raw = stream.read(limits.MAX_REST_BODY_BYTES + 1)
    except OSError as exc:
        raise RequestError(
            "INVALID_REQUEST", f"cannot read it: {exc.strerror}", where=file
        ) from exc
    if len(raw) > limits.MAX_REST_BODY_BYTES:
        raise RequestError("TOO_LARGE", f"more than {limits.MAX_REST_BODY_BYTES} bytes", where=file)
    return raw
