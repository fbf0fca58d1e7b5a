"""Commands that only look: status, top, tasks, topology."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from blockflow.cli.exits import ExitCode
from blockflow.cli.options import Json, Url, print_json, print_line
from blockflow.core.errors import BlockFlowError, SystemError_
from blockflow.monitor.rest import RestClient
from blockflow.monitor.view import is_ready, listing

_STATUS = "/v1/status"


def status(url: Url = "", json_: Json = False) -> None:
    """Show health, epoch, blocks, workers and tasks.

    Exit status 4 when the system runs but a block of its topology has no ready worker.
    """
    document = RestClient(url).get(_STATUS)
    if json_:
        print_json(document)
    else:
        from rich.console import Console

        from blockflow.monitor.screen import show, status_screen

        console = Console(highlight=False)
        show(status_screen(document, console.width), console)
    if not is_ready(document):
        raise typer.Exit(ExitCode.NOT_READY)


def top(
    interval: Annotated[
        float, typer.Option("--interval", "-n", min=0.1, max=60, help="Seconds between updates.")
    ] = 1.0,
    url: Url = "",
    json_: Json = False,
) -> None:
    """Watch blocks, processes and tasks live; q ends it.

    Without a terminal, or with --json, it shows one screen and ends.
    """
    client = RestClient(url)
    if json_:
        print_json(client.get(_STATUS))
        return
    from blockflow.monitor.top import Top

    Top(lambda: client.get(_STATUS), interval).run()


def tasks(url: Url = "", json_: Json = False) -> None:
    """List the published tasks with path, input and output."""
    document = RestClient(url).get("/v1/tasks")
    if json_:
        print_json(document)
        return
    from blockflow.monitor.grids import contract_grid
    from blockflow.monitor.screen import show_grid

    show_grid(contract_grid(listing(document, "tasks")))


def _none_in_force(document: Mapping[str, Any]) -> BlockFlowError:
    hint = "apply one (blockflow apply)"
    if document.get("posted") is not None:
        hint = (
            f"epoch {document.get('epoch')} could not be deployed (blockflow status says why); "
            "blockflow topology --posted shows what was posted for it"
        )
    return SystemError_("NOT_READY", "no topology is in force", hint=hint)


def topology(
    posted: Annotated[
        bool, typer.Option("--posted", help="The body as it was posted, not the complete form.")
    ] = False,
    url: Url = "",
    json_: Json = False,
) -> None:
    """Show the topology in force as JSON that `blockflow apply` takes.

    With --posted also one that is stored and could not be deployed. Exit status 4: there is none.
    """
    document = RestClient(url).get("/v1/topology")
    if json_:
        print_json(document)
        return
    shown = document.get("posted" if posted else "topology")
    if shown is None:
        raise _none_in_force(document)
    print_line(json.dumps(shown, indent=2, ensure_ascii=False))
