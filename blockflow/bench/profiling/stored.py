"""Stored: the profiles and the choice that lie with a block, and whether they hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from rich.console import RenderableType
from rich.markup import escape

from blockflow.bench.grid import Grid, Rows
from blockflow.bench.numerals import significant
from blockflow.bench.profiling.plan import Effort
from blockflow.bench.profiling.report import legend, profile_table
from blockflow.core.engines import select
from blockflow.core.errors import BlockFlowError, RepositoryError
from blockflow.core.measuring import Subject
from blockflow.core.model import BlockInfo
from blockflow.core.scarcity import passed_over
from blockflow.repository.folder import split_reference
from blockflow.repository.profile_record import ProfileRecord
from blockflow.repository.profiles import ProfileStore
from blockflow.repository.repository import BlockRepository


@dataclass(frozen=True, slots=True)
class Shelf:
    """A block's records, each with the reasons why it does not hold (none: it holds); or those of a
    chain.

    ``unreadable`` says of each further file what is wrong with it;
    ``choices`` are the manifest's, by machine; ``machine`` is this one's fingerprint; ``auto`` is
    what runs the block here unless a topology says otherwise: engine and precision;
    ``refused`` has by variant the engines that may not run it, with what was found;
    ``chain`` are the blocks of a chain, as the command takes them; () = it is one block.
    """

    block: str
    machine: str
    records: tuple[tuple[ProfileRecord, tuple[str, ...]], ...]
    choices: Mapping[str, Mapping[str, Any]]
    auto: tuple[str, str] | None
    unreadable: tuple[BlockFlowError, ...] = ()
    refused: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    chain: tuple[str, ...] = ()

    @property
    def subject(self) -> Subject:
        """What a person measures to have a record."""
        return Subject(self.chain or (self.block,), chain=bool(self.chain))

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
    """What lies with a block; where a version is named, nothing that is another one's. Raises
    RepositoryError: the block cannot be read."""
    info = repository.info(block)
    store = ProfileStore(repository.root)
    others = _other_versions(repository, info) if split_reference(block)[1] else set()
    found = _records(store, repository, [info])
    records = tuple((r, reasons) for r, reasons in found if r.profile.digest not in others)
    unreadable = tuple(store.unreadable(info.name))
    auto = None
    with suppress(BlockFlowError):
        chosen = select(info, machine=store.machine)
        auto = chosen.engine, chosen.precision
    refused = {kind: v.refused for kind, v in info.variants.items() if v.refused}
    return Shelf(block, store.machine, records, info.choices, auto, unreadable, refused)


def _other_versions(repository: BlockRepository, info: BlockInfo) -> set[str]:
    """Digests of the block's other stored versions."""
    digests = set[str]()
    for version in repository.versions(info.name):
        with passed_over():  # one that cannot be read is no reason to show nothing
            digests.add(repository.info(f"{info.name}@{version}").digest)
    return digests - {info.digest}


def stored_chain(repository: BlockRepository, blocks: Sequence[str]) -> Shelf:
    """What lies with a chain's first block of the whole chain. Raises RepositoryError: as of
    :func:`stored`, of any of its blocks."""
    infos = [repository.info(block) for block in blocks]
    store = ProfileStore(repository.root)
    names = tuple(info.name for info in infos)
    found = _records(store, repository, infos)
    own = tuple((r, reasons) for r, reasons in found if r.key.blocks == names)
    unreadable = tuple(store.unreadable(names[0]))
    return Shelf("+".join(blocks), store.machine, own, {}, None, unreadable, chain=tuple(blocks))


def _records(
    store: ProfileStore, repository: BlockRepository, infos: Sequence[BlockInfo]
) -> tuple[tuple[ProfileRecord, tuple[str, ...]], ...]:
    """What lies with the first block, judged by these versions of them, and the current ones of
    others."""
    asked = {info.name: info for info in infos}

    def lookup(name: str) -> BlockInfo:
        return asked[name] if name in asked else repository.info(name)

    found = store.records(infos[0].name)
    return tuple((record, tuple(store.reasons(record, lookup))) for record in found)


def stored_tables(shelf: Shelf) -> Iterator[RenderableType]:
    """For a person: all records with their state, the table of what ``auto`` runs, the choice."""
    if shelf.records:
        rows = Rows()
        for record, reasons in shelf.records:
            key, measured = record.key, record.profile
            threads = measured.threads_measured()
            rows.row(
                key.name,
                f"{key.engine} {key.precision}{_options(key.options)}",
                _list(threads),
                _list(measured.rows_measured(threads[0]) if threads else ()),
                record.when[:16].replace("T", " "),
                f"stale: {'; '.join(reasons)}" if reasons else "holds",
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
            "any more; choose again: " + shelf.subject.command() + " --choose"
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
        blocks = tuple(split_reference(block)[0] for block in shelf.subject.blocks)
        own = [(r, reasons) for r, reasons in shelf.records if r.key.blocks == blocks]
        if any(not reasons for _, reasons in own):
            continue
        if not own and shelf.unreadable:
            return shelf.unreadable[0]
        if not own:
            return RepositoryError(
                "NO_PROFILE",
                f"{shelf.block} was not profiled",
                where=shelf.block,
                hint=f"measure it: {shelf.subject.command()}",
            )
        record, reasons = own[0]
        return RepositoryError(
            "STALE_PROFILE",
            f"no profile of {shelf.block} holds: {'; '.join(reasons)}",
            where=shelf.block,
            hint="measure it again: " + record.key.subject(shelf.subject.blocks).command(),
        )
    return None
