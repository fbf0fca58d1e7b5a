"""Options that commands share, and how they print."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

from blockflow.cli.complete import complete_block, complete_task

Url = Annotated[
    str,
    typer.Option(
        "--url",
        envvar="BLOCKFLOW_URL",
        help="The control plane's REST address.",
        show_default="http://127.0.0.1:5780",
    ),
]
Address = Annotated[
    str,
    typer.Option(
        "--address",
        envvar="BLOCKFLOW_ADDRESS",
        help="The Dispatcher's client address.",
        show_default="tcp://127.0.0.1:5755",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
Block = Annotated[str, typer.Argument(help="A block.", autocompletion=complete_block)]
Tasks = Annotated[
    list[str],
    typer.Argument(help="Tasks; several share one input.", autocompletion=complete_task),
]


def print_json(document: Any) -> None:
    """The one document of a ``--json`` command."""
    sys.stdout.write(json.dumps(document, indent=2, ensure_ascii=False) + "\n")


def print_line(text: str) -> None:
    """A line of a command's answer for people."""
    sys.stdout.write(text + "\n")
