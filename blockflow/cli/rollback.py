"""``blockflow rollback`` and ``blockflow history``: back to what served before."""

from __future__ import annotations

from typing import Annotated, Any

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
    print_json,
    update_query,
)
from blockflow.monitor.rest import RestClient


def rollback(
    to: Annotated[
        int | None, typer.Option(min=1, help="The epoch to go back to; default: the one before.")
    ] = None,
    wait: Wait = True,
    dry_run: DryRun = False,
    if_epoch: IfEpoch = None,
    url: Url = "",
    json_: Json = False,
) -> None:
    """Put an earlier epoch's topology in force again, with the artifacts that it had.

    It is an update like any other and becomes a new epoch; `blockflow history` lists them.
    """
    from blockflow.monitor.view import update_lines

    body: dict[str, Any] = {} if to is None else {"to": to}
    query = update_query(wait, dry_run, if_epoch)
    with carried_out():
        answer = RestClient(url).post("/v1/rollback", body, query, timeout_s=UPDATE_S)
    print_answer(answer, json_, update_lines(answer))


def history(url: Url = "", json_: Json = False) -> None:
    """List the latest epochs: when and how each came, its tasks, and whether it can come back."""
    document = RestClient(url).get("/v1/history")
    if json_:
        print_json(document)
        return
    from blockflow.monitor.grids import history_grid
    from blockflow.monitor.screen import show_grid
    from blockflow.monitor.view import listing

    show_grid(history_grid(listing(document, "epochs")))
