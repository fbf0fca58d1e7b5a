"""A block's folder from the inside: its files, and the versions of the block that lie in it.

The version that was stored last is the current one: ``manifest.json``. The ones before it are kept
as ``manifest@<version>.json``. Artifacts are named after their digests, so that those of all
versions lie side by side; what no manifest pins is removed. Every function takes the open folder.
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from blockflow.core.errors import BlockFlowError, RepositoryError
from blockflow.core.limits import VERSION_CHARS
from blockflow.core.onnxfile import ExternalData, NotOnnx, refuse_external
from blockflow.core.scarcity import no_room, unanswered
from blockflow.repository.descriptors import file_of
from blockflow.repository.manifest import (
    MANIFEST_NAME,
    MAX_MANIFEST_BYTES,
    Manifest,
    is_block_name,
    parse_manifest,
)

_ONNX = frozenset(("onnx", "onnx-int8"))
READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
OPEN_ROOT = os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY
OPEN_FOLDER = OPEN_ROOT | os.O_NOFOLLOW
_CHUNK = 1 << 20
_OURS = re.compile(r"[0-9a-f]{16}\.|\.(artifact|manifest)\.\d")
"""Files that this module has written: artifacts, and what a killed writer left."""

UNFINISHED = re.compile(r"\.(artifact|manifest)\.\d+(\.before)?")
"""What one writes before it has its name."""

_KEPT = re.compile(rf"manifest@({VERSION_CHARS})\.json")


def unopened(error: OSError, path: Path) -> BlockFlowError | None:
    """NO_SPACE where ``path`` cannot be opened for want of a descriptor, say, UNKNOWN_BLOCK where
    its disk does not answer; else None: only then does the error tell something of what is stored.
    """
    lacking = no_room(error, f"cannot be opened: {error.strerror}", str(path))
    return lacking or unanswered(error, str(path))


def closed(error: OSError, path: Path) -> RepositoryError | None:
    """UNKNOWN_BLOCK where this user may not open a block's folder; else None."""
    if not isinstance(error, PermissionError):
        return None
    return RepositoryError(
        "UNKNOWN_BLOCK",
        f"no block {path.name!r}: its folder cannot be opened: {error.strerror}",
        where=str(path),
        hint="let this user read the repository's folders and files",
    )


def block_names(root: Path) -> list[str]:
    """Names of the blocks below ``root``, sorted; none where it is not there, or closed to us.

    Raises:
        BlockFlowError: NO_SPACE, or the repository does not answer.
    """
    try:
        entries = list(os.scandir(root))
    except OSError as e:
        lacking = unopened(e, root)
        if lacking is not None:
            raise lacking from e
        return []
    return sorted(
        e.name
        for e in entries
        if is_block_name(e.name)
        and e.is_dir(follow_symlinks=False)
        and os.path.lexists(os.path.join(e.path, MANIFEST_NAME))
    )


def split_reference(reference: str) -> tuple[str, str]:
    """(name, version) of ``name@version``; the version is empty where the current one is meant."""
    name, _, version = reference.partition("@")
    return name, version


def kept_file(version: str) -> str:
    """The manifest's file of a version that is not the current one."""
    return f"manifest@{version}.json"


def kept_versions(folder: int) -> list[str]:
    """Labels of all versions that are kept beside the current one, in order."""
    try:
        entries = os.listdir(folder)
    except OSError as e:
        raise unopened(e, Path(os.readlink(f"/proc/self/fd/{folder}"))) or e from None
    return sorted(m[1] for m in map(_KEPT.fullmatch, entries) if m)


def digest_of(fd: int) -> str:
    """sha256 of an open file from where it stands, in hex."""
    with os.fdopen(os.dup(fd), "rb", buffering=0) as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def _refuse_external(folder: int, name: str, size: int) -> None:
    """Raises RepositoryError: UNSUPPORTED_FORMAT: tensors of the model lie in another file."""
    if not size:
        return
    with (
        os.fdopen(os.open(name, READ, dir_fd=folder), "rb") as f,
        mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as content,
        memoryview(content) as view,
    ):
        try:
            refuse_external(view)
        except NotOnnx:  # the engine says so
            pass
        except ExternalData as e:
            raise RepositoryError(
                "UNSUPPORTED_FORMAT",
                f"{e}, which no digest covers",
                hint="save it as one file (onnx.save without save_as_external_data)",
            ) from e


