"""Groups of commands that are imported when they are called, so that each starts as fast as its own
imports allow."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, ClassVar

import typer
from typer.core import TyperCommand, TyperGroup

from blockflow.bench.interrupts import unbroken

Entries = Mapping[str, tuple[str, str, str]]
"""Name -> module below blockflow.cli, function or group there, and the line that --help shows."""


class LazyGroup(TyperGroup):
    """Lists commands from :attr:`entries`; imports the one that is called."""

    entries: ClassVar[Entries] = {}

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        # Stand-ins with name and help: all that --help, completion and a guess at a typo look at.
        self.commands = {name: TyperCommand(name, help=e[2]) for name, e in self.entries.items()}

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, stand_in, rest = super().resolve_command(ctx, args)
        return name, stand_in if name is None else load(self.entries, name), rest


def load(entries: Entries, name: str) -> Any:
    """Import one command, or a group of them, and build it."""
    module, attribute, _ = entries[name]
    with unbroken():
        found = getattr(import_module(f"blockflow.cli.{module}"), attribute)
    if isinstance(found, typer.Typer):
        group = typer.main.get_command(found)
        group.name = name
        return group
    single = typer.Typer(add_completion=False)
    single.command(name)(found)
    return typer.main.get_command(single)
