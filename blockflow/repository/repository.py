"""BlockRepository: a folder of block folders, read so that nothing unverified is ever loaded.

Layout: ``<root>/<block>/manifest.json`` and ``<root>/<block>/<artifact>``; earlier versions beside
them (:mod:`blockflow.repository.folder`). A folder without a manifest is not a block, and the
manifest is written last, so that a half-written block never shows. All opens go component by
component below the root without following links (O_NOFOLLOW).
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from blockflow.core.errors import ExportError, RepositoryError
from blockflow.core.guess import Guesses
from blockflow.core.model import BlockInfo, Variant
from blockflow.core.scarcity import AWAY, passed_over
from blockflow.repository.folder import (
    OPEN_FOLDER,
    OPEN_ROOT,
    READ,
    Pending,
    block_names,
    closed,
    digest_of,
    having,
    kept_file,
    kept_versions,
    place,
    put_manifest,
    read_manifest,
    refuse_link,
    remove_unfinished,
    split_reference,
    unopened,
    written,
)
from blockflow.repository.founding import founded
from blockflow.repository.journal import journalled, recover
from blockflow.repository.manifest import (
    MANIFEST_NAME,
    Choice,
    Manifest,
    VariantForm,
    is_block_name,
    is_version,
)


class BlockRepository:
    """Blocks below ``root``. Cheap to make; holds no descriptors between calls.

    A ``name`` may be a reference ``name@version``; without a version the current one is meant.
    Whoever knows the digest of what it wants gets the version that has it.

    Every method raises :class:`RepositoryError`: UNKNOWN_BLOCK (with near matches),
    CORRUPT_MANIFEST, ARTIFACT_MISSING, DIGEST_MISMATCH, or REPOSITORY_UNUSABLE for a link.
    """

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root)

    def names(self) -> list[str]:
        """Names of all blocks, sorted. A missing root is an empty repository."""
        recover(self.root)
        return block_names(self.root)

    def manifest(self, name: str, *, digest: str | None = None) -> Manifest:
        """A version's manifest.

        Args:
            name: the block.
            digest: the sha256 of the artifact that is wanted: if no stored version has it, the
                answer is ARTIFACT_MISSING.
        """
        with self._block_folder(name) as folder:
            _, manifest = self._choose(folder, name, digest)
        return having(manifest, digest, None, self.root)

    def info(self, name: str, *, digest: str | None = None) -> BlockInfo:
        return self.manifest(name, digest=digest).to_info()

    def versions(self, name: str) -> list[str]:
        """Labels of the stored versions of a block: the current one, then the others by label."""
        with self._block_folder(name) as folder:
            current = self._read_manifest(folder, split_reference(name)[0]).version
            return [current, *(v for v in kept_versions(folder) if v != current)]

    def refuse_stored(self, names: Sequence[str], version: str) -> None:
        """Raises ExportError: VERSION_EXISTS when one of these blocks is there in ``version``."""
        taken = [n for n in names if n in self.names() and version in self.versions(n)]
        if taken:
            raise ExportError(
                "VERSION_EXISTS",
                f"version {version} of {', '.join(taken)} is stored already",
                where=str(self.root),
                hint="give another --version, or --force to replace it",
            )

    @contextmanager
    def artifact(
        self,
        name: str,
        *,
        digest: str | None = None,
        variant: str | None = None,
        check: bool = True,
    ) -> Iterator[Path]:
        """Open the artifact, check its digest, and lend a path to that very open file.

        The path (``/proc/self/fd/N``) is valid inside the ``with`` only; the bytes that were hashed
        are the ones that are read, whatever happens to the folder meanwhile.

        Args:
            name: the block.
            digest: the sha256 that the caller expects (a topology's or a launch order's), of
                whichever version; the manifest's own digest is always checked.
            variant: a further form of the artifact; None is the artifact itself. ``digest`` is
                that form's.
            check: False lends it unhashed, to who believes nothing of what it says.
        """
        with self._block_folder(name) as folder:
            pinned, fd = self._open_pinned(folder, name, variant, digest)
            try:
                if check:
                    self._check(fd, name, pinned)
                os.lseek(fd, 0, os.SEEK_SET)
                yield Path(f"/proc/self/fd/{fd}")
            finally:
                os.close(fd)

    def verify(
        self, name: str, *, variant: str | None = None, digest: str | None = None
    ) -> Manifest:
        """Read the manifest and hash the artifact (or variant, whose ``digest`` it is then);
        returns the manifest when all is well."""
        with self.artifact(name, variant=variant, digest=digest):
            return self.manifest(name, digest=None if variant else digest)

    def save(self, manifest: Manifest, artifact: Path | bytes) -> BlockInfo:
        """Store a block as the current version: :meth:`save_all` of one, replacing its label."""
        return self.save_all([(manifest, artifact)])[0]

    def save_all(
        self, blocks: Sequence[tuple[Manifest, Path | bytes]], *, replace_stored: bool = True
    ) -> list[BlockInfo]:
        """Store blocks as current versions, durably; all of them, or none where one fails or the
        process is killed (:mod:`blockflow.repository.journal`).

        What was current under another version label is kept; the same label is replaced, unless
        ``replace_stored`` is False. ``artifact``, ``sha256`` and ``size`` are filled in from the
        bytes; a file has its digest in its name, so a reader of the old manifest finds the old file
        or starts over. Only this class writes here: locks on the blocks' folders order its users.

        Raises:
            ExportError: VERSION_EXISTS.
            RepositoryError: REPOSITORY_UNUSABLE: a folder is a link, or cannot be written.
            SystemError_: NO_SPACE when the disk is full.
        """
        with ExitStack() as stack:
            folders: dict[str, int] = {}
            for name in sorted(m.name for m, _ in blocks):  # lest two writers wait for each other
                folders[name] = stack.enter_context(founded(self.root / name, self._locked))
            for manifest, _ in () if replace_stored else blocks:
                self.refuse_stored([manifest.name], manifest.version)
            made: list[Pending] = []
            try:
                for manifest, artifact in blocks:
                    with written(self.root / manifest.name):
                        made.append(Pending(folders[manifest.name], manifest, artifact))
                with written(self.root), journalled(self.root, made):
                    for pending in made:
                        with written(self.root / pending.manifest.name):
                            pending.put()
            except BaseException:
                for pending in made:
                    pending.undo()
                raise
            for pending in made:
                pending.finish()
        return [p.manifest.to_info() for p in made]

    def save_variant(
        self, name: str, kind: str, variant: VariantForm, data: Path | bytes, *, digest: str
    ) -> BlockInfo:
        """Store a further form of a block's artifact and pin it in the manifest
        (:meth:`Manifest.with_variant`).

        ``variant``'s ``file``, ``digest`` and ``bytes`` are filled in from the data.

        Args:
            name: the block.
            kind: of variant, a key of :data:`blockflow.core.engines.VARIANTS`.
            variant: what is known of it.
            data: its bytes.
            digest: of the artifact that it was made of.

        Raises:
            RepositoryError: DIGEST_MISMATCH when the block has been replaced meanwhile.
            SystemError_: NO_SPACE when the disk is full.
        """
        with self._locked(name) as folder:
            stored_in, manifest = self._choose(folder, name, digest)
            if manifest.sha256 != digest:
                raise self._mismatch(name, "the block was replaced while it was being converted")
            file, found, size = place(folder, data, kind)
            pinned = variant.model_copy(update={"file": file, "digest": found, "bytes": size})
            stored = manifest.with_variant(kind, pinned)
            put_manifest(folder, stored, stored_in)
        return stored.to_info()

    def save_choice(self, measured: BlockInfo, machine: str, choice: Choice) -> BlockInfo:
        """Record what ``engine: auto`` means for a block on a machine.

        Args:
            measured: the block, with the variants that it had when it was measured.
            machine: its fingerprint.
            choice: what was measured and chosen.

        Raises:
            RepositoryError: DIGEST_MISMATCH when the block, or a variant that was chosen, has been
                replaced meanwhile.
        """
        with self._locked(measured.name) as folder:
            stored_in, manifest = self._choose(folder, measured.name, measured.digest)
            stored = manifest.with_choice(machine, choice, measured)
            if stored is None:
                why = "the block was replaced while it was being measured"
                raise self._mismatch(measured.name, why)
            put_manifest(folder, stored, stored_in)
        return stored.to_info()

    def sweep(self) -> None:
        """Remove what writers that were killed have left in the folders of all blocks."""
        for path in self.root.iterdir() if self.root.is_dir() else ():
            with suppress(RepositoryError), self._block_folder(path.name) as folder:
                remove_unfinished(folder)

    @contextmanager
    def _locked(self, name: str) -> Iterator[int]:
        """The block's folder, for writing."""
        with written(self.root / split_reference(name)[0]), self._block_folder(name) as folder:
            fcntl.flock(folder, fcntl.LOCK_EX)
            recover(self.root, wait=True)
            yield folder

    @contextmanager
    def _block_folder(self, reference: str) -> Iterator[int]:
        name, at, version = reference.partition("@")
        if at and not is_version(version):
            name = reference
        if not is_block_name(name):
            raise RepositoryError(
                "UNKNOWN_BLOCK",
                f"{name[:80]!r} is not a block name",
                where=str(self.root),
                hint="a name starts with a letter; letters, digits, '_', '.' and '-' follow",
            )
        recover(self.root)
        try:
            root = os.open(self.root, OPEN_ROOT)
        except OSError as e:
            raise unopened(e, self.root) or RepositoryError(
                "UNKNOWN_BLOCK",
                f"no block {name!r}: the repository cannot be opened: {e.strerror}",
                where=str(self.root),
                hint="export a block first, or name another repository",
                details={AWAY: True},
            ) from None
        try:
            folder = os.open(name, OPEN_FOLDER, dir_fd=root)
        except OSError as e:
            refuse_link(path := self.root / name)
            raise unopened(e, path) or closed(e, path) or self._unknown(name) from None
        finally:
            os.close(root)
        try:
            yield folder
        finally:
            os.close(folder)

    def _unknown(self, name: str) -> RepositoryError:
        guesses = Guesses(self.names())
        known = guesses.known
        hint = guesses.hint(name) or f"known: {', '.join(known[:10])}{' ...' if known[10:] else ''}"
        return RepositoryError(
            "UNKNOWN_BLOCK",
            f"no block {name!r}",
            where=str(self.root),
            hint=hint if known else "the repository is empty: export a block first",
            # A mount that is not there leaves an empty folder.
            details={"near": guesses.near(name)} | ({} if known else {AWAY: True}),
        )

    def _choose(
        self, folder: int, reference: str, digest: str | None = None, variant: str | None = None
    ) -> tuple[str, Manifest]:
        """The manifest's file, and the manifest, of the version that is meant.

        ``digest`` is that of the artifact, or of its variant. A version that has it goes before the
        one that is named; where none has it, the caller will see that it differs.
        """
        name, version = split_reference(reference)
        file, chosen = MANIFEST_NAME, self._read_manifest(folder, name)
        if version and version != chosen.version:
            if version not in kept_versions(folder):
                raise RepositoryError(
                    "UNKNOWN_BLOCK",
                    f"no version {version!r} of block {name!r}",
                    where=str(self.root / name),
                    hint=f"stored versions: {', '.join(self.versions(name))}",
                )
            file = kept_file(version)
            chosen = self._read_manifest(folder, name, file)
        if digest is None or chosen.digest_of(variant) == digest:
            return file, chosen
        for other in (MANIFEST_NAME, *map(kept_file, kept_versions(folder))):
            with passed_over():  # a broken or vanished version is not the one
                found = self._read_manifest(folder, name, other)
                if found.digest_of(variant) == digest:
                    return other, found
        return file, chosen

    def _read_manifest(self, folder: int, name: str, file: str = MANIFEST_NAME) -> Manifest:
        try:
            return read_manifest(folder, self.root / name / file, name, file)
        except FileNotFoundError:
            raise self._unknown(name) from None

    def _open_pinned(
        self, folder: int, name: str, variant: str | None, digest: str | None
    ) -> tuple[Variant, int]:
        # A block that is replaced between the two opens is read again: the new pair is there. The
        # file is missing only if the manifest that names it is still in force.
        before: Manifest | None = None
        while True:
            _, manifest = self._choose(folder, name, digest, variant)
            pinned = self._pinned(having(manifest, digest, variant, self.root), variant)
            try:
                fd = os.open(pinned.file, READ, dir_fd=folder)
            except FileNotFoundError:
                if manifest != before:
                    before = manifest
                    continue
                reason = "the file is not there"
            except OSError as e:
                lacking, reason = unopened(e, self.root / name / pinned.file), str(e.strerror)
                if lacking is not None:
                    raise lacking from e
            else:
                if stat.S_ISREG(os.fstat(fd).st_mode):
                    return pinned, fd
                os.close(fd)
                reason = "not a regular file"
            break
        again = "export the block again" if variant is None else "convert the block again"
        raise RepositoryError(
            "ARTIFACT_MISSING",
            f"artifact {pinned.file!r} cannot be opened: {reason}",
            where=str(self.root / name),
            hint=f"artifacts are built, not committed: {again}",
        )

    def _pinned(self, manifest: Manifest, variant: str | None) -> Variant:
        if variant is None:
            return Variant(manifest.artifact, manifest.sha256, manifest.size)
        found = manifest.variants.get(variant)
        if found is None:
            raise RepositoryError(
                "ARTIFACT_MISSING",
                f"block {manifest.name!r} has no variant {variant!r}",
                where=str(self.root / manifest.name),
                hint=f"make it: blockflow convert {manifest.to_info().reference} --to {variant}",
            )
        return found.to_variant()

    def _check(self, fd: int, name: str, pinned: Variant) -> None:
        where = f"{name}/{pinned.file}"
        if (size := os.fstat(fd).st_size) != pinned.bytes:
            why = f"the artifact has {size} bytes, the manifest says {pinned.bytes}"
            raise self._mismatch(where, why)
        try:
            found = digest_of(fd)
        except OSError as e:
            raise unopened(e, self.root / where) or e from None
        if found != pinned.digest:
            why = f"sha256 is {found[:16]}..., the manifest says {pinned.digest[:16]}..."
            raise self._mismatch(where, why)

    def _mismatch(self, what: str, why: str) -> RepositoryError:
        return RepositoryError(
            "DIGEST_MISMATCH",
            why,
            where=str(self.root / what),
            hint="the file was altered or replaced: make the block again",
        )