def place(folder: int, data: Path | bytes, kind: str) -> tuple[str, str, int]:
    """Write ``data`` under a name made of its digest; returns name, sha256 and size."""
    temp = f".artifact.{os.getpid()}"
    with removed_on_failure(folder, temp):
        digest, size = _copy_in(folder, temp, data)
        if kind in _ONNX:
            _refuse_external(folder, temp, size)
        final = f"{digest[:16]}.{kind}"
        os.replace(temp, final, src_dir_fd=folder, dst_dir_fd=folder)
    return final, digest, size


class Pending:
    """A version of a block that lies complete in the folder and is not in force yet.

    What may fail, most of all for want of space, has been done when it is made; until
    :meth:`finish` everything can be undone.

    Attributes:
        manifest: with its artifact.
        temp: the file that becomes the manifest; what it replaces is kept beside it until then.
        replaces: whether the folder holds a manifest so far.
    """

    def __init__(self, folder: int, manifest: Manifest, data: Path | bytes) -> None:
        self._folder = folder
        self.temp = f".manifest.{os.getpid()}"
        self._in_force = False
        try:
            self._before = _bytes(folder, MANIFEST_NAME)
        except OSError as e:
            if unopened(e, Path(MANIFEST_NAME)):  # it may be there, and would be lost
                raise
            self._before = b""
        self.replaces = bool(self._before)
        try:
            file, digest, size = place(folder, data, manifest.format)
            pinned = {"artifact": file, "sha256": digest, "size": size}
            # whatever was made of another artifact is not this block's
            self.manifest = manifest.model_copy(update={**pinned, "variants": {}, "choices": {}})
            current = _parsed(self._before)  # one that cannot be read is nothing to keep
            if current is not None and current.version != manifest.version:
                _write(folder, kept_file(current.version), self._before)
            if self.replaces:
                _copy_in(folder, _before(self.temp), self._before)
            _copy_in(folder, self.temp, self.manifest.to_json())
        except BaseException:
            self.undo()
            raise

    def put(self) -> None:
        """Put it in force, durably."""
        self._in_force = True  # before: an interrupt may come between the two
        os.replace(self.temp, MANIFEST_NAME, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        os.fsync(self._folder)

    def undo(self) -> None:
        """Let the folder be as it was, be it in force or not."""
        if self._in_force:
            with suppress(OSError):
                restore(self._folder, self.temp, self.replaces)
        else:
            _tidy(self._folder, _both(self.temp), _parsed(self._before))

    def finish(self) -> None:
        """Remove what it has replaced; from now on it stays."""
        _tidy(self._folder, _both(self.temp), self.manifest)


def restore(folder: int, temp: str, replaces: bool) -> None:
    """Undo what a :class:`Pending` has done, be it of this process or of one that was killed.

    Args:
        folder: the block's.
        temp: its ``temp``.
        replaces: whether there was a manifest before.
    """
    with suppress(FileNotFoundError):  # it is restored already
        if replaces:
            os.replace(_before(temp), MANIFEST_NAME, src_dir_fd=folder, dst_dir_fd=folder)
        else:
            os.unlink(MANIFEST_NAME, dir_fd=folder)
    _tidy(folder, _both(temp), _parsed(_raw(folder, MANIFEST_NAME)))


def _both(temp: str) -> tuple[str, str]:
    """What a :class:`Pending` writes before it is in force."""
    return temp, _before(temp)


def _before(temp: str) -> str:
    return f"{temp}.before"


def _tidy(folder: int, unfinished: Iterable[str], current: Manifest | None) -> None:
    kept = () if current is None else (kept_file(current.version),)  # it is manifest.json
    for file in (*unfinished, *kept):
        with suppress(OSError):
            os.unlink(file, dir_fd=folder)
    remove_unpinned(folder)


def put_manifest(folder: int, manifest: Manifest, file: str = MANIFEST_NAME) -> None:
    """Replace the manifest of a version, then remove what no version of the block pins any more."""
    _write(folder, file, manifest.to_json())
    remove_unpinned(folder)
    os.fsync(folder)


def remove_unpinned(folder: int) -> None:
    """Remove artifacts that no version of the block pins."""
    entries = os.listdir(folder)
    files = [f for f in entries if f == MANIFEST_NAME or _KEPT.fullmatch(f)]
    versions = [_parsed(_raw(folder, f)) for f in files]
    known = [v for v in versions if v is not None]
    if len(known) == len(versions):  # else: what a broken one pins is not ours to judge
        pinned = {f for v in known for f in v.files}
        for entry in entries:
            # nor is what else lies here (profiles)
            if _OURS.match(entry) and entry not in pinned:
                with suppress(OSError):
                    os.unlink(entry, dir_fd=folder)


def refuse_link(path: Path) -> None:
    """Raises RepositoryError: REPOSITORY_UNUSABLE where a block's folder is a link."""
    try:
        linked = path.is_symlink()
    except OSError:  # it cannot be looked at, which its use will tell
        return
    if linked:
        raise RepositoryError(
            "REPOSITORY_UNUSABLE",
            "the block's folder is a link",
            where=str(path),
            hint="remove it, or name the repository that it leads to",
        )


def read_manifest(folder: int, where: Path, name: str, file: str) -> Manifest:
    """Read and check one manifest of block ``name``.

    Raises:
        FileNotFoundError: there is none.
        RepositoryError: CORRUPT_MANIFEST; UNKNOWN_BLOCK: the repository does not answer.
        SystemError_: NO_SPACE.
    """
    try:
        fd = os.open(file, READ, dir_fd=folder)
    except FileNotFoundError:
        raise
    except OSError as e:
        raise unopened(e, where) or RepositoryError(
            "CORRUPT_MANIFEST", f"the manifest cannot be opened: {e.strerror}", where=str(where)
        ) from None
    try:
        with file_of(fd) as f:
            if not stat.S_ISREG(os.fstat(f.fileno()).st_mode):
                raise RepositoryError("CORRUPT_MANIFEST", "not a regular file", where=str(where))
            raw = f.read(MAX_MANIFEST_BYTES + 1)
    except OSError as e:  # a folder, say
        raise unopened(e, where) or RepositoryError(
            "CORRUPT_MANIFEST", f"the manifest cannot be read: {e.strerror}", where=str(where)
        ) from None
    return parse_manifest(raw, where=str(where), folder=name)


def having(manifest: Manifest, digest: str | None, variant: str | None, root: Path) -> Manifest:
    """``manifest``, if its artifact (or variant) is the one that is wanted.

    Raises:
        RepositoryError: ARTIFACT_MISSING.
    """
    if digest is None or manifest.digest_of(variant) == digest:
        return manifest
    form = "" if variant is None else f" as {variant!r}"
    raise RepositoryError(
        "ARTIFACT_MISSING",
        f"no stored version of block {manifest.name!r} has the digest {digest[:16]}...{form}",
        where=str(root / manifest.name),
        hint="it was replaced: send the system update again, or repeat the command, to have what "
        "is stored now (a rollback would name the old one again: post that epoch's topology, which "
        "`blockflow history --json` tells); to keep both, give what is exported a version of its "
        "own",
    )


def remove_unfinished(folder: int) -> None:
    """Remove what killed writers have left, unless another writer has the folder locked."""
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    unfinished = [e for e in os.listdir(folder) if UNFINISHED.fullmatch(e)]
    _tidy(folder, unfinished, _parsed(_raw(folder, MANIFEST_NAME)))


def _raw(folder: int, file: str) -> bytes:
    """A manifest's bytes; empty when it cannot be opened."""
    try:
        return _bytes(folder, file)
    except OSError:
        return b""


def _bytes(folder: int, file: str) -> bytes:
    with file_of(os.open(file, READ, dir_fd=folder)) as f:
        return f.read(MAX_MANIFEST_BYTES + 1)


def _parsed(raw: bytes) -> Manifest | None:
    try:
        return parse_manifest(raw, where="", folder=None)
    except RepositoryError:
        return None


def _write(folder: int, file: str, data: bytes) -> None:
    temp = f".manifest.{os.getpid()}"
    with removed_on_failure(folder, temp):
        _copy_in(folder, temp, data)
        os.replace(temp, file, src_dir_fd=folder, dst_dir_fd=folder)


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
        return digest_of(target.fileno()), target.seek(0, os.SEEK_END)


@contextmanager
def removed_on_failure(folder: int, name: str) -> Iterator[None]:
    """Leave no half of file ``name`` where its writing fails."""
    try:
        yield
    except BaseException:
        with suppress(OSError):
            os.unlink(name, dir_fd=folder)
        raise


@contextmanager
def written(path: Path) -> Iterator[None]:
    """Translate what the system refuses while a block is written."""
    try:
        yield
    except OSError as e:
        raise no_room(e, str(e), str(path)) or RepositoryError(
            "REPOSITORY_UNUSABLE",
            f"the block cannot be written: {e}",
            where=str(path),
            hint="check the folder and its permissions",
        ) from e
