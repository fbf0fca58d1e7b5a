"""ProfileStore: measured profiles beside the blocks that they are of, and whether they still hold.

Layout: ``<root>/<block>/profiles/<machine>.<engine>.<precision>[...].json``; a chain's profile lies
with its first block. What a measurement has so far lies beside the complete record that it will
replace (``...unfinished.json``), which holds until then. A profile holds for one artifact, one
machine and the versions that ran; any other is stale and is refused with the reason, because a
policy that predicts from it would predict wrongly and silently.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from blockflow.core.engines import AUTO, Selection, select
from blockflow.core.errors import BlockFlowError, RepositoryError, SystemError_
from blockflow.core.measuring import Subject
from blockflow.core.model import BlockInfo
from blockflow.core.profile import StageProfile
from blockflow.repository.machine import describe, fingerprint
from blockflow.repository.manifest import is_block_name
from blockflow.repository.repository import BlockRepository

SCHEMA_VERSION = 1
FOLDER = "profiles"
MAX_BYTES = 4 * 1024 * 1024
_KEPT_ASIDE = 8
"""Records of other versions of a block, per engine; the oldest go."""

_FOLDER_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_DIRECTORY
_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


@dataclass(frozen=True, slots=True)
class ProfileKey:
    """What a profile is of: one block or a chain, under one engine with precision and options."""

    blocks: tuple[str, ...]
    engine: str
    precision: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, blocks: Sequence[str], selections: Sequence[Selection]) -> ProfileKey:
        """``auto`` stands for a chain whose blocks run under different engines."""
        first = selections[0]
        options = dict(first.options)
        for s in selections[1:]:
            if (s.engine, s.precision, dict(s.options)) != (first.engine, first.precision, options):
                return cls(tuple(blocks), AUTO, AUTO)
        return cls(tuple(blocks), first.engine, first.precision, options)

    @property
    def name(self) -> str:
        """The block, or the chain's blocks with '+' between them."""
        return "+".join(self.blocks)

    def subject(self, blocks: Sequence[str] = ()) -> Subject:
        """What a person measures to have it (again); ``blocks`` as the command takes them, by
        default their names."""
        names = tuple(blocks) or self.blocks
        return Subject(names, self.engine, self.precision, self.options, len(names) > 1)

    def file(self, machine: str) -> str:
        """Name of the file for a machine. Options and chains are in it by their digests."""
        parts = [machine, self.engine, self.precision]
        if self.options:
            parts.append("o" + _short(json.dumps(dict(self.options), sort_keys=True)))
        if len(self.blocks) > 1:
            parts.append("c" + _short(self.name))
        return ".".join([*parts, "json"])


@dataclass(frozen=True, slots=True)
class ProfileRecord:
    """A profile as it is stored.

    Attributes:
        key: what it is of.
        profile: the times of the block, or of the whole chain.
        parts: of a chain: the times of each block in it.
        ran: block -> engine, precision and sha256 of the file (the artifact or a variant).
        facts: the machine, as :func:`blockflow.repository.machine.describe` told it.
        settings: how it was measured, for the reader and for going on.
        complete: False while a measurement is under way or was interrupted.
        when: UTC, ISO 8601.
    """

    key: ProfileKey
    profile: StageProfile
    parts: tuple[StageProfile, ...]
    ran: Mapping[str, str]
    facts: Mapping[str, Any]
    settings: Mapping[str, Any]
    complete: bool
    when: str

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema_version": SCHEMA_VERSION,
            "blocks": list(self.key.blocks),
            "options": dict(self.key.options),
            "profile": self.profile.to_dict(),
            "parts": [p.to_dict() for p in self.parts],
            "ran": dict(self.ran),
            "facts": dict(self.facts),
            "settings": dict(self.settings),
            "complete": self.complete,
            "when": self.when,
        }

    @classmethod
    def from_dict(cls, data: Any) -> ProfileRecord:
        """Inverse of :meth:`to_dict`. Raises ValueError."""
        try:
            if data["schema_version"] != SCHEMA_VERSION:
                raise ValueError(f"schema version {data['schema_version']!r}")
            profile = StageProfile.from_dict(data["profile"])
            options, ran = dict(data["options"]), dict(data["ran"])
            blocks = tuple(str(b) for b in data["blocks"])
            return cls(
                ProfileKey(blocks, profile.engine, profile.precision, options),
                profile,
                tuple(StageProfile.from_dict(p) for p in data["parts"]),
                {str(k): str(v) for k, v in ran.items()},
                dict(data["facts"]),
                dict(data["settings"]),
                data["complete"] is True,
                str(data["when"]),
            )
        except (KeyError, TypeError, AttributeError) as e:
            raise ValueError(f"not a profile: {type(e).__name__}: {e}") from e


def chain_digest(infos: Sequence[BlockInfo]) -> str:
    """What identifies a chain's artifacts; of one block: its digest."""
    if len(infos) == 1:
        return infos[0].digest
    return hashlib.sha256("+".join(i.digest for i in infos).encode()).hexdigest()


