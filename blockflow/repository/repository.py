"""BlockRepository: a folder of block folders, read so that nothing unverified is ever loaded.

Layout: ``<root>/<block>/manifest.json`` and ``<root>/<block>/<artifact>``. A folder without a
manifest is not a block, and the manifest is written last, so that a half-written block never shows.
All opens go component by component below the root without following links (O_NOFOLLOW).
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from pathlib import Path

from blockflow.core.errors import RepositoryError, SystemError_
from blockflow.core.model import BlockInfo
from blockflow.repository.manifest import (
    MANIFEST_NAME,
    MAX_MANIFEST_BYTES,
    Manifest,
    is_block_name,
    parse_manifest,
)

_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_FOLDER = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_DIRECTORY
_CHUNK = 1 << 20


class BlockRepository:
    """Blocks below ``root``. Cheap to make; holds no descriptors between calls.

    Every method raises :class:`RepositoryError`: UNKNOWN_BLOCK (with near matches),
    CORRUPT_MANIFEST, ARTIFACT_MISSING or DIGEST_MISMATCH.
    """

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root)

    def names(self) -> list[str]:
        """Names of all blocks, sorted. A missing root is an empty repository."""
        try:
            entries = list(os.scandir(self.root))
        except OSError:
            return []
        return sorted(
            e.name
            for e in entries
            if is_block_name(e.name)
            and e.is_dir(follow_symlinks=False)
            and os.path.lexists(os.path.join(e.path, MANIFEST_NAME))
        )

    def manifest(self, name: str) -> Manifest:
        with self._block_folder(name) as folder:
            return self._read_manifest(folder, name)

    def info(self, name: str) -> BlockInfo:
        return self.manifest(name).to_info()

    @contextmanager
    def artifact(self, name: str, *, digest: str | None = None) -> Iterator[Path]:
        """Open the artifact, check its digest, and lend a path to that very open file.

        The path (``/proc/self/fd/N``) is valid inside the ``with`` only; the bytes that were hashed
        are the ones that are read, whatever happens to the folder meanwhile.

        Args:
            name: the block.
            digest: the sha256 that the caller expects (a topology's or a launch order's); the
                manifest's own digest is always checked.
        """
        with self._block_folder(name) as folder:
            manifest, fd = self._open_artifact(folder, name)
            try:
                self._check(fd, manifest, digest)
                os.lseek(fd, 0, os.SEEK_SET)
                yield Path(f"/proc/self/fd/{fd}")
            finally:
                os.close(fd)

    def verify(self, name: str) -> Manifest:
        """Read the manifest and hash the artifact; returns the manifest when all is well."""
        with self.artifact(name):
            return self.manifest(name)

    def save(self, manifest: Manifest, artifact: Path | bytes) -> BlockInfo:
        """Store a block, or replace the one of that name, atomically and durably.

        ``manifest``'s ``artifact``, ``sha256`` and ``size`` are filled in from the bytes; the file
        gets its digest as part of its name, so a reader of the old manifest still finds the old
        file or starts over. Only the caller's process and others of this class write here: a lock
        on the block's folder orders them.

        Raises:
            SystemError_: NO_SPACE when the disk is full.
        """
        path = self.root / manifest.name
        try:
            path.mkdir(parents=True, exist_ok=True)
            with self._block_folder(manifest.name) as folder:
                fcntl.flock(folder, fcntl.LOCK_EX)
                stored = self._write(folder, manifest, artifact)
        except OSError as e:
            if e.errno in (errno.ENOSPC, errno.EDQUOT):
                raise SystemError_("NO_SPACE", str(e), where=str(path)) from e
            raise RepositoryError(
                "ARTIFACT_MISSING",
                f"the block cannot be written: {e}",
                where=str(path),
                hint="check the folder and its permissions",
            ) from e
        return stored.to_info()

    def _write(self, folder: int, manifest: Manifest, artifact: Path | bytes) -> Manifest:
        temp = f".artifact.{os.getpid()}"
        try:
            digest, size = _copy_in(folder, temp, artifact)
            final = f"{digest[:16]}.{manifest.format}"
            os.replace(temp, final, src_dir_fd=folder, dst_dir_fd=folder)
            stored = manifest.model_copy(update={"artifact": final, "sha256": digest, "size": size})
            temp = f".manifest.{os.getpid()}"
            _copy_in(folder, temp, stored.to_json())
            os.replace(temp, MANIFEST_NAME, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with suppress(OSError):
                os.unlink(temp, dir_fd=folder)
            raise
        for entry in os.listdir(folder):
            if entry not in (final, MANIFEST_NAME):
                with suppress(OSError):
                    os.unlink(entry, dir_fd=folder)
        os.fsync(folder)
        return stored

    @contextmanager
    def _block_folder(self, name: str) -> Iterator[int]:
        where = str(self.root / name) if is_block_name(name) else str(self.root)
        if not is_block_name(name):
            raise RepositoryError(
                "UNKNOWN_BLOCK",
                f"{name[:80]!r} is not a block name",
                where=where,
                hint="a name starts with a letter; letters, digits, '_', '.' and '-' follow",
            )
        try:
            root = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as e:
            raise RepositoryError(
                "UNKNOWN_BLOCK",
                f"no block {name!r}: the repository cannot be opened: {e.strerror}",
                where=str(self.root),
                hint="export a block first, or name another repository",
            ) from None
        try:
            folder = os.open(name, _FOLDER, dir_fd=root)
        except OSError:
            raise self._unknown(name) from None
        finally:
            os.close(root)
        try:
            yield folder
        finally:
            os.close(folder)

    def _unknown(self, name: str) -> RepositoryError:
        known = self.names()
        near = get_close_matches(name, known, 3)
        hint = f"did you mean {', '.join(near)}?" if near else f"known: {', '.join(known[:10])}"
        return RepositoryError(
            "UNKNOWN_BLOCK",
            f"no block {name!r}",
            where=str(self.root),
            hint=hint if known else "the repository is empty: export a block first",
            details={"near": near},
        )

    def _read_manifest(self, folder: int, name: str) -> Manifest:
        where = str(self.root / name / MANIFEST_NAME)
        try:
            fd = os.open(MANIFEST_NAME, _READ, dir_fd=folder)
        except FileNotFoundError:
            raise self._unknown(name) from None
        except OSError as e:
            raise RepositoryError(
                "CORRUPT_MANIFEST", f"the manifest cannot be opened: {e.strerror}", where=where
            ) from None
        with os.fdopen(fd, "rb") as f:
            if not stat.S_ISREG(os.fstat(f.fileno()).st_mode):
                raise RepositoryError("CORRUPT_MANIFEST", "not a regular file", where=where)
            raw = f.read(MAX_MANIFEST_BYTES + 1)
        return parse_manifest(raw, where=where, folder=name)

    def _open_artifact(self, folder: int, name: str) -> tuple[Manifest, int]:
        # A block that is replaced between the two opens is read again: the new pair is there. The
        # file is missing only if the manifest that names it is still in force.
        before: Manifest | None = None
        while True:
            manifest = self._read_manifest(folder, name)
            try:
                fd = os.open(manifest.artifact, _READ, dir_fd=folder)
            except FileNotFoundError:
                if manifest != before:
                    before = manifest
                    continue
                reason = "the file is not there"
            except OSError as e:
                reason = str(e.strerror)
            else:
                if stat.S_ISREG(os.fstat(fd).st_mode):
                    return manifest, fd
                os.close(fd)
                reason = "not a regular file"
            break
        raise RepositoryError(
            "ARTIFACT_MISSING",
            f"artifact {manifest.artifact!r} cannot be opened: {reason}",
            where=str(self.root / name),
            hint="artifacts are built, not committed: export the block again",
        )

    def _check(self, fd: int, manifest: Manifest, digest: str | None) -> None:
        where = str(self.root / manifest.name / manifest.artifact)
        size = os.fstat(fd).st_size
        hint = "the file was altered or truncated: export the block again"
        if size != manifest.size:
            raise RepositoryError(
                "DIGEST_MISMATCH",
                f"the artifact has {size} bytes, the manifest says {manifest.size}",
                where=where,
                hint=hint,
            )
        found = _digest(fd)
        for expected, who in ((manifest.sha256, "the manifest"), (digest, "the caller")):
            if expected is not None and found != expected:
                raise RepositoryError(
                    "DIGEST_MISMATCH",
                    f"sha256 is {found[:16]}..., {who} says {expected[:16]}...",
                    where=where,
                    hint=hint,
                )


def _digest(fd: int) -> str:
    with os.fdopen(os.dup(fd), "rb", buffering=0) as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def _copy_in(folder: int, name: str, data: Path | bytes) -> tuple[str, int]:
    """Write ``data`` to a new file in ``folder`` and sync it; returns its sha256 and size."""
    with suppress(FileNotFoundError):
        os.unlink(name, dir_fd=folder)
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(name, flags, 0o644, dir_fd=folder), "r+b") as target:
        if isinstance(data, bytes):
            target.write(data)
        else:
            with data.open("rb") as source:
                shutil.copyfileobj(source, target, _CHUNK)
        target.flush()
        os.fsync(target.fileno())
        target.seek(0)
        return _digest(target.fileno()), target.seek(0, os.SEEK_END)
