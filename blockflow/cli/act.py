"""Commands that change something: ping, drain, undrain, restart, stop, monitor, kpis."""

from __future__ import annotations

import os
import select
import time
from contextlib import ExitStack, suppress
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from blockflow.cli.complete import complete_block
from blockflow.cli.options import UPDATE_S, Block, Json, Url, carried_out, print_answer, print_json
from blockflow.core.errors import BlockFlowError, RequestError, make_error
from blockflow.monitor.rest import RestClient, segment

_END_S = 120.0
"""How long the end of the whole system is waited for."""

_LOOK_S = 0.1

AnyBlock = Annotated[
    str | None, typer.Argument(help="A block; none means all.", autocompletion=complete_block)
]


class Switch(StrEnum):
    ON = "on"
    OFF = "off"


class KpiAction(StrEnum):
    SHOW = "show"
    STORE = "store"


def ping(block: AnyBlock = None, url: Url = "", json_: Json = False) -> None:
    """Ask every worker (or those of BLOCK) for a sign of life.

    Exit status 4 when one does not answer in time.
    """
    from blockflow.monitor.view import ping_lines, ping_ok

    path = f"/v1/blocks/{segment(block)}/ping" if block is not None else "/v1/ping"
    answer = RestClient(url).post(path)
    print_answer(answer, json_, ping_lines(answer))
    if not ping_ok(answer):
        raise typer.Exit(4)


def drain(block: Block, url: Url = "", json_: Json = False) -> None:
    """Let BLOCK finish what it has and take no more; its tasks answer BLOCK_UNAVAILABLE."""
    _act(block, "drain", f"{block}: drained", url, json_)


def undrain(block: Block, url: Url = "", json_: Json = False) -> None:
    """Let a drained BLOCK take work again."""
    _act(block, "undrain", f"{block}: takes work again", url, json_)


def restart(block: Block, url: Url = "", json_: Json = False) -> None:
    """Replace the workers of BLOCK: the new ones serve before the old ones stop."""
    _act(block, "restart", f"{block}: restarted", url, json_)


def stop(
    block: AnyBlock = None,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Don't ask before stopping all.")
    ] = False,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Return when the whole system has ended.")
    ] = True,
    url: Url = "",
    json_: Json = False,
) -> None:
    """Stop the workers of BLOCK; without BLOCK, the whole system."""
    if block is not None:  # an empty name is a script's mistake, and not all of them
        _act(block, "stop", f"{block}: stopped", url, json_)
        return
    client = RestClient(url)
    if not yes and json_:
        raise RequestError("INVALID_REQUEST", "stopping all needs --yes", hint="add --yes")
    if not yes:
        _confirm(f"Stop the whole system at {client.url}?")
    with ExitStack() as scope:
        ended = None
        if wait:
            fd = _open_here(client.get("/v1/status"))
            if fd is not None:
                scope.callback(os.close, fd)
            ended = partial(_await_silence, client) if fd is None else partial(_await_end, fd)
        answer = client.post("/v1/shutdown", timeout_s=_END_S)
        if ended is not None and not ended():
            raise make_error("TIMEOUT", "it has not ended yet", where=client.url)
    print_answer(answer, json_, [f"{client.url}: {'stopped' if wait else 'shutting down'}"])


def monitor(
    switch: Annotated[Switch, typer.Argument(help="on or off")],
    hz: Annotated[float, typer.Option(min=0.1, max=50, help="Samples per second.")] = 4.0,
    url: Url = "",
    json_: Json = False,
) -> None:
    """Turn the KPI samples of all processes on or off."""
    body: dict[str, Any] = {"on": switch is Switch.ON}
    if switch is Switch.ON:
        body["hz"] = hz
    answer = RestClient(url).post("/v1/monitor", body)
    state = f"on, {hz:g} samples per second" if switch is Switch.ON else "off"
    print_answer(answer, json_, [f"monitor: {state}"])


def kpis(
    action: Annotated[KpiAction, typer.Argument(help="show or store")] = KpiAction.SHOW,
    file: Annotated[
        str, typer.Argument(help="store: a file name like run1.jsonl, kept by the control plane.")
    ] = "",
    force: Annotated[
        bool, typer.Option("--force", help="store: replace a file of that name.")
    ] = False,
    url: Url = "",
    json_: Json = False,
) -> None:
    """Show the latest KPIs as JSON, or store the recent samples in a file."""
    client = RestClient(url)
    if action is KpiAction.SHOW:
        if file:
            raise RequestError("INVALID_REQUEST", "show takes no file", where=file)
        if force:
            raise RequestError("INVALID_REQUEST", "show takes no --force", where="--force")
        print_json(client.get("/v1/kpis"))
        return
    if not file:
        raise RequestError(
            "INVALID_REQUEST", "no file name", hint="blockflow kpis store run1.jsonl"
        )
    answer = client.post("/v1/kpis/store", {"file": file} | ({"force": True} if force else {}))
    print_answer(answer, json_, [f"{answer.get('path', file)}: {answer.get('count', '?')} records"])


def _confirm(question: str) -> None:
    try:
        sure = typer.confirm(question)
    except typer.Abort:  # nobody there to answer
        sure = False
    if not sure:
        raise RequestError("INVALID_REQUEST", "nothing was stopped", hint="--yes does not ask")


def _open_here(status: Any) -> int | None:
    """A descriptor of the control plane's process, which ends last, if it is on this host: the
    process of that number may be another one here. Ours holds its instance's lock."""
    from blockflow.tensormq.janitor import LOCK_NAME  # a tenth of a second, for `stop` alone

    pid, run_dir = status.get("pid"), status.get("run_dir")
    if not isinstance(pid, int) or not isinstance(run_dir, str):
        return None
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return None
    with suppress(OSError):
        lock = os.stat(Path(run_dir, LOCK_NAME))
        held = Path("/proc", str(pid), "fd")
        for name in os.listdir(held):
            with suppress(FileNotFoundError):  # it has closed that one since
                if os.path.samestat(lock, os.stat(held / name)):
                    return fd
    os.close(fd)
    return None


def _await_end(fd: int) -> bool:
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(_END_S * 1000))


def _await_silence(client: RestClient) -> bool:
    """Wait until nothing answers any more: all that can be seen of another host."""
    end = time.monotonic() + _END_S
    while time.monotonic() < end:
        try:
            client.get("/v1/health/live")
        except BlockFlowError as exc:
            if exc.code == "NOT_RUNNING":
                return True
        time.sleep(_LOOK_S)
    return False


def _act(block: str, verb: str, done: str, url: str, json_: bool) -> None:
    from blockflow.monitor.view import update_lines

    with carried_out():
        answer = RestClient(url).post(f"/v1/blocks/{segment(block)}/{verb}", timeout_s=UPDATE_S)
    update = answer.get("update", {})
    as_hoped = update.get("state") in ("done", "unchanged") and not update.get("notes")
    print_answer(answer, json_, [done] if as_hoped else update_lines(answer))
