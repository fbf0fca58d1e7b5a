"""Stored: the profiles and the choice that lie with a block, and whether they hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from rich.console import RenderableType
from rich.markup import escape

from blockflow.bench.grid import Grid
from blockflow.bench.numerals import significant
from blockflow.bench.profiling.plan import Effort
from blockflow.bench.profiling.report import legend, profile_table
from blockflow.core.engines import select
from blockflow.core.errors import BlockFlowError, RepositoryError
from blockflow.core.measuring import Subject
from blockflow.repository.folder import split_reference
from blockflow.repository.profile_record import ProfileRecord
from blockflow.repository.profiles import ProfileStore
from blockflow.repository.repository import BlockRepository


@dataclass(frozen=True, slots=True)
class Shelf:
    """A block's records, each with the reasons why it does not hold (none: it holds).

    ``unreadable`` says of each further file what is wrong with it;
    ``choices`` are the manifest's, by machine; ``machine`` is this one's fingerprint; ``auto`` is
    what runs the block here unless a topology says otherwise: engine and precision;
    ``refused`` has by variant the engines that may not run it, with what was found.
    """

    block: str
    machine: str
    records: tuple[tuple[ProfileRecord, tuple[str, ...]], ...]
    choices: Mapping[str, Mapping[str, Any]]
    auto: tuple[str, str] | None
    unreadable: tuple[BlockFlowError, ...] = ()
    refused: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return {
            "block": self.block,
            "machine": self.machine,
            "choice": self.choices.get(self.machine),
            "profiles": [
                {"fresh": not reasons, "reasons": list(reasons), **record.to_dict()}
                for record, reasons in self.records
            ],
            "unreadable": [error.to_dict() for error in self.unreadable],
            "refused_engines": {kind: dict(engines) for kind, engines in self.refused.items()},
        }


def stored(repository: BlockRepository, block: str) -> Shelf:
    """What lies with a block. Raises RepositoryError: the block cannot be read."""
    info = repository.info(block)
    store = ProfileStore(repository.root)
    records = [(r, tuple(store.reasons(r, repository.info))) for r in store.records(block)]
    unreadable = tuple(store.unreadable(block))
    auto = None
    with suppress(BlockFlowError):
        chosen = select(info, machine=store.machine)
        auto = chosen.engine, chosen.precision
    refused = {kind: v.refused for kind, v in info.variants.items() if v.refused}
    return Shelf(block, store.machine, tuple(records), info.choices, auto, unreadable, refused)


def stored_tables(shelf: Shelf) -> Iterator[RenderableType]:
    """For a person: all records with their state, the table of what ``auto`` runs, the choice."""
    if shelf.records:
        rows = []
        for record, reasons in shelf.records:
            key, measured = record.key, record.profile
            threads = measured.threads_measured()
            rows.append(
                (
                    key.name,
                    f"{key.engine} {key.precision}{_options(key.options)}",
                    _list(threads),
                    _list(measured.rows_measured(threads[0]) if threads else ()),
                    record.when[:16].replace("T", " "),
                    f"stale: {'; '.join(reasons)}" if reasons else "holds",
                )
            )
        heads = ("of", "engine", "threads", "rows", "measured", "state")
        yield Grid(f"profiles of {shelf.block}", heads, rows, frozenset(heads)).rich()
    for record, reasons in shelf.records:
        key = record.key
        if not reasons and (len(key.blocks) > 1 or (key.engine, key.precision) == shelf.auto):
            title = f"{key.name}: {key.engine} {key.precision}{_options(key.options)}"
            effort = Effort.of(record.settings)
            yield profile_table(title, record.profile.points, effort)
            if effort is not None and (note := legend(record.profile.points, effort)):
                yield escape(note)
    for error in shelf.unreadable:
        yield escape(f"{error.where}: {error.message}")
    for kind, engines in shelf.refused.items():
        for engine, why in engines.items():
            yield escape(f"{shelf.block}: {engine} may not run variant {kind}: it {why}")
    choice = shelf.choices.get(shelf.machine)
    if choice is not None and shelf.auto not in (None, (choice["engine"], choice["precision"])):
        yield escape(
            f"{shelf.block}: the choice of {choice['engine']} {choice['precision']} does not count "
            "any more; choose again: " + Subject((shelf.block,)).command() + " --choose"
        )
    elif choice is not None:
        yield escape(
            f"{shelf.block}: auto is {choice['engine']} {choice['precision']} here, "
            f"{significant(choice['ms'])} ms/row against {significant(choice['reference_ms'])}, "
            f"error {choice['error']:.2g}"
        )


def _options(options: Mapping[str, Any]) -> str:
    return "".join(f" {k}={v}" for k, v in sorted(options.items()))


def _list(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))  # a narrow column is to break between them


def problem(shelves: Sequence[Shelf]) -> BlockFlowError | None:
    """The first block without a profile that holds, as an error with the command that helps."""
    for shelf in shelves:
        # A chain that begins with the block lies with it; it tells nothing of the block alone.
        alone = (split_reference(shelf.block)[0],)
        own = [(r, reasons) for r, reasons in shelf.records if r.key.blocks == alone]
        if any(not reasons for _, reasons in own):
            continue
        if not own and shelf.unreadable:
            return shelf.unreadable[0]
        if not own:
            return RepositoryError(
                "NO_PROFILE",
                f"{shelf.block} was not profiled",
                where=shelf.block,
                hint=f"measure it: {Subject((shelf.block,)).command()}",
            )
        record, reasons = own[0]
        return RepositoryError(
            "STALE_PROFILE",
            f"no profile of {shelf.block} holds: {'; '.join(reasons)}",
            where=shelf.block,
            hint=f"measure it again: {record.key.subject().command()}",
        )
    return None
