"""``blockflow doctor``: what would keep this machine from serving, with a remedy for each."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from blockflow.cli.exits import ExitCode
from blockflow.cli.options import Json, print_json
from blockflow.core.text import visible

if TYPE_CHECKING:
    from blockflow.monitor.doctor.facts import Finding


def doctor(
    repository: Annotated[
        Path, typer.Option("--repository", "-r", help="Folder with the blocks.")
    ] = Path("blocks"),
    state_dir: Annotated[
        Path | None,
        typer.Option(
            "--state-dir",
            help="Folder of the durable state.",
            show_default="~/.local/state/blockflow",
        ),
    ] = None,
    keys: Annotated[
        Path | None,
        typer.Option(
            "--keys",
            envvar="BLOCKFLOW_KEYS",
            help="Folder of keys.",
            show_default="~/.config/blockflow/keys, if there is one",
        ),
    ] = None,
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="REST's port.")] = 5780,
    client_port: Annotated[
        int, typer.Option("--client-port", min=1, max=65535, help="The clients' port.")
    ] = 5755,
    all_: Annotated[
        bool, typer.Option("--all", help="Hash every artifact, however large.")
    ] = False,
    json_: Json = False,
) -> None:
    """Look for what would keep this machine from serving, or from serving well.

    Nothing is changed. Exit status 4 when something is found that must be mended;
    notes and warnings are no failure.
    """
    # With numpy comes OpenBLAS, which begins threads, and interrupts the process (SIGINT) that gets
    # none: just then somebody wants to know what is missing.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from blockflow.monitor.doctor.checks import examine, summary, worst
    from blockflow.monitor.doctor.facts import Level
    from blockflow.monitor.doctor.gather import HASHED_BYTES, gather

    facts = gather(
        repository,
        state_dir=state_dir,
        keys=keys,
        rest_port=port,
        client_port=client_port,
        hash_bytes=2**63 if all_ else HASHED_BYTES,
    )
    findings = examine(facts)
    if json_:
        print_json(summary(findings))
    else:
        _show(findings)
    if worst(findings) is Level.ERROR:
        raise typer.Exit(ExitCode.NOT_READY)


_STYLES = {"ok": "green", "note": "cyan", "warning": "yellow", "error": "bold red"}


def _show(findings: list[Finding]) -> None:
    from collections import Counter

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for f in findings:
        text = Text(visible(f.text))  # others name files, and what listens
        if f.remedy:
            text.append(f"\n-> {visible(f.remedy)}", style="dim")
        table.add_row(Text(str(f.level), style=_STYLES[f.level]), f.check, text)
    counts = Counter(str(f.level) for f in findings)
    told = ", ".join(f"{counts[level]} {level}" for level in _STYLES if counts[level])
    console = Console(highlight=False)
    console.print(table)
    console.print(Text(told, style="dim"))
