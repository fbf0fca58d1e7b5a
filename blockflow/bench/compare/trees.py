"""The two trees: the working tree as it is, and a revision in a temporary git worktree.

A worktree is removed however the run ends; after ``kill -9`` the next run does it. Each lies in a
folder with a lock that its process holds while it lives.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from blockflow.bench.git import git
from blockflow.bench.mlperf.job import disk
from blockflow.bench.options import nonsense
from blockflow.core.errors import BlockFlowError

SCRATCH = "make room, or name another folder with TMPDIR"
"""What helps where temporary files cannot be written."""

_PREFIX = "bf-compare-"
_LOCK, _TREE = "lock", "tree"


@dataclass(frozen=True, slots=True)
class Tree:
    """A folder with the sources of one arm.

    Attributes:
        folder: its root; ``folder / "blockflow"`` is the package.
        title: which revision it is, for a person.
    """

    folder: Path
    title: str


def resolve(repo: Path, revision: str) -> str:
    """The commit that ``revision`` names.

    Raises:
        RequestError: INVALID_REQUEST where it names none.
        SystemError_: MISSING_EXTRA without git.
    """
    # An option would be taken for one: "--" does not help with rev-parse.
    if revision.startswith("-") or not revision:
        raise nonsense(f"{revision!r} is not a revision", hint="for example HEAD~1")
    try:
        return git(repo, "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}").strip()
    except BlockFlowError as error:
        if error.code == "INVALID_REQUEST":
            error.message = f"no commit {revision!r}"  # git itself does not repeat it
        raise


def top_of(folder: Path) -> Path:
    """The root of the working tree that ``folder`` is in."""
    return Path(git(folder, "rev-parse", "--show-toplevel").strip())


def working_tree(repo: Path) -> Tree:
    """The tree as it is, changes and new files included."""
    commit = git(repo, "rev-parse", "--short", "HEAD").strip()
    changed = len(git(repo, "status", "--porcelain").splitlines())
    suffix = f" + {changed} changed files" if changed else ""
    return Tree(repo, f"working tree ({commit}{suffix})")


def state_of(repo: Path) -> str:
    """Changes whenever a file of the working tree that git knows or would add changes."""
    state = hashlib.sha256(git(repo, "rev-parse", "HEAD").encode())
    state.update(os.fsencode(git(repo, "diff", "HEAD", "--no-ext-diff", "--binary")))
    for name in git(repo, "ls-files", "--others", "--exclude-standard", "-z").split("\0"):
        state.update(os.fsencode(name))
        with contextlib.suppress(OSError):
            state.update((repo / name).read_bytes())
    return state.hexdigest()


@contextmanager
def worktree(repo: Path, revision: str) -> Iterator[Tree]:
    """``revision`` in a folder of its own, for as long as the context lasts.

    Raises:
        RequestError: INVALID_REQUEST where there is no such revision.
        SystemError_: NO_SPACE where there is no room for it.
    """
    commit = resolve(repo, revision)
    sweep(repo)
    with disk(Path(tempfile.gettempdir()), SCRATCH):
        root = Path(tempfile.mkdtemp(prefix=_PREFIX))
    with (root / _LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            git(repo, "worktree", "add", "--detach", "--quiet", str(root / _TREE), commit)
            short = git(repo, "rev-parse", "--short", commit).strip()
            yield Tree(root / _TREE, f"{revision} ({short})")
        finally:
            _remove(repo, root)


def sweep(repo: Path) -> None:
    """Remove the worktrees of runs that were killed."""
    for line in git(repo, "worktree", "list", "--porcelain").splitlines():
        folder = Path(line.removeprefix("worktree "))
        root = folder.parent
        if line.startswith("worktree ") and root.name.startswith(_PREFIX) and not _held(root):
            _remove(repo, root)


def _remove(repo: Path, root: Path) -> None:
    # Not ``prune``: it would forget other people's worktrees that are out of reach just now.
    with contextlib.suppress(BlockFlowError):
        git(repo, "worktree", "remove", "--force", str(root / _TREE))
    shutil.rmtree(root, ignore_errors=True)


def _held(root: Path) -> bool:
    try:
        with (root / _LOCK).open("r") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