def ran_by(infos: Sequence[BlockInfo], selections: Sequence[Selection]) -> dict[str, str]:
    """block -> engine, precision and sha256 of the file that its selection loads."""
    out = {}
    for info, s in zip(infos, selections, strict=True):
        digest = info.digest if s.variant is None else info.variants[s.variant].digest
        out[info.name] = f"{s.engine} {s.precision} {digest}"
    return out


def staleness(
    record: ProfileRecord, digest: str, ran: Mapping[str, str], facts: Mapping[str, Any]
) -> list[str]:
    """Why ``record`` does not hold (any more); empty if it does.

    Args:
        record: a stored profile.
        digest: :func:`chain_digest` of the blocks as they are now.
        ran: :func:`ran_by` of them.
        facts: the machine as it is now.
    """
    out = []
    if record.profile.digest != digest:
        out.append(f"artifact: measured {record.profile.digest[:12]}, now {digest[:12]}")
    elif dict(record.ran) != dict(ran):
        out.append("a converted variant was made anew, or another engine runs a block")
    for name in {**facts, **record.facts}:
        was, now = record.facts.get(name), facts.get(name)
        if was != now:
            out.append(f"{name}: measured on {was or 'none'}, now {now or 'none'}")
    return out


class ProfileStore:
    """Profiles below a block repository's root. Holds no descriptors between calls.

    Args:
        root: of the repository.
        machine, facts: this machine's fingerprint and description, unless given.
    """

    def __init__(
        self,
        root: Path | str,
        machine: str | None = None,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        self.root = Path(root)
        self.machine = fingerprint() if machine is None else machine
        self.facts: Mapping[str, Any] = describe() if facts is None else facts

    def load(self, key: ProfileKey) -> ProfileRecord | None:
        """This machine's complete record, else an unfinished one; None where there is none.

        Raises:
            RepositoryError: STALE_PROFILE when the file cannot be read as a profile.
        """
        block, name = key.blocks[0], key.file(self.machine)
        return self._read(block, name) or self._read(block, _unfinished(name))

    def unfinished(self, key: ProfileKey) -> ProfileRecord | None:
        """What an interrupted measurement has left; raises as :meth:`load`."""
        return self._read(key.blocks[0], _unfinished(key.file(self.machine)))

    def records(self, block: str) -> list[ProfileRecord]:
        """All readable records in a block's folder, those of other machines too, by file name."""
        return [r for r in self._found(block) if isinstance(r, ProfileRecord)]

    def unreadable(self, block: str) -> list[BlockFlowError]:
        """What is wrong with each file there that cannot be read."""
        return [e for e in self._found(block) if isinstance(e, BlockFlowError)]

    def _found(self, block: str) -> Iterator[ProfileRecord | BlockFlowError | None]:
        for name in self._names(block):
            try:
                yield self._read(block, name)
            except RepositoryError as e:
                yield e

    def fresh(self, infos: Sequence[BlockInfo], selections: Sequence[Selection]) -> ProfileRecord:
        """The complete record of a block (or chain) that holds here and now.

        Raises:
            RepositoryError: NO_PROFILE, or STALE_PROFILE with all reasons; both with the command
                that measures it.
        """
        key = ProfileKey.of([i.name for i in infos], selections)
        record = self.load(key)
        digest = chain_digest(infos)
        if record is not None and record.profile.digest != digest:
            record = self._read(key.blocks[0], _aside(key.file(self.machine), digest)) or record
        others = [] if record else [r for r in self.records(key.blocks[0]) if r.key == key]
        found = record or (others[0] if others else None)
        if found is None:
            raise RepositoryError(
                "NO_PROFILE",
                f"{key.name} was not profiled under {key.engine} {key.precision} on this machine",
                where=key.name,
                hint=f"measure it: {self._again(key, infos)}",
            )
        reasons = self._reasons(found, infos, selections)
        if reasons:
            raise RepositoryError(
                "STALE_PROFILE",
                f"the profile of {key.name} does not hold: {'; '.join(reasons)}",
                where=key.name,
                hint=f"measure it again: {self._again(key, infos)}",
                details={"reasons": reasons},
            )
        return found

    def reference(self, info: BlockInfo) -> str:
        """A block as commands take it: its name, with the version if another one is the current."""
        with suppress(RepositoryError):
            if BlockRepository(self.root).info(info.name).digest == info.digest:
                return info.name
        return f"{info.name}@{info.version}"

    def _again(self, key: ProfileKey, infos: Sequence[BlockInfo]) -> str:
        return key.subject([self.reference(i) for i in infos]).command()

    def reasons(self, record: ProfileRecord, lookup: Callable[[str], BlockInfo]) -> list[str]:
        """Why a stored record does not hold here and now; empty if it does.

        ``lookup`` finds a block as it is now; what it raises is a reason as well.
        """
        key = record.key
        try:
            infos = [lookup(b) for b in key.blocks]
            selections = [
                select(i, key.engine, key.precision, key.options, machine=self.machine)
                for i in infos
            ]
        except BlockFlowError as e:
            return [e.message]
        return self._reasons(record, infos, selections)

    def _reasons(
        self,
        record: ProfileRecord,
        infos: Sequence[BlockInfo],
        selections: Sequence[Selection],
    ) -> list[str]:
        digest, ran = chain_digest(infos), ran_by(infos, selections)
        found = staleness(record, digest, ran, self.facts)
        if not found and not record.complete:
            return ["the measurement was interrupted"]
        return found

    def save(self, record: ProfileRecord) -> Path:
        """Write a record, whole or not at all; returns the file.

        A complete one takes the place of the one that was there, which is kept aside if it is of
        another version of the block, and of the unfinished one.

        Raises:
            RepositoryError: UNKNOWN_BLOCK when the block's folder is not there.
            SystemError_: NO_SPACE.
        """
        block, name = record.key.blocks[0], record.key.file(record.profile.machine)
        target = name if record.complete else _unfinished(name)
        path = self.root / block / FOLDER / target
        data = (json.dumps(record.to_dict(), indent=1) + "\n").encode()
        temp = f".{os.getpid()}.part"
        try:
            with self._folder(block, make=True) as folder:
                flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
                with os.fdopen(os.open(temp, flags, 0o644, dir_fd=folder), "wb") as f:
                    f.write(data)
                    f.flush()
                    os.fsync(f.fileno())
                if record.complete:
                    self._keep_aside(folder, block, name, record.profile.digest)
                os.replace(temp, target, src_dir_fd=folder, dst_dir_fd=folder)
                if record.complete:
                    with suppress(FileNotFoundError):
                        os.unlink(_unfinished(name), dir_fd=folder)
        except OSError as e:
            if e.errno in (errno.ENOSPC, errno.EDQUOT):
                raise SystemError_("NO_SPACE", str(e), where=str(path)) from e
            raise RepositoryError(
                "UNKNOWN_BLOCK",
                f"the profile cannot be written: {e.strerror}",
                where=str(path),
                hint="check the repository and its permissions",
            ) from e
        return path

    def _keep_aside(self, folder: int, block: str, name: str, but: str) -> None:
        """Make way for a record of the artifact ``but`` under ``name``."""
        with suppress(RepositoryError):
            there = self._read(block, name)
            if there is not None and there.profile.digest != but:
                aside = _aside(name, there.profile.digest)
                os.replace(name, aside, src_dir_fd=folder, dst_dir_fd=folder)
        with suppress(FileNotFoundError):
            os.unlink(_aside(name, but), dir_fd=folder)
        kept = [
            n for n in os.listdir(folder) if n.startswith(_aside(name, "").removesuffix(".json"))
        ]
        kept.sort(key=lambda n: os.stat(n, dir_fd=folder, follow_symlinks=False).st_mtime_ns)
        for old in kept[:-_KEPT_ASIDE]:
            os.unlink(old, dir_fd=folder)

    def _names(self, block: str) -> list[str]:
        try:
            with self._folder(block) as folder:
                return sorted(n for n in os.listdir(folder) if n.endswith(".json"))
        except OSError:
            return []

    def _read(self, block: str, name: str) -> ProfileRecord | None:
        try:
            with self._folder(block) as folder:
                fd = os.open(name, _READ_FLAGS, dir_fd=folder)
            with os.fdopen(fd, "rb") as f:
                raw = f.read(MAX_BYTES + 1)
        except FileNotFoundError:
            return None
        except OSError as e:
            raise self._unreadable(block, name, str(e.strerror)) from None
        try:
            if len(raw) > MAX_BYTES:
                raise ValueError(f"larger than {MAX_BYTES} bytes")
            return ProfileRecord.from_dict(json.loads(raw))
        except (ValueError, RecursionError) as e:
            raise self._unreadable(block, name, str(e)) from None

    def _unreadable(self, block: str, name: str, why: str) -> BlockFlowError:
        return RepositoryError(
            "STALE_PROFILE",
            f"the profile of {block} cannot be read: {why}",
            where=str(self.root / block / FOLDER / name),
            hint=f"measure it again: {Subject((block,)).command()}",
        )

    @contextmanager
    def _folder(self, block: str, *, make: bool = False) -> Iterator[int]:
        """Descriptor of ``<block>/profiles``, opened below the root without following links."""
        if not is_block_name(block):
            raise FileNotFoundError(errno.ENOENT, "not a block name")
        opened = [os.open(self.root, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)]
        try:
            opened.append(os.open(block, _FOLDER_FLAGS, dir_fd=opened[-1]))
            if make:
                with suppress(FileExistsError):
                    os.mkdir(FOLDER, dir_fd=opened[-1])
            opened.append(os.open(FOLDER, _FOLDER_FLAGS, dir_fd=opened[-1]))
            yield opened[-1]
        finally:
            for fd in opened:
                os.close(fd)


def _aside(name: str, digest: str) -> str:
    """Where the record of an artifact lies while ``name`` holds that of another version."""
    return f"{name.removesuffix('.json')}.v{digest[:8]}.json"


def _unfinished(name: str) -> str:
    """Where a measurement under way, or an interrupted one, keeps what will be ``name``."""
    return f"{name.removesuffix('.json')}.unfinished.json"


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]
