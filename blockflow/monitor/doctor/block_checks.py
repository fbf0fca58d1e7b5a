"""What the doctor says of the stored blocks: who may change them, whether they are whole. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from blockflow.monitor.doctor.facts import Facts, Finding, Level

_SHOWN = 5


def repository(f: Facts) -> Iterator[Finding]:
    name, folder = "repository", f.repository
    if not folder.exists:
        remedy = "export blocks into it (blockflow export), or name another one: --repository"
        yield Finding(name, Level.WARNING, f"there is no folder {folder.path}", remedy)
        return
    if folder.mode & 0o002:
        text = f"anybody can write to {folder.path}, and blocks are code that is run"
        yield Finding(name, Level.ERROR, text, f"chmod o-w {folder.path}")
    if folder.loose:
        text = f"anybody can write to {_some(folder.loose)}, and blocks are code that is run"
        yield Finding(name, Level.ERROR, text, f"chmod -R o-w {folder.path}")
    if folder.foreign:
        text = f"{_some(folder.foreign)}: another user's, who decides what code is run"
        remedy = f"chown -R it to this user or to root: {folder.path}"
        yield Finding(name, Level.WARNING, text, remedy)
    bad = [b for b in f.blocks if b.problem]
    for block in bad:
        remedy = block.remedy or "export the block again"
        yield Finding(name, Level.ERROR, f"{block.name}: {block.problem}", remedy)
    if not f.blocks:
        remedy = "blockflow export; or blockflow demo, which makes some of its own"
        yield Finding(name, Level.NOTE, f"no block in {folder.path} yet", remedy)
    elif not bad:
        how = "every artifact is what its manifest says" if f.hashed else "sizes are right"
        yield Finding(name, Level.OK, f"{len(f.blocks)} blocks in {folder.path}; {how}")
    if not f.hashed:
        remedy = "blockflow doctor --all reads them as a whole"
        yield Finding(name, Level.NOTE, "large artifacts were not hashed, to be quick", remedy)


def profiles(f: Facts) -> Iterator[Finding]:
    lacking = [b.name for b in f.blocks if b.profile and not b.problem]
    if lacking:
        text = f"no profile of this machine holds for {', '.join(lacking)}"
        remedy = f"blockflow profile {' '.join(lacking)}"
        yield Finding("profiles", Level.NOTE, text, remedy)
    elif f.blocks:
        yield Finding("profiles", Level.OK, "fresh")


def _some(paths: Sequence[str]) -> str:
    more = len(paths) - _SHOWN
    return ", ".join(paths[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
