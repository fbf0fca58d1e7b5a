"""Options that commands share, and how they print."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blockflow.cli.complete import complete_block, complete_task
from blockflow.cli.exits import exit_code
from blockflow.cli.streams import complain
from blockflow.core.errors import BlockFlowError, RequestError
from blockflow.core.text import has_half, visible

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, ProgressColumn

UPDATE_S = 600.0
"""Time-out of a call that waits for an update, or for an operation on a block: large models need
their time to load. The control plane gives up waiting, and says how far it is, before that."""

_STDOUT, _STDERR = 1, 2
"""Descriptors."""


def _not_empty(context: typer.Context, parameter: typer.CallbackParam, value: str) -> str:
    """Where to: an empty word is a script's mistake, and not the system that is meant without."""
    if not value and was_given(context, parameter.name or ""):
        raise RequestError(
            "INVALID_REQUEST",
            f"{parameter.opts[0]} is empty",
            hint=f"leave it out for {parameter.envvar} or the default",
        )
    return value


Url = Annotated[
    str,
    typer.Option(
        "--url",
        callback=_not_empty,
        envvar="BLOCKFLOW_URL",
        help="The control plane's REST address.",
        show_default="http://127.0.0.1:5780",
    ),
]
Address = Annotated[
    str,
    typer.Option(
        "--address",
        callback=_not_empty,
        envvar="BLOCKFLOW_ADDRESS",
        help="The Dispatcher's client address.",
        show_default="tcp://127.0.0.1:5755",
    ),
]
ClientKeys = Annotated[
    str,
    typer.Option(
        "--client-keys",
        envvar="BLOCKFLOW_CLIENT_KEYS",
        help="This client's key file, for a Dispatcher that asks for keys.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
IfEpoch = Annotated[
    int | None,
    typer.Option(min=0, help="Only if this epoch is in force: nobody else's update is undone."),
]
Wait = Annotated[
    bool, typer.Option("--wait/--no-wait", help="Return when it is in force, or at once.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only show what would start and stop.")]
Block = Annotated[str, typer.Argument(help="A block.", autocompletion=complete_block)]
Tasks = Annotated[
    list[str],
    typer.Argument(help="Tasks; several share one input.", autocompletion=complete_task),
]


def update_query(wait: bool, dry_run: bool, if_epoch: int | None) -> dict[str, str]:
    """The query of an update or a rollback."""
    query = {"dry_run": "true"} if dry_run else {"wait": "true" if wait else "false"}
    return query if if_epoch is None else {**query, "if_epoch": str(if_epoch)}


def was_given(context: typer.Context, name: str) -> bool:
    """Whether a parameter stands in the command line; a default or the environment is no such."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def typed_command(context: typer.Context, *flags: str) -> str:
    """The command line of a command of ``blockflow``, as a shell takes it: what was given, and no
    defaults; ``flags`` are parameters that are set in any case."""
    arguments: list[str] = []
    options: list[str] = []
    for parameter in context.command.params:
        name = parameter.name or ""
        if name not in flags and not was_given(context, name):
            continue
        value = name in flags or context.params[name]
        values = value if isinstance(value, list | tuple) else [value]
        if parameter.param_type_name == "argument":
            arguments += map(str, values)
        elif isinstance(value, bool):
            options += parameter.opts[:1] if value else parameter.secondary_opts[:1]
        else:
            options += [word for v in values for word in (parameter.opts[0], str(v))]
    return shlex.join(["blockflow", context.info_name or "", *arguments, *options])


@contextmanager
def carried_out() -> Iterator[None]:
    """Around a call that the control plane carries out to its end, whoever waits for it."""
    try:
        yield
    except KeyboardInterrupt:
        complain("the control plane goes on with what it was asked for; blockflow status tells")
        raise


def bar(*columns: ProgressColumn, console: Console | None = None) -> Progress:
    """What is done, a bar, and ``columns``: gone when done, and nothing where there is no terminal.
    On the standard error, or where ``console`` prints."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

    console = console or Console(stderr=True)
    first = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn())
    return Progress(
        *first, *columns, console=console, transient=True, disable=not console.is_terminal
    )


@contextmanager
def progress_bar() -> Iterator[Callable[[str, float], None]]:
    """Yields ``show(what, fraction)``, which moves a :func:`bar`."""
    from rich.progress import TimeElapsedColumn

    with bar(TimeElapsedColumn()) as p:
        task = p.add_task("starting", total=1.0)

        def show(what: str, fraction: float) -> None:
            p.update(task, description=what, completed=fraction)

        yield show


def commas(text: str) -> list[str]:
    """``a, b`` as a list."""
    return [part.strip() for part in text.split(",") if part.strip()]


@contextmanager
def users_output() -> Iterator[None]:
    """What a user's own code, and the programs that it calls, print goes to the standard error: the
    standard output holds a command's answer alone."""
    sys.stdout.flush()
    try:
        kept = os.dup(_STDOUT)
    except OSError:  # it is closed
        kept = -1
    try:
        if kept >= 0:
            os.dup2(_STDERR, _STDOUT)
        with redirect_stdout(sys.stderr):
            yield
    finally:
        if kept >= 0:
            sys.stdout.flush()
            os.dup2(kept, _STDOUT)
            os.close(kept)


def print_json(document: Any) -> None:
    """The one document of a ``--json`` command: UTF-8, or ASCII where the output is of another
    encoding, or where a name in it is not UTF-8."""
    text = json.dumps(document, indent=2, ensure_ascii=False)
    encoding = (sys.stdout.encoding or "utf-8").lower()
    if has_half(text) or encoding not in ("utf-8", "utf8"):
        text = json.dumps(document, indent=2)
    sys.stdout.write(text + "\n")


def close_json(document: dict[str, Any], error: BlockFlowError | None) -> None:
    """The one document of a ``--json`` command that has something to show also when it fails:
    ``error`` is in it, on the standard error, and in the exit status."""
    if error is None:
        print_json(document)
        return
    print_json({**document, "error": error.to_dict()})
    complain(error)
    raise typer.Exit(exit_code(error))


def print_line(text: str) -> None:
    """A line of a command's answer for people; it may quote anything."""
    sys.stdout.write(visible(text) + "\n")


def print_answer(answer: Any, json_: bool, lines: Iterable[str]) -> None:
    """As JSON, or ``lines`` of it for people."""
    if json_:
        print_json(answer)
        return
    for line in lines:
        print_line(line)
