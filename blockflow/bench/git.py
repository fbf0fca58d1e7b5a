"""Git: what a repository says of the sources that are measured."""

from __future__ import annotations

import os
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import blockflow
from blockflow.bench.options import nonsense
from blockflow.core.errors import BlockFlowError, make_error

PACKAGE = Path(blockflow.__file__).parent
COMMIT, DIRTY = "commit", "dirty"
_DIGITS = 12

_OF_ANOTHER_CALL = frozenset({"GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX"})
"""What a git hook leaves in the environment: it would win over the folder."""


def git(folder: Path, *arguments: str) -> str:
    """Standard output of a git command; bytes that are no text, in a name or a diff, as
    :func:`os.fsencode` gives them back.

    Raises:
        RequestError: INVALID_REQUEST with what git says.
        SystemError_: MISSING_EXTRA without git.
    """
    try:
        done = subprocess.run(
            # No hooks, and no lock on the index for a mere look.
            ["git", "--no-optional-locks", "-c", "core.hooksPath=", "-C", str(folder), *arguments],
            env={k: v for k, v in os.environ.items() if k not in _OF_ANOTHER_CALL},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
        )
    except FileNotFoundError:
        raise make_error(
            "MISSING_EXTRA", "git is not installed", hint="comparing revisions needs git"
        ) from None
    if done.returncode:
        raise nonsense(
            f"git {arguments[0]}: {done.stderr.decode(errors='replace').strip()}",
            str(folder),
            "BASE is a revision of this repository: a commit, a tag, HEAD~1",
        )
    return os.fsdecode(done.stdout)


@cache
def revision_of(package: Path = PACKAGE) -> dict[str, Any]:
    """The commit that a package's sources are of, and whether tracked files differ from it.

    Returns:
        ``commit`` and ``dirty``; nothing where the package is in no git tree, or one that does not
        track it: an installed copy in somebody else's repository. Found once per process.
    """
    try:
        git(package, "ls-files", "--error-unmatch", "__init__.py")
        commit = git(package, "rev-parse", f"--short={_DIGITS}", "HEAD").strip()
        changed = git(package, "status", "--porcelain", "--untracked-files=no").strip()
    except BlockFlowError:
        return {}
    return {COMMIT: commit, DIRTY: bool(changed)}
