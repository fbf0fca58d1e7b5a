"""ProfileStore: measured profiles beside the blocks that they are of, and whether they still hold.

Layout: ``<root>/<block>/profiles/<machine>.<engine>.<precision>[...].json``; a chain's profile lies
with its first block. What a measurement has so far lies beside the complete record that it will
replace (``...unfinished.json``), which holds until then. A profile holds for one artifact, one
machine and the versions that ran; any other is stale and is refused with the reason, because a
policy that predicts from it would predict wrongly and silently.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from blockflow.core.engines import Selection, select
from blockflow.core.errors import BlockFlowError, RepositoryError
from blockflow.core.measuring import Subject
from blockflow.core.model import BlockInfo
from blockflow.core.scarcity import no_room, passed_over
from blockflow.repository.descriptors import file_of
from blockflow.repository.folder import removed_on_failure, unopened
from blockflow.repository.founding import FOLDER_MODE
from blockflow.repository.machine import describe, fingerprint
from blockflow.repository.manifest import is_block_name
from blockflow.repository.profile_record import (
    ProfileKey,
    ProfileRecord,
    chain_digest,
    ran_by,
    staleness,
)
from blockflow.repository.repository import BlockRepository

FOLDER = "profiles"
MAX_BYTES = 4 * 1024 * 1024
_KEPT_ASIDE = 8
"""Records of other versions of a block, per engine; the oldest go."""

_FOLDER_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_DIRECTORY
_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


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
            SystemError_: NO_SPACE: it cannot be opened for want of a descriptor, say.
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
                that measures it (``details["command"]``).
        """
        key = ProfileKey.of([i.name for i in infos], selections)
        record = self.load(key)
        digest = chain_digest(infos)
        if record is not None and record.profile.digest != digest:
            record = self._read(key.blocks[0], _aside(key.file(self.machine), digest)) or record
        others = [] if record else [r for r in self.records(key.blocks[0]) if r.key == key]
        found = record or (others[0] if others else None)
        if found is None:
            command = self._again(key, infos)
            raise RepositoryError(
                "NO_PROFILE",
                f"{key.name} was not profiled under {key.engine} {key.precision} on this machine",
                where=key.name,
                hint=f"measure it: {command}",
                details={"command": command},
            )
        reasons = self._reasons(found, infos, selections)
        if reasons:
            command = self._again(key, infos)
            raise RepositoryError(
                "STALE_PROFILE",
                f"the profile of {key.name} does not hold: {'; '.join(reasons)}",
                where=key.name,
                hint=f"measure it again: {command}",
                details={"reasons": reasons, "command": command},
            )
        return found

    def reference(self, info: BlockInfo) -> str:
        """A block as commands take it: its name, with the version if another one is the current."""
        with suppress(RepositoryError):
            if BlockRepository(self.root).info(info.name).digest == info.digest:
                return info.name
        return f"{info.name}@{info.version}"

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
            RepositoryError: UNKNOWN_BLOCK when the block's folder is not there;
                REPOSITORY_UNUSABLE when it cannot be written.
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
                with removed_on_failure(folder, temp):
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
            missing = isinstance(e, FileNotFoundError)
            raise no_room(e, str(e), str(path)) or RepositoryError(
                "UNKNOWN_BLOCK" if missing else "REPOSITORY_UNUSABLE",
                f"the profile cannot be written: {e.strerror}",
                where=str(path),
                hint="check the repository and its permissions",
            ) from e
        return path

    def _keep_aside(self, folder: int, block: str, name: str, but: str) -> None:
        """Make way for a record of the artifact ``but`` under ``name``."""
        with passed_over():  # one that a disk does not give just now may be whole
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
            with file_of(fd) as f:
                raw = f.read(MAX_BYTES + 1)
        except FileNotFoundError:
            return None
        except OSError as e:
            lacking = unopened(e, self.root / block / FOLDER / name)
            raise lacking or self._unreadable(block, name, str(e.strerror)) from None
        try:
            if len(raw) > MAX_BYTES:
                raise ValueError(f"larger than {MAX_BYTES} bytes")
            return ProfileRecord.from_dict(json.loads(raw))
        except (ValueError, RecursionError) as e:
            raise self._unreadable(block, name, str(e)) from None

    def _unreadable(self, block: str, name: str, why: str) -> BlockFlowError:
        command = Subject((block,)).command()
        return RepositoryError(
            "STALE_PROFILE",
            f"the profile of {block} cannot be read: {why}",
            where=str(self.root / block / FOLDER / name),
            hint=f"measure it again: {command}",
            details={"command": command},
        )

    def _again(self, key: ProfileKey, infos: Sequence[BlockInfo]) -> str:
        return key.subject([self.reference(i) for i in infos]).command()

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
                    os.mkdir(FOLDER, FOLDER_MODE, dir_fd=opened[-1])
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
