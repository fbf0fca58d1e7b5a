"""``blockflow demo``: the whole system on real images in a few minutes."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from shlex import quote
from typing import Annotated

import typer
from rich.console import Console

from blockflow.bench.demo.data import HELD_OUT
from blockflow.bench.demo.run import DEFAULT_PORTS, EPOCHS, REQUESTS, Demo, Outcome, Settings
from blockflow.bench.interrupts import interruptible
from blockflow.cli.exits import ExitCode
from blockflow.cli.options import Json, close_json
from blockflow.cli.outputs import check_output
from blockflow.core.errors import BlockFlowError, make_error
from blockflow.monitor.rest import RestClient


def demo(
    keep: Annotated[bool, typer.Option("--keep", help="Leave the system running.")] = False,
    reuse: Annotated[bool, typer.Option("--reuse", help="Use an earlier run's blocks.")] = False,
    topology: Annotated[Path, typer.Option(help="The update to deploy.")] = Path("topology.json"),
    repository: Annotated[
        Path, typer.Option("--repository", "-r", help="Where the blocks are put.")
    ] = Path("blocks"),
    results: Annotated[Path, typer.Option(help="For picture and figures.")] = Path("results"),
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the images.")] = EPOCHS,
    images: Annotated[int, typer.Option(min=1, max=HELD_OUT, help="Images to send.")] = HELD_OUT,
    requests: Annotated[int, typer.Option(min=1, help="Requests per latency.")] = REQUESTS,
    seed: Annotated[int, typer.Option(min=0, help="Of split and training.")] = 7,
    rest_port: Annotated[int, typer.Option(min=0, help="With --keep: for REST.")] = DEFAULT_PORTS[
        0
    ],
    client_port: Annotated[
        int, typer.Option(min=0, help="With --keep: for clients.")
    ] = DEFAULT_PORTS[1],
    as_json: Json = False,
) -> None:
    """Train, deploy and serve three tasks on real digits, and measure all of it."""
    check_output(results / "demo.png", "--results")
    console = Console(stderr=as_json, highlight=False)
    settings = Settings(
        topology=topology,
        repository=repository,
        results=results,
        images=images,
        requests=requests,
        epochs=epochs,
        seed=seed,
        reuse=reuse,
        keep=keep,
        rest_port=rest_port,
        client_port=client_port,
    )
    try:
        with interruptible():
            outcome = Demo(settings, console, RestClient).run()
    except KeyboardInterrupt:
        console.print("Interrupted. The system was stopped.")
        raise typer.Exit(ExitCode.INTERRUPTED) from None
    error = _close(console, outcome, settings)
    if as_json:
        close_json(outcome.to_dict(), error)
    elif error is not None:
        raise error


def _close(console: Console, outcome: Outcome, settings: Settings) -> BlockFlowError | None:
    """Say what there is now; an error when something was left that should have gone."""
    console.print(f"\nPicture: {outcome.picture}\nFigures: {outcome.figures}")
    left = outcome.leftovers
    if left is None:
        # unwrapped: these lines are copied into a shell
        console.print(what_next(outcome, settings), soft_wrap=True)
    elif left:
        return make_error("INTERNAL", f"left behind: {', '.join((*left.processes, *left.files))}")
    else:
        console.print("The system has ended; no process and no shared memory is left.")
    return None


def what_next(outcome: Outcome, settings: Settings) -> str:
    """The commands for a system that was kept, as they work in the shell that started the demo."""
    lines = []
    activate = Path(sys.prefix, "bin", "activate")
    if shutil.which("blockflow") is None and activate.exists():  # `make demo` activates nothing
        lines.append(f". {quote(str(activate))}")
    if (settings.rest_port, settings.client_port) != DEFAULT_PORTS:
        lines.append(f"export BLOCKFLOW_URL={outcome.rest_url}")
        lines.append(f"export BLOCKFLOW_ADDRESS={outcome.client_address}")
    lines += [
        "blockflow status",
        "blockflow top",
        "blockflow infer digit parity high --random",
        f"blockflow apply {quote(str(settings.topology))}",
        f"curl {outcome.rest_url}/openapi.json",
    ]
    around = "".join(f"  {line}\n" for line in lines)
    return (
        f"\nThe system runs on (process {outcome.pid}, log {outcome.log}). To look around:\n"
        f"{around}"
        "To end it, and to remove its log and state:\n"
        f"  blockflow stop --yes && rm -r {quote(str(outcome.log.parent))}"
    )
