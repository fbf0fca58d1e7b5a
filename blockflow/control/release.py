"""Release: whether the files of the package are still those of what runs.

Who installs another release over a running system changes what is read from disk from then on, and
nothing in the memory of who runs: a new interpreter is of the new release, a fork a mixture of both
(docs/control-plane.md, "Another release").
"""

from __future__ import annotations

import re
from pathlib import Path

from blockflow import __version__
from blockflow.core.errors import SystemError_

_LINE = re.compile(r'^__version__ = "([^"\n]+)"$', re.MULTILINE)
_PACKAGE = Path(__file__).parents[1] / "__init__.py"

REMEDY = "end the system, and start it again with `blockflow up`"
"""What to do where two releases have met."""


def replaced_by(package: Path = _PACKAGE) -> str:
    """The release whose files have taken the place of this one's; "" = none that can be told.

    Args:
        package: where the release stands, ``blockflow/__init__.py``.
    """
    try:
        found = _LINE.search(package.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return ""
    return found[1] if found is not None and found[1] != __version__ else ""


def warning() -> str:
    """What people should know of it; "" = nothing."""
    new = replaced_by()
    return f"the package is release {new} by now, and {__version__} runs: {REMEDY}" if new else ""


def refuse_mixture(cause: str) -> None:
    """A successor of a control plane that ended by ``cause`` would have this process's modules in
    memory and read others from the disk. Raises SystemError_ where those are of another release."""
    if new := replaced_by():
        raise SystemError_(
            "INTERNAL",
            f"the control plane ended ({cause}), and the package is release {new} by now: "
            "everything is ended",
            hint=f"`blockflow up` starts {new} from the stored state",
        )
